"""Ways to products over ranks that PyTorch offers: its matmul with a collective, and async-TP.

A way has the name of its column: `library` is torch.mm alone, `nccl+library` with a collective of
NCCL, `tdx+library` with one of tdx, `symm+library` with one of PyTorch's symmetric memory.
`async_tp` is PyTorch's own overlapped product; it is called eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tdx.tools.comparison import Way

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.tools.peers import TorchPeers

__all__ = ["Makers", "Products", "TorchProducts"]

Makers = dict[str, Callable[[], Way]]


class Products:
    """None: what there is without PyTorch or without a GPU."""

    def matmul(self, a: Array, b: Array, out: Array) -> Makers:
        """The product alone, a (M, K) . b (K, N) to out (M, N)."""
        return {}

    def all_gather_matmul(self, a: Array, b: Array, out: Array, gather: Any) -> Makers:
        """a (M / size, K), b (K, N), out (M, N); `gather` is a plan of tdx for a."""
        return {}

    def matmul_reduce_scatter(
        self, a: Array, b: Array, partial_: Array, out: Array, scatter: Any
    ) -> Makers:
        """a (M, K), b (K, N), partial_ (M, N), out (M / size, N); `scatter` is a plan of tdx."""
        return {}

    def matmul_all_reduce(
        self, a: Array, b: Array, partial_: Array, out: Array, reduction: Any
    ) -> Makers:
        """a (M, K), b (K, N), partial_ and out (M, N); `reduction` is a plan of tdx."""
        return {}

    def all_reduce_rms_norm(
        self, x: Array, weight: Array, residual: Array, eps: float, out: Array
    ) -> Makers:
        """x, residual and out (M, N), weight (N,)."""
        return {}


class TorchProducts(Products):
    """With PyTorch on the world's GPUs."""

    def __init__(self, peers: TorchPeers):
        self._peers = peers
        self._torch, self._dist = peers.torch, peers.dist

    def matmul(self, a: Array, b: Array, out: Array) -> Makers:
        def library() -> Way:
            return self._recorded(self._product(a, b, out))

        return {"library": library}

    def all_gather_matmul(self, a: Array, b: Array, out: Array, gather: Any) -> Makers:
        def nccl() -> Way:
            x, y, to = self._tensors(a, b, out)
            whole = self._torch.empty((to.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)

            def call() -> None:
                self._dist.all_gather_into_tensor(whole, x)
                self._torch.mm(whole, y, out=to)

            return self._recorded(call)

        def ours() -> Way:
            product = self._product(gather(a), b, out)

            def call() -> None:
                gather(a)
                product()

            return Way(call)

        def async_tp() -> Way:
            x, y, to = self._tensors(a, b, out)
            operation = self._torch.ops.symm_mem.fused_all_gather_matmul
            call = partial(operation, x, [y], 0, self._peers.group.group_name)
            return self._eager(call, lambda value: to.copy_(value[1][0]))

        return {"nccl+library": nccl, "tdx+library": ours, "async_tp": async_tp}

    def matmul_reduce_scatter(
        self, a: Array, b: Array, partial_: Array, out: Array, scatter: Any
    ) -> Makers:
        def nccl() -> Way:
            x, y, whole, to = self._tensors(a, b, partial_, out)

            def call() -> None:
                self._torch.mm(x, y, out=whole)
                self._dist.reduce_scatter_tensor(to, whole)

            return self._recorded(call)

        def async_tp() -> Way:
            x, y, to = self._tensors(a, b, out)
            operation = self._torch.ops.symm_mem.fused_matmul_reduce_scatter
            call = partial(operation, x, y, "sum", 0, self._peers.group.group_name)
            return self._eager(call, to.copy_)

        ours = partial(self._followed, a, b, partial_, scatter, out)
        return {"nccl+library": nccl, "tdx+library": ours, "async_tp": async_tp}

    def matmul_all_reduce(
        self, a: Array, b: Array, partial_: Array, out: Array, reduction: Any
    ) -> Makers:
        def nccl() -> Way:
            x, y, to = self._tensors(a, b, out)

            def call() -> None:
                self._torch.mm(x, y, out=to)
                self._dist.all_reduce(to)

            return self._recorded(call)

        def symm() -> Way:
            x, y, to = self._tensors(a, b, out)
            # its kernels take whole 16-byte vectors on every rank
            if partial_.nbytes % (16 * self._dist.get_world_size()):
                raise ValueError(f"{partial_.nbytes} bytes are no multiple of 16 for every rank")
            shared = self._peers.symm.empty(to.shape, dtype=to.dtype, device=to.device)
            self._peers.symm.rendezvous(shared, self._peers.group)
            operation = self._torch.ops.symm_mem.two_shot_all_reduce_
            name = self._peers.group.group_name

            def call() -> Any:
                self._torch.mm(x, y, out=shared)
                return operation(shared, "sum", name)

            return self._recorded(call, to.copy_)

        ours = partial(self._followed, a, b, partial_, reduction, out)
        return {"nccl+library": nccl, "tdx+library": ours, "symm+library": symm}

    def all_reduce_rms_norm(
        self, x: Array, weight: Array, residual: Array, eps: float, out: Array
    ) -> Makers:
        def nccl() -> Way:
            values, scale, rest, to = self._tensors(x, weight, residual, out)
            values = values.clone()  # reduced in place: only the first call's result is right
            norm = self._torch.nn.functional.rms_norm

            def call() -> Any:
                self._dist.all_reduce(values)
                return norm(values + rest, scale.shape, scale, eps)

            return self._recorded(call, to.copy_)

        return {"nccl+library": nccl}

    def _product(self, a: Array, b: Array, out: Array) -> Callable[[], Any]:
        x, y, to = self._tensors(a, b, out)
        return partial(self._torch.mm, x, y, out=to)

    def _followed(self, a: Array, b: Array, partial_: Array, collective: Any, out: Array) -> Way:
        """The product, then a collective of tdx."""
        product = self._product(a, b, partial_)

        def call() -> None:
            product()
            collective(partial_, out)

        return Way(call)

    def _recorded(
        self, call: Callable[[], Any], keep: Callable[[Any], object] | None = None
    ) -> Way:
        return Way(call, partial(self._peers.recorded, call), keep)

    def _eager(self, call: Callable[[], Any], keep: Callable[[Any], object]) -> Way:
        def repeated(calls: int) -> Callable[[], None]:
            def all_calls() -> None:
                for _ in range(calls):
                    call()

            return all_calls

        return Way(call, repeated, keep)

    def _tensors(self, *arrays: Array) -> list[Any]:
        """The same memory for PyTorch."""
        return [self._torch.from_dlpack(x) for x in arrays]
