"""Ways to products over ranks of others: a library's matmul with a collective, and async-TP.

A way has the name of its column: `library` is torch.mm alone, or without PyTorch cuBLAS's,
`nccl+library` with a collective of NCCL, `tdx+library` with one of tdx, `symm+library` with one of
PyTorch's symmetric memory.
`async_tp` is PyTorch's own overlapped product; it is called eagerly. Operands of float8 are
multiplied by torch._scaled_mm, with the scales of reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tdx.kernels.matmul import matmul
from tdx.tools.comparison import Way
from tdx.tools.reference import FLOAT8, SCALES

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.world import World
    from tdx.tools.cupy_peers import CupyPeers
    from tdx.tools.peers import TorchPeers

__all__ = ["CublasProducts", "Makers", "Products", "TorchProducts"]

Makers = dict[str, Callable[[], Way]]


class Products:
    """None: what there is with neither PyTorch nor cuBLAS, or without a GPU.

    Attributes
    ----------
    missing : str
        Why there is no library's product, where `Peers.missing` does not say it.
    """

    missing = ""

    def close(self) -> None:
        """Give back what they hold."""

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
        self, x: Array, weight: Array, residual: Array, eps: float, out: Array, reduction: Any
    ) -> Makers:
        """x, residual and out (M, N), weight (N,); `reduction` is a plan of tdx for x."""
        return {}


class CublasProducts(Products):
    """With cuBLAS, as tdx.matmul calls it; `nccl`: what has NCCL's collectives, or None."""

    def __init__(self, world: World, nccl: CupyPeers | None):
        self._world, self._nccl = world, nccl

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """Queue the product."""
        scales: dict[str, Any] = SCALES if a.dtype.name == FLOAT8 else {}
        matmul(a, b, out=out, library=True, **scales)

    def matmul(self, a: Array, b: Array, out: Array) -> Makers:
        return {"library": lambda: Way(partial(self.multiply, a, b, out))}

    def all_gather_matmul(self, a: Array, b: Array, out: Array, gather: Any) -> Makers:
        def ours() -> Way:
            return Way(lambda: self.multiply(gather(a), b, out))

        if self._nccl is None:
            return {"tdx+library": ours}
        gathered = self._nccl.gathered

        def nccl() -> Way:
            whole = self._world.empty((out.shape[0], a.shape[1]), a.dtype, symmetric=False)

            def call() -> None:
                gathered(a, whole)
                self.multiply(whole, b, out)

            return Way(call)

        return {"nccl+library": nccl, "tdx+library": ours}

    def matmul_reduce_scatter(
        self, a: Array, b: Array, partial_: Array, out: Array, scatter: Any
    ) -> Makers:
        theirs = self._nccl and self._nccl.scattered
        return self._followed(a, b, partial_, out, scatter, theirs)

    def matmul_all_reduce(
        self, a: Array, b: Array, partial_: Array, out: Array, reduction: Any
    ) -> Makers:
        theirs = self._nccl and self._nccl.reduced
        return self._followed(a, b, partial_, out, reduction, theirs)

    def _followed(
        self, a: Array, b: Array, partial_: Array, out: Array, ours: Any, theirs: Any
    ) -> Makers:
        """The product to partial_, then a collective from there to out."""

        def way(collective: Any) -> Way:
            def call() -> None:
                self.multiply(a, b, partial_)
                collective(partial_, out)

            return Way(call)

        collectives = {"nccl+library": theirs, "tdx+library": ours}
        return {name: partial(way, each) for name, each in collectives.items() if each}


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
            product = self._multiplied(whole, y, to)
            # as bytes, since NCCL need not know the type
            sent, received = (t.view(self._torch.uint8) for t in (x, whole))

            def call() -> None:
                self._dist.all_gather_into_tensor(received, sent)
                product()

            return self._recorded(call)

        def ours() -> Way:
            product = self._product(gather(a), b, out)

            def call() -> None:
                gather(a)
                product()

            return Way(call)

        def async_tp() -> Way:
            x, y, to = self._tensors(a, b, out)
            operations, group = self._torch.ops.symm_mem, self._peers.group.group_name
            call = partial(operations.fused_all_gather_matmul, x, [y], 0, group)
            if a.dtype.name == FLOAT8:
                left, right = self._scales(x)
                call = partial(
                    operations.fused_all_gather_scaled_matmul, x, [y], left, [right], 0, group,
                    [None], [None], [to.dtype], [False],
                )  # fmt: skip
            return self._eager(call, lambda value: to.copy_(value[1][0]))

        return {"nccl+library": nccl, "tdx+library": ours, "async_tp": async_tp}

    def matmul_reduce_scatter(
        self, a: Array, b: Array, partial_: Array, out: Array, scatter: Any
    ) -> Makers:
        def nccl() -> Way:
            whole, to = self._tensors(partial_, out)
            product = self._product(a, b, partial_)

            def call() -> None:
                product()
                self._dist.reduce_scatter_tensor(to, whole)

            return self._recorded(call)

        def async_tp() -> Way:
            x, y, to = self._tensors(a, b, out)
            operations, group = self._torch.ops.symm_mem, self._peers.group.group_name
            call = partial(operations.fused_matmul_reduce_scatter, x, y, "sum", 0, group)
            if a.dtype.name == FLOAT8:
                call = partial(
                    operations.fused_scaled_matmul_reduce_scatter, x, y, *self._scales(x), "sum",
                    0, 0, group, list(partial_.shape), out_dtype=to.dtype,
                )  # fmt: skip
            return self._eager(call, to.copy_)

        ours = partial(self._followed, a, b, partial_, scatter, out)
        return {"nccl+library": nccl, "tdx+library": ours, "async_tp": async_tp}

    def matmul_all_reduce(
        self, a: Array, b: Array, partial_: Array, out: Array, reduction: Any
    ) -> Makers:
        def nccl() -> Way:
            (to,) = self._tensors(out)
            product = self._product(a, b, out)

            def call() -> None:
                product()
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
            product = self._multiplied(x, y, shared)

            def call() -> Any:
                product()
                return operation(shared, "sum", name)

            return self._recorded(call, to.copy_)

        ours = partial(self._followed, a, b, partial_, reduction, out)
        return {"nccl+library": nccl, "tdx+library": ours, "symm+library": symm}

    def all_reduce_rms_norm(
        self, x: Array, weight: Array, residual: Array, eps: float, out: Array, reduction: Any
    ) -> Makers:
        def way(values: Any, collective: Callable[[], Any]) -> Way:
            scale, rest, to = self._tensors(weight, residual, out)
            norm = self._torch.nn.functional.rms_norm

            def call() -> Any:
                collective()
                return norm(values + rest, scale.shape, scale, eps)

            return self._recorded(call, to.copy_)

        def nccl() -> Way:
            (values,) = self._tensors(x)
            values = values.clone()  # reduced in place: only the first call's result is right
            return way(values, partial(self._dist.all_reduce, values))

        def ours() -> Way:
            (values,) = self._tensors(reduction(x))  # its own buffer
            return way(values, lambda: reduction(x, stream=self._peers.stream()))

        return {"nccl+library": nccl, "tdx+library": ours}

    def _product(self, a: Array, b: Array, out: Array) -> Callable[[], Any]:
        return self._multiplied(*self._tensors(a, b, out))

    def _multiplied(self, x: Any, y: Any, to: Any) -> Callable[[], Any]:
        """What queues the product of tensors x and y to another one."""
        if x.dtype != getattr(self._torch, FLOAT8):
            return partial(self._torch.mm, x, y, out=to)
        scaled = partial(self._torch._scaled_mm, x, y, *self._scales(x))
        return partial(scaled, out_dtype=to.dtype, out=to)

    def _scales(self, x: Any) -> list[Any]:
        """The scales of both operands, where tensor x is."""
        return [self._torch.tensor(scale, device=x.device) for scale in SCALES.values()]

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
