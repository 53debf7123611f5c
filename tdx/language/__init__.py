"""Functions for use inside `@triton.jit` kernels: peers, signals, copies and barriers.

One source serves NVIDIA GPUs, AMD GPUs and the host tier. Import it as

    import tdx.language as tdl

Every function accepts constexpr values, Python integers and tensors. Triton rejects `return` and
`break` inside loops, so a kernel carries the result of a wait on as a predicate. Wait by these
functions only: a loop on `tl.load` has no deadline, and a compiler may load once.
"""

from __future__ import annotations

from tdx.language.address import consume_token, num_ranks, rank, symm_at
from tdx.language.arrival import MAX_WAIT_ANY, nothing_done, wait_any
from tdx.language.collective import barrier, epoch, grid_barrier, num_blocks
from tdx.language.memory import (
    broadcast,
    fence,
    fence_async_proxy,
    get,
    put,
    put_signal,
    quiet,
)
from tdx.language.signal import no_fault, notify, program_index, wait, wait_all
from tdx.language.words import load_ll, load_ll_all, store_ll

__all__ = [
    "MAX_WAIT_ANY",
    "barrier",
    "broadcast",
    "consume_token",
    "epoch",
    "fence",
    "fence_async_proxy",
    "get",
    "grid_barrier",
    "load_ll",
    "load_ll_all",
    "no_fault",
    "nothing_done",
    "notify",
    "num_blocks",
    "num_ranks",
    "program_index",
    "put",
    "put_signal",
    "quiet",
    "rank",
    "store_ll",
    "symm_at",
    "wait",
    "wait_all",
    "wait_any",
]
