"""What goes wrong on purpose: one rank of a job, and what the others make of it.

    tdx run -n 3 --keep-going -m tests.reliability.faults KIND [--backend cuda]

Prints one JSON line for each surviving rank; tests/reliability/campaign.py runs all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl

TIMEOUT_S = 1.0
COUNT = 1000


@triton.jit(do_not_specialize=["mute", "call"])
def ring_kernel(signals, seen, world, mute, call):
    """Every rank notifies the next one, rank `mute` nobody."""
    me, size = tdl.rank(world), tdl.num_ranks(world)
    tdl.notify(signals, (me + 1) % size, world, call, when=me != mute)
    ok = tdl.wait(signals, world, call, peer=(me + size - 1) % size)
    tl.store(seen, call, mask=ok)


class Job:
    """What the kinds of faults work with: a world, plans, and who does the wrong thing."""

    def __init__(self, backend: str | None):
        self.world = world = tdx.init(backend=backend, timeout_s=TIMEOUT_S)
        self.since = 0.0  # when something went wrong
        self.culprit = world.size - 1
        self.guilty = world.rank == self.culprit
        page = world.channels.page
        self.process_of_culprit = page.process(self.culprit) if page is not None else 0
        self.x = world.array(np.full(COUNT, world.rank + 1, np.float32))
        self.signals = world.zeros(1, np.int32)
        self.seen = world.zeros(1, np.int32)
        world.barrier()
        # everything is compiled and loaded before anything goes wrong
        self.plans = {
            op: tdx.AllReduce(world, (COUNT,), np.float32, op=op) for op in ("sum", "max")
        }
        self.gather = tdx.AllGather(world, (COUNT,), np.float32)
        self.half = tdx.AllReduce(world, (COUNT // 2,), np.float32)
        for plan in (*self.plans.values(), self.gather):
            plan(self.x)
        self.half(self.x[: COUNT // 2])
        world.barrier()
        self.ring(-1, 1)
        world.barrier()

    def ring(self, mute: int, call: int) -> None:
        ring_kernel[(1,)](self.signals, self.seen, self.world.handle, mute, call)

    def go_on(self) -> None:
        """What every rank does next: calls that fit, and a meeting."""
        for _ in range(3):
            self.plans["sum"](self.x)
        self.gather(self.x)
        self.world.barrier()

    # ---- what the culprit does, or all do; then everybody goes on
    def kill(self) -> None:
        if self.guilty:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        if self.guilty:
            os.kill(os.getpid(), signal.SIGSTOP)

    def exception(self) -> None:
        if self.guilty:
            raise RuntimeError("on purpose")

    def exit(self) -> None:
        if self.guilty:
            sys.exit(0)

    def skipped_call(self) -> None:
        if not self.guilty:
            self.plans["sum"](self.x)

    def doubled_call(self) -> None:
        for _ in range(1 + self.guilty):
            self.plans["sum"](self.x)

    def other_operation(self) -> None:
        (self.gather if self.guilty else self.plans["sum"])(self.x)

    def other_op(self) -> None:
        self.plans["max" if self.guilty else "sum"](self.x)

    def other_shape(self) -> None:
        if self.guilty:
            self.half(self.x[: COUNT // 2])
        else:
            self.plans["sum"](self.x)

    def other_order(self) -> None:
        calls: list[Callable[[Any], Any]] = [self.plans["sum"], self.gather]
        for call in reversed(calls) if self.guilty else calls:
            call(self.x)
            self.world.synchronize()

    def new_plan_of_another_shape(self) -> None:
        tdx.AllReduce(self.world, (7 + self.guilty,), np.float32)

    def new_plan_of_another_dtype(self) -> None:
        tdx.all_reduce(self.x.view(np.int32) if self.guilty else self.x, op="max")

    def refused_arguments(self) -> None:
        tdx.all_reduce(self.x, op="product" if self.guilty else "min")

    def late(self) -> None:
        if self.guilty:
            time.sleep(TIMEOUT_S / 2)

    def too_late(self) -> None:
        if self.guilty:
            time.sleep(3 * TIMEOUT_S)
            self.since = time.monotonic()

    def dropped_notify(self) -> None:
        self.ring(self.culprit, 2)

    def dropped_notify_in_a_graph(self) -> None:
        with tdx.graph(self.world) as graph:
            self.ring(self.culprit, 2)
        graph.replay()
        self.world.synchronize()


KINDS = [name for name in vars(Job) if not name.startswith("_") and name not in ("ring", "go_on")]
HARMLESS = ("late",)
ENDS_THE_CULPRIT = ("kill", "stop", "exception", "exit")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--backend")
    args = parser.parse_args()
    job = Job(args.backend)
    world = job.world
    report: dict[str, Any] = {"kind": args.kind, "rank": world.rank, "error": None}
    job.since = time.monotonic()
    try:
        getattr(job, args.kind)()
        job.go_on()
    except tdx.errors.TdxError as error:
        report |= {"error": type(error).__name__, "text": str(error)}
    report["seconds"] = time.monotonic() - job.since
    start = time.monotonic()
    try:
        if args.kind in ENDS_THE_CULPRIT or report["error"] is None:
            report["after"] = _recovered(world)
        else:
            world.close()
            report["after"] = "closed"
    except Exception as error:
        report["after"] = f"{type(error).__name__}: {error}"
    report["end_seconds"] = time.monotonic() - start
    print(json.dumps(report), flush=True)
    if args.kind == "stop" and world.rank == 0:
        os.kill(job.process_of_culprit, signal.SIGKILL)  # the job ends with its last process
    return 0


def _recovered(world: tdx.World) -> str:
    with world.recover() as new:
        total = tdx.all_reduce(new.array(np.ones(COUNT, np.float32))).numpy()
        right = bool((total == new.size).all())
    return "recovered" if right else "recovered, wrong result"


if __name__ == "__main__":
    raise SystemExit(main())
