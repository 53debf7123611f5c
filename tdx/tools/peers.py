"""What others offer, measured in the same process and run: NCCL and symmetric memory of PyTorch.

PyTorch is only used when it is installed; without it CuPy's NCCL and cuBLAS are, as far as they are
there. A peer that fails is left out of the times, and named with its reason under "failed".
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.kernels.library_product import start_library
from tdx.tools.comparison import attempt, shared_reason
from tdx.tools.product_peers import CublasProducts, Products, TorchProducts
from tdx.tools.timing import calls_for, warm_time

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["Makers", "Peers", "TimedPeers", "open_peers", "without_multicast"]

Makers = dict[str, Callable[[], Callable[[], Any]]]  # by name what gives a call


class Peers:
    """No collectives of others: what there is with neither PyTorch nor CuPy, or without a GPU.

    Attributes
    ----------
    names : str
        What there is, with versions.
    missing : str
        What there is not, and why.
    products : Products
    """

    names = ""

    def __init__(self, missing: str):
        self.missing = missing
        self.products = Products()

    def all_reduce(self, values: np.ndarray) -> dict[str, Any]:
        """Microseconds by peer for one all-reduce of `values`."""
        return {}

    def reduce_scatter(self, values: np.ndarray) -> dict[str, Any]:
        """Microseconds by peer for one reduce-scatter of `values`."""
        return {}

    def all_gather(self, values: np.ndarray) -> dict[str, Any]:
        """The same for an all-gather of every rank's `values`, uint8."""
        return {}

    def all_to_all(self, values: np.ndarray) -> dict[str, Any]:
        """The same for an all-to-all of `values`, uint8, a multiple of the ranks."""
        return {}

    def broadcast(self, values: np.ndarray) -> dict[str, Any]:
        """The same for a broadcast of rank 0's `values`, uint8."""
        return {}

    def close(self) -> None:
        """End the peers' own communicators and libraries."""
        self.products.close()


class TimedPeers(Peers):
    """Peers that are there, in `world`."""

    def __init__(self, world: World, missing: str = ""):
        super().__init__(missing)
        self._world = world

    def recorded(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        """What replays `calls` calls on the world's stream."""
        raise NotImplementedError

    def _times(self, makers: Makers, nbytes: int) -> dict[str, Any]:
        """Microseconds of what each maker gives, as device_time; `nbytes` of the bench's row."""
        times: dict[str, Any] = {}
        calls = calls_for(nbytes)
        for name, make in makers.items():
            replay, reason = attempt(self._world, name, partial(self._made, make, calls))
            if reason:
                times.setdefault("failed", {})[name] = reason
            else:
                times[name] = warm_time(self._world, replay, calls)
        return times

    def _made(self, make: Callable[[], Callable[[], Any]], calls: int) -> Callable[[], None]:
        return self.recorded(make(), calls)


def without_multicast() -> str:
    """What is said of NCCL and torch's symmetric memory where they may not use NVLink multicast.

    It can take GPUs that others share out of service, so comparisons are without it unless the
    user's environment asks for it.
    """
    off = os.environ.setdefault("NCCL_NVLS_ENABLE", "0") == "0"
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return " without NVLS" if off else ""


class TorchPeers(TimedPeers):
    """NCCL through torch.distributed, and torch's symmetric memory."""

    def __init__(self, world: World, port: int):
        """Collective; rank 0 listens on `port`."""
        super().__init__(world)
        condition = without_multicast()
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm

        self.torch, self.dist = torch, dist
        self.symm: Any = symm
        torch.cuda.set_device(world.device.index)
        store = dist.TCPStore("127.0.0.1", port, world.size, world.rank == 0)
        device = torch.device("cuda", world.device.index)
        # replays, and with them the world's current stream, are on the world's own
        torch.cuda.set_stream(torch.cuda.ExternalStream(world.stream.own, device=device))
        dist.init_process_group(
            "nccl", store=store, rank=world.rank, world_size=world.size, device_id=device
        )
        self.group: Any = dist.group.WORLD
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        self.names = f"torch {torch.__version__}, NCCL {version}{condition}"
        self.products = TorchProducts(self)

    def all_reduce(self, values: np.ndarray) -> dict[str, Any]:
        x = self._floats(values)
        ops, name = self.torch.ops.symm_mem, self.group.group_name

        def one_shot() -> Callable[[], Any]:
            return partial(ops.one_shot_all_reduce, self._symmetric(x), "sum", name)

        def two_shot() -> Callable[[], Any]:
            return partial(ops.two_shot_all_reduce_, self._symmetric(x), "sum", name)

        makers: Makers = {"nccl": lambda: partial(self.dist.all_reduce, x)}
        # torch's symmetric kernels need whole 16-byte vectors on every rank
        whole = values.nbytes % (16 * self._world.size) == 0
        if whole and values.dtype.name in ("bfloat16", "float32"):
            if values.nbytes <= 16 << 20:
                makers["torch_one_shot"] = one_shot
            makers["torch_two_shot"] = two_shot
        return self._times(makers, values.nbytes)

    def reduce_scatter(self, values: np.ndarray) -> dict[str, Any]:
        x = self._floats(values)
        out = self.torch.empty(x.numel() // self._world.size, dtype=x.dtype, device="cuda")
        makers: Makers = {"nccl": lambda: partial(self.dist.reduce_scatter_tensor, out, x)}
        return self._times(makers, values.nbytes)

    def all_gather(self, values: np.ndarray) -> dict[str, Any]:
        x = self.torch.from_numpy(values).to("cuda")
        out = self.torch.empty(self._world.size * x.numel(), dtype=x.dtype, device="cuda")
        makers: Makers = {"nccl": lambda: partial(self.dist.all_gather_into_tensor, out, x)}
        return self._times(makers, out.nbytes)

    def all_to_all(self, values: np.ndarray) -> dict[str, Any]:
        x = self.torch.from_numpy(values).to("cuda")
        out = self.torch.empty_like(x)
        makers: Makers = {"nccl": lambda: partial(self.dist.all_to_all_single, out, x)}
        return self._times(makers, values.nbytes)

    def broadcast(self, values: np.ndarray) -> dict[str, Any]:
        x = self.torch.from_numpy(values).to("cuda")
        makers: Makers = {"nccl": lambda: partial(self.dist.broadcast, x, src=0)}
        return self._times(makers, values.nbytes)

    def _floats(self, values: np.ndarray) -> Any:
        """`values` as a tensor of the same type."""
        dtype = getattr(self.torch, values.dtype.name)
        return self.torch.from_numpy(values.astype(np.float32)).to(device="cuda", dtype=dtype)

    def _symmetric(self, x: Any) -> Any:
        """A copy of tensor `x` in symmetric memory."""
        shared = self.symm.empty(x.shape, dtype=x.dtype, device="cuda")
        self.symm.rendezvous(shared, self.group)
        shared.copy_(x)
        return shared

    def stream(self) -> Any:
        """PyTorch's current stream."""
        return self.torch.cuda.current_stream()

    def recorded(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        """What replays `calls` calls on the world's stream, recorded by PyTorch."""
        torch = self.torch
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        torch.cuda.synchronize()

        def replay() -> None:
            graph.replay()
            _ = call  # the graph does not hold what it uses

        return replay

    def close(self) -> None:
        self.dist.destroy_process_group()
        self.torch.cuda.set_stream(self.torch.cuda.default_stream(self._world.device.index))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_peers(world: World) -> Peers:
    """The peers that can be measured here. Collective."""
    if world.backend != "cuda":
        return Peers(f"the {world.backend} backend has none")
    if world.size == 1:
        return Peers("one rank has none")
    missing = shared_reason(world, "PyTorch", _no_torch())
    if missing:
        return _without_torch(world, missing)
    port = str(_free_port() if world.rank == 0 else 0)
    port = world.channels.allgather(port.encode(), "peers' port")[0].decode()
    peers, reason = attempt(world, "peers", lambda: TorchPeers(world, int(port)))
    return Peers(f"PyTorch does not start: {reason}") if reason else peers


def _without_torch(world: World, missing: str) -> Peers:
    """CuPy's NCCL and cuBLAS, as far as they are there."""
    from tdx.tools.cupy_peers import CupyPeers

    peers = _cupy_peers(world, missing)
    cublas, reason = attempt(world, "cuBLAS", lambda: start_library(world))
    if reason:
        peers.products.missing = reason
    else:
        nccl = peers if isinstance(peers, CupyPeers) else None
        peers.products = CublasProducts(world, nccl)
        peers.names = ", ".join(filter(None, (peers.names, cublas.name)))
    return peers


def _cupy_peers(world: World, missing: str) -> Peers:
    """NCCL through CuPy, where that has it; `missing`: why there is no PyTorch."""
    found = importlib.util.find_spec("cupy")
    reason = shared_reason(world, "CuPy", "" if found else "CuPy is not installed")
    if not reason:
        from tdx.tools.cupy_peers import CupyPeers, unique_id

        number, reason = attempt(
            world, "NCCL's id", lambda: unique_id() if world.rank == 0 else b""
        )
        if not reason:
            number = world.channels.allgather(number, "peers' id")[0]
            missing = f"{missing}, and CuPy has NCCL's collectives only"
            peers, reason = attempt(world, "peers", lambda: CupyPeers(world, number, missing))
            if not reason:
                return peers
        reason = f"CuPy's NCCL does not start: {reason}"
    return Peers(f"{missing}; {reason}")


def _no_torch() -> str:
    """Why there is no PyTorch to compare with on this rank, or ""."""
    if not importlib.util.find_spec("torch"):
        return "PyTorch is not installed"
    try:
        import torch

        return "" if torch.cuda.is_available() else "PyTorch finds no GPU"
    except Exception as error:
        return f"PyTorch cannot be imported: {type(error).__name__}: {error}"
