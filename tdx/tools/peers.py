"""What others offer, measured in the same process and run: NCCL and symmetric memory of PyTorch.

PyTorch is only used when it is installed; without it, or off the GPU, every peer is left out.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.tools.timing import replay_time

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["Peers", "open_peers"]

_CALLS = 20


class Peers:
    """No peers: what is measured without PyTorch or without a GPU."""

    names = ""

    def all_reduce(self, values: np.ndarray) -> dict[str, float]:
        """Microseconds by peer for one all-reduce of `values`."""
        return {}

    def reduce_scatter(self, values: np.ndarray) -> dict[str, float]:
        """Microseconds by peer for one reduce-scatter of `values`."""
        return {}

    def all_gather(self, values: np.ndarray) -> dict[str, float]:
        """The same for an all-gather of every rank's `values`, uint8."""
        return {}

    def all_to_all(self, values: np.ndarray) -> dict[str, float]:
        """The same for an all-to-all of `values`, uint8, a multiple of the ranks."""
        return {}

    def broadcast(self, values: np.ndarray) -> dict[str, float]:
        """The same for a broadcast of rank 0's `values`, uint8."""
        return {}

    def all_reduce_rms_norm(self, values: np.ndarray) -> dict[str, float]:
        """The same for an all-reduce of `values`, a residual, and the norm of rows."""
        return {}

    def matmul_all_reduce(self, a: np.ndarray, b: np.ndarray) -> dict[str, float]:
        """The same for a . b alone ("library"), and followed by an all-reduce."""
        return {}

    def close(self) -> None:
        """End the peers' own communicators."""


class TorchPeers(Peers):
    """NCCL through torch.distributed, and torch's symmetric memory."""

    def __init__(self, world: World):
        # multicast can take shared GPUs out of service: comparisons are without it
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm

        self._world, self._torch, self._dist, self._symm = world, torch, dist, symm
        torch.cuda.set_device(world.device.index)
        port = _free_port() if world.rank == 0 else 0
        port = int(world.channels.allgather(str(port).encode(), "peers' port")[0])
        store = dist.TCPStore("127.0.0.1", port, world.size, world.rank == 0)
        device = torch.device("cuda", world.device.index)
        dist.init_process_group(
            "nccl", store=store, rank=world.rank, world_size=world.size, device_id=device
        )
        self._group: Any = dist.group.WORLD
        self._stream = torch.cuda.ExternalStream(world.stream.handle, device=device)
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        self.names = f"torch {torch.__version__}, NCCL {version}"

    def all_reduce(self, values: np.ndarray) -> dict[str, float]:
        torch, symm = self._torch, self._symm
        dtype = getattr(torch, values.dtype.name)
        x = torch.from_numpy(values.astype(np.float32)).to(device="cuda", dtype=dtype)
        times = {"nccl": self._time(lambda: self._dist.all_reduce(x))}
        # torch's symmetric kernels need whole 16-byte vectors on every rank
        if values.nbytes % (16 * self._world.size) or values.dtype.name not in (
            "bfloat16",
            "float32",
        ):
            return times
        shared = symm.empty(x.shape, dtype=dtype, device="cuda")
        symm.rendezvous(shared, self._group)
        shared.copy_(x)
        name = self._group.group_name
        ops = torch.ops.symm_mem
        if values.nbytes <= 16 << 20:
            one_shot = partial(ops.one_shot_all_reduce, shared, "sum", name)
            times["torch_one_shot"] = self._time(one_shot)
        times["torch_two_shot"] = self._time(lambda: ops.two_shot_all_reduce_(shared, "sum", name))
        return times

    def reduce_scatter(self, values: np.ndarray) -> dict[str, float]:
        torch = self._torch
        dtype = getattr(torch, values.dtype.name)
        x = torch.from_numpy(values.astype(np.float32)).to(device="cuda", dtype=dtype)
        out = torch.empty(x.numel() // self._world.size, dtype=dtype, device="cuda")
        return {"nccl": self._time(lambda: self._dist.reduce_scatter_tensor(out, x))}

    def all_gather(self, values: np.ndarray) -> dict[str, float]:
        x = self._torch.from_numpy(values).to("cuda")
        out = self._torch.empty(self._world.size * x.numel(), dtype=x.dtype, device="cuda")
        return {"nccl": self._time(lambda: self._dist.all_gather_into_tensor(out, x))}

    def all_to_all(self, values: np.ndarray) -> dict[str, float]:
        x = self._torch.from_numpy(values).to("cuda")
        out = self._torch.empty_like(x)
        return {"nccl": self._time(lambda: self._dist.all_to_all_single(out, x))}

    def broadcast(self, values: np.ndarray) -> dict[str, float]:
        x = self._torch.from_numpy(values).to("cuda")
        return {"nccl": self._time(lambda: self._dist.broadcast(x, src=0))}

    def all_reduce_rms_norm(self, values: np.ndarray) -> dict[str, float]:
        torch = self._torch
        dtype = getattr(torch, values.dtype.name)
        x = torch.from_numpy(values.astype(np.float32)).to(device="cuda", dtype=dtype)
        residual, weight = torch.ones_like(x), torch.ones_like(x[0])

        def call() -> None:
            self._dist.all_reduce(x)
            torch.nn.functional.rms_norm(x + residual, weight.shape, weight, 1e-6)

        return {"nccl": self._time(call)}

    def matmul_all_reduce(self, a: np.ndarray, b: np.ndarray) -> dict[str, float]:
        torch = self._torch
        dtype = getattr(torch, a.dtype.name)
        x, y = (
            torch.from_numpy(v.astype(np.float32)).to(device="cuda", dtype=dtype) for v in (a, b)
        )
        out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device="cuda")

        def both() -> None:
            torch.mm(x, y, out=out)
            self._dist.all_reduce(out)

        return {"library": self._time(lambda: torch.mm(x, y, out=out)), "nccl": self._time(both)}

    def _time(self, call: Callable[[], Any]) -> float:
        """As device_time, with PyTorch's own graphs."""
        torch = self._torch
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            for _ in range(_CALLS):
                call()
        torch.cuda.synchronize()

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                recorded.replay()

        replay()
        return replay_time(self._world, replay, _CALLS)

    def close(self) -> None:
        self._dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_peers(world: World) -> Peers:
    """The peers that can be measured here."""
    if world.backend == "cuda" and world.size > 1 and importlib.util.find_spec("torch"):
        return TorchPeers(world)
    return Peers()
