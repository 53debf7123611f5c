"""tdx: framework-neutral distributed Triton kernels.

Ranks start with MPI, share symmetric memory, and run stock-Triton kernels that read, write and
signal each other's memory inside the kernel. See README.md and docs/architecture.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tdx import errors
from tdx.runtime.config import config

if TYPE_CHECKING:
    from tdx import language as language
    from tdx.kernels.all_gather import AllGather as AllGather
    from tdx.kernels.all_gather import all_gather as all_gather
    from tdx.kernels.all_gather_matmul import AllGatherMatmul as AllGatherMatmul
    from tdx.kernels.all_gather_matmul import all_gather_matmul as all_gather_matmul
    from tdx.kernels.all_reduce import AllReduce as AllReduce
    from tdx.kernels.all_reduce import all_reduce as all_reduce
    from tdx.kernels.all_reduce_rms_norm import AllReduceRmsNorm as AllReduceRmsNorm
    from tdx.kernels.all_reduce_rms_norm import all_reduce_rms_norm as all_reduce_rms_norm
    from tdx.kernels.all_to_all import AllToAll as AllToAll
    from tdx.kernels.all_to_all import all_to_all as all_to_all
    from tdx.kernels.barrier import Barrier as Barrier
    from tdx.kernels.barrier import barrier as barrier
    from tdx.kernels.broadcast import Broadcast as Broadcast
    from tdx.kernels.broadcast import broadcast as broadcast
    from tdx.kernels.matmul import matmul as matmul
    from tdx.kernels.matmul_all_reduce import MatmulAllReduce as MatmulAllReduce
    from tdx.kernels.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce
    from tdx.kernels.matmul_reduce_scatter import MatmulReduceScatter as MatmulReduceScatter
    from tdx.kernels.matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter
    from tdx.kernels.one_sided import get as get
    from tdx.kernels.one_sided import put as put
    from tdx.kernels.reduce import Reduce as Reduce
    from tdx.kernels.reduce import reduce as reduce
    from tdx.kernels.reduce_scatter import ReduceScatter as ReduceScatter
    from tdx.kernels.reduce_scatter import reduce_scatter as reduce_scatter
    from tdx.runtime.array import Array as Array
    from tdx.runtime.graph import graph as graph
    from tdx.runtime.init import init as init
    from tdx.runtime.world import World as World

__version__ = "0.1.0"

# where each public name lives; loaded when first used, so that `import tdx` stays cheap
_HOMES = {
    "AllGather": "tdx.kernels.all_gather",
    "AllGatherMatmul": "tdx.kernels.all_gather_matmul",
    "AllReduce": "tdx.kernels.all_reduce",
    "AllReduceRmsNorm": "tdx.kernels.all_reduce_rms_norm",
    "AllToAll": "tdx.kernels.all_to_all",
    "Array": "tdx.runtime.array",
    "Barrier": "tdx.kernels.barrier",
    "Broadcast": "tdx.kernels.broadcast",
    "MatmulAllReduce": "tdx.kernels.matmul_all_reduce",
    "MatmulReduceScatter": "tdx.kernels.matmul_reduce_scatter",
    "Reduce": "tdx.kernels.reduce",
    "ReduceScatter": "tdx.kernels.reduce_scatter",
    "World": "tdx.runtime.world",
    "all_gather": "tdx.kernels.all_gather",
    "all_gather_matmul": "tdx.kernels.all_gather_matmul",
    "all_reduce": "tdx.kernels.all_reduce",
    "all_reduce_rms_norm": "tdx.kernels.all_reduce_rms_norm",
    "all_to_all": "tdx.kernels.all_to_all",
    "barrier": "tdx.kernels.barrier",
    "broadcast": "tdx.kernels.broadcast",
    "get": "tdx.kernels.one_sided",
    "graph": "tdx.runtime.graph",
    "init": "tdx.runtime.init",
    "matmul": "tdx.kernels.matmul",
    "matmul_all_reduce": "tdx.kernels.matmul_all_reduce",
    "matmul_reduce_scatter": "tdx.kernels.matmul_reduce_scatter",
    "put": "tdx.kernels.one_sided",
    "reduce": "tdx.kernels.reduce",
    "reduce_scatter": "tdx.kernels.reduce_scatter",
    "language": "tdx.language",
}

__all__ = ["__version__", "config", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tdx' has no attribute {name!r}")
    if name == "init":
        importlib.import_module("tdx.interop")  # tells the world whose an array is
    module = importlib.import_module(home)
    value = module if home.endswith(f".{name}") and name == "language" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
