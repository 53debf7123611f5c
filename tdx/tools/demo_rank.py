"""What every rank of `tdx demo` does: `python -m tdx.tools.demo_rank SETTINGS`.

The MLP is three steps: an all-gather of x overlapped with both first products, the activation,
and the last product overlapped with the reduce-scatter of its result.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx
from tdx.kernels.matmul import Config
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.world import World
from tdx.tools.demo import Settings, load

__all__ = ["TOLERANCE", "Report", "error_of", "main", "reference"]

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # largest error, relative to the largest value
_RUNS = 3
# the host tier's own choice for so small a product is one tile, which has nothing to overlap with
_HOST_TILING = {"chunks_per_rank": 2, "config": Config(32, 128, 128)}
_BLOCK = 4096
_CHECK_FLOPS = 2e11  # what a rank spends on the reference, at most; then it checks fewer rows
_REPORT_BYTES = 512


@triton.jit(do_not_specialize=["numel"])
def silu_times_kernel(gate, up, out, numel, BLOCK: tl.constexpr):
    """out = silu(gate) * up, in float32, rounded once."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < numel
        x = tl.load(gate + offsets, mask=mask).to(tl.float32)
        y = tl.load(up + offsets, mask=mask).to(tl.float32)
        tl.store(out + offsets, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=mask)


class GatedMlp:
    """y = (silu(x . w_gate) * (x . w_up)) . w_down over all ranks of the world.

    w_gate and w_up are this rank's columns, w_down its rows; `rows` are a rank's rows of x and y.
    """

    def __init__(self, world: World, rows: int, w_gate: Array, w_up: Array, w_down: Array):
        self._weights = (w_gate, w_up, w_down)
        hidden, inner = w_gate.shape
        dtype = w_gate.dtype
        tiling: dict[str, Any] = _HOST_TILING if world.backend == "host" else {}
        shapes = [w_gate.shape, w_up.shape]
        self.first = tdx.AllGatherMatmul(world, (rows, hidden), shapes, dtype, trace=True, **tiling)
        self._inner = world.empty((world.size * rows, inner), dtype, symmetric=False)
        self._grid = (min(-(-self._inner.size // _BLOCK), world.device.multiprocessors),)
        self.second = tdx.MatmulReduceScatter(world, self._inner.shape, w_down.shape, dtype)

    def __call__(self, x: Array) -> Array:
        """This rank's rows of y for its rows of x; overwritten by the next call."""
        w_gate, w_up, w_down = self._weights
        gate, up = self.first(x, [w_gate, w_up])
        silu_times_kernel[self._grid](gate, up, self._inner, self._inner.size, _BLOCK, num_warps=8)
        return self.second(self._inner, w_down)


@dataclass(frozen=True)
class Report:
    """How it went on one rank.

    error: largest difference to the reference, relative to its largest value. first_s: seconds of
    the first run, in which kernels compile. run_ms: median of the others. behind, chunks: chunks of
    rows that came from peers, and how many of them had come when the last block began with the own
    rows. early, tiles: tiles of the first products that need a peer's rows, and how many of them
    were begun before the last chunk had come.
    """

    device: str
    error: float
    first_s: float
    run_ms: float
    behind: int
    chunks: int
    early: int
    tiles: int

    def line(self, rank: int, right: bool) -> str:
        return (
            f"{rank:>4}  {self.device:<20}{self.error:<9.1e}{'ok' if right else 'WRONG':<6}"
            f"{self.first_s:>8.2f} s{self.run_ms:>10.1f} ms   "
            f"{f'{self.behind} of {self.chunks} chunks':<17}{self.early} of {self.tiles} tiles"
        )


_HEADING = (
    f"rank  {'device':<20}{'error':<15}{'first run':>10}{'median run':>13}   "
    f"{'while own rows':<17}while peers' rows"
)
_LEGEND = """
Communication hidden behind computation, by counts that the kernels took on the device: chunks of
peers' rows that had come when the last block began with the own rows; and tiles of peers' rows
that were begun before the last chunk had come.
"""


def main(settings: Settings) -> int:
    """Run, check and report; returns the exit code."""
    with tdx.init() as world:
        say = _Progress(world.rank)
        s = settings
        say(
            f"gated MLP: {s.tokens} tokens, hidden {s.hidden}, intermediate {s.intermediate}, "
            f"{s.dtype}, {world.size} x {world.device.name}"
        )
        say("loading the input" if s.input else f"making random numbers from seed {s.seed}")
        full = _inputs(s)
        x, *weights = _parts(world, full)
        say("making plans and compiling")
        mlp = GatedMlp(world, x.shape[0], *weights)
        first_s, run_ms, y = _timed(world, lambda: mlp(x), say)
        say("checking against NumPy in float64")
        rows = _rows_to_check(s, world.size)
        error = _check(full, y.numpy(), world.rank, rows)
        hidden = (*_behind_own_rows(mlp.first), *mlp.first.overlap())
        reports = _exchange(Report(world.device.name, error, first_s, run_ms, *hidden))
        whole = tdx.all_gather(y).numpy() if s.output else None
        if world.rank == 0:
            if whole is not None:
                _write(s.output, whole)
                say(f"y {whole.shape} is in {s.output}")
            if not _conclude(reports, s, rows):
                return 1
    return 0


class _Progress:
    """Progress lines of rank 0, with the seconds since the start."""

    def __init__(self, rank: int):
        self._rank = rank
        self._begun = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._rank == 0:
            print(f"{time.monotonic() - self._begun:7.2f} s  {text}", flush=True)


def _inputs(settings: Settings) -> list[np.ndarray[Any, Any]]:
    """x, w_gate, w_up, w_down, whole, in the dtype that the MLP is computed in."""
    dtype = dtypes.resolve(settings.dtype)
    if settings.input:
        return [array.astype(dtype) for array in load(settings.input)]
    rng = np.random.default_rng(settings.seed)
    wide = (settings.hidden, settings.intermediate)
    shapes = ((settings.tokens, settings.hidden), wide, wide, wide[::-1])
    arrays = []
    for i, shape in enumerate(shapes):
        scale = np.float32(shape[0] ** -0.5 if i else 1.0)  # all products are of order 1
        arrays.append((rng.standard_normal(shape, np.float32) * scale).astype(dtype))
    return arrays


def _parts(world: World, full: list[np.ndarray[Any, Any]]) -> list[Array]:
    """This rank's part of every input, on its device."""
    mine = []
    for array, axis in zip(full, (0, 1, 1, 0), strict=True):
        part = np.split(array, world.size, axis)[world.rank]
        mine.append(world.array(np.ascontiguousarray(part), symmetric=False))
    return mine


def _timed(world: World, mlp: Any, say: _Progress) -> tuple[float, float, Array]:
    """(seconds of the first run, median milliseconds of the others, the last result)."""
    times = []
    for number in range(1 + _RUNS):
        say(f"run {number} of {_RUNS}" if number else "first run")
        world.barrier()
        begin = time.perf_counter()
        y = mlp()
        world.synchronize()
        times.append(time.perf_counter() - begin)
    return times[0], 1e3 * float(np.median(times[1:])), y


def _behind_own_rows(plan: tdx.AllGatherMatmul) -> tuple[int, int]:
    """(remote chunks that had come when the last block began its own tiles, remote chunks)."""
    size = plan.group.size
    own = plan._gathering.chunks
    counts = plan._traces[0].numpy().reshape(size, -1)[0]
    return int(counts.max()) - own, (size - 1) * own


def _rows_to_check(settings: Settings, ranks: int) -> int:
    """How many of its rows each rank compares with the reference."""
    flops_of_a_row = 6.0 * settings.hidden * settings.intermediate
    return int(max(1, min(settings.tokens // ranks, _CHECK_FLOPS // flops_of_a_row)))


def reference(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> np.ndarray[Any, Any]:
    """The MLP in float64."""
    x, w_gate, w_up, w_down = (np.asarray(a, np.float64) for a in (x, w_gate, w_up, w_down))
    gate = x @ w_gate
    # silu(gate) = gate * sigmoid(gate), where tanh does not overflow
    return (gate * 0.5 * (1.0 + np.tanh(0.5 * gate)) * (x @ w_up)) @ w_down


def error_of(result: Any, expected: np.ndarray[Any, Any]) -> float:
    """Largest difference, relative to the largest expected value; NaN when a result is NaN."""
    difference = float(np.abs(np.asarray(result, np.float64) - expected).max())
    largest = float(np.abs(expected).max())
    return difference / largest if largest else difference


def _check(full: list[np.ndarray[Any, Any]], y: Any, rank: int, rows: int) -> float:
    """The error of `rows` of this rank's rows, spread evenly."""
    x, *weights = full
    chosen = np.linspace(0, len(y) - 1, rows).astype(int)
    return error_of(y[chosen], reference(x[rank * len(y) + chosen], *weights))


def _exchange(report: Report) -> list[Report]:
    """The reports of all ranks, through an all-gather of their text."""
    text = json.dumps(asdict(report)).encode().ljust(_REPORT_BYTES)
    assert len(text) == _REPORT_BYTES
    rows = tdx.all_gather(np.frombuffer(text, np.uint8)).reshape(-1, _REPORT_BYTES)
    return [Report(**json.loads(row.tobytes())) for row in rows]


def _write(path: str, y: np.ndarray[Any, Any]) -> None:
    with open(path, "wb") as file:  # as given: savez would add a suffix to a bare path
        np.savez(file, y=y.astype(np.float32))


def _conclude(reports: list[Report], settings: Settings, rows: int) -> bool:
    """Print the table and the verdict; whether all results are right."""
    tolerance = TOLERANCE[settings.dtype]
    right = [report.error <= tolerance for report in reports]  # False for NaN
    print(f"\n{_HEADING}")
    for rank, report in enumerate(reports):
        print(report.line(rank, right[rank]))
    checked = f"{rows} of {settings.tokens // len(reports)} rows of each rank"
    print(_LEGEND)
    if reports[0].device.startswith("CPU"):
        print("Ranks take turns on the cores of a CPU: which counts are 0 there is chance.\n")
    print(
        f"Error: relative to the largest value, {tolerance:g} is allowed; {checked} were checked."
    )
    print("The result is right." if all(right) else "The result is WRONG.", flush=True)
    return all(right)


if __name__ == "__main__":
    sys.exit(main(Settings(**json.loads(sys.argv[1]))))
