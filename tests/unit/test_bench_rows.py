"""Rows of benches over worlds that stand in, and their pictures."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import numpy as np
import pytest

from tdx.bench import latency
from tdx.runtime.errors import InvalidArgument
from tdx.tools import bench, collectives, plot
from tdx.tools.collectives import Collective

HOST_US = 10.0


@pytest.fixture
def measured(monkeypatch):
    """Calls cost 10 us of the host, and nothing runs."""
    monkeypatch.setattr(latency, "device_time", lambda *_, **__: 1.0)
    monkeypatch.setattr(latency, "host_time", lambda *_: HOST_US)
    monkeypatch.setattr(latency, "operand", lambda *_: None)
    made = SimpleNamespace(
        Barrier=lambda world: None, AllReduce=lambda *_: None, all_reduce=lambda *_, **__: None
    )
    monkeypatch.setattr(latency, "tdx", made)


def latency_rows(**launch):
    world = SimpleNamespace(
        size=1,
        zeros=lambda shape, dtype, symmetric=True: np.zeros(shape, dtype),
        barrier=lambda: None,
        driver=SimpleNamespace(bind=lambda *_: SimpleNamespace(**launch), current_stream=lambda: 0),
    )
    return list(latency.rows(SimpleNamespace(world=world)))


def test_budgets_of_calls_follow_the_prebuilt_launch(measured):
    limits = {r["what"]: r["limit"] for r in latency_rows(bare=lambda *_: None) if "limit" in r}
    assert limits == {
        "barrier call, host time": pytest.approx(1.3 * HOST_US + 2),
        "all_reduce plan call, host time": pytest.approx(1.3 * HOST_US + 2),
        "tdx.all_reduce(out=) call, host time": pytest.approx(1.3 * HOST_US + 5),
        "tdx.all_reduce call, host time": pytest.approx(1.3 * HOST_US + 5),
    }


def test_no_budgets_without_a_prebuilt_launch(measured):
    assert not any("limit" in row for row in latency_rows())


class Memory:
    """An array as far as a row of a collective asks."""

    def __init__(self, values):
        self.values, self.dtype = values, values.dtype

    def copy_from(self, values):
        self.values = values

    def numpy(self):
        return self.values


class Plans:
    """Of algorithms that take so long each; `idle` writes nothing."""

    def __init__(self, named):
        self.named, self.given = named, []

    def __call__(self, algorithm=None, buffer=True):
        def call(x, out):
            self.given.append((buffer, out is None))
            out = Memory(np.zeros_like(x.values)) if out is None else out
            if algorithm != "idle":
                out.values = x.values
            return out

        call.kind = algorithm or "slow"
        if self.named:
            call.algorithm = call.kind
        else:  # as plans of reductions
            call.config = SimpleNamespace(algorithm=call.kind)
        return call


@pytest.fixture
def collective(monkeypatch):
    """`collective(plans, algorithms)`: the rows of one, where slow ones take 6 us and others 4."""
    times = {"slow": 6.0}

    def device_time(world, call, calls):
        call()
        return times.get(call.func.kind, 4.0)

    monkeypatch.setattr(collectives, "device_time", device_time)
    monkeypatch.setattr(collectives, "host_time", lambda *_: HOST_US)
    alone = SimpleNamespace(allgather=lambda payload, what: [payload])
    world = SimpleNamespace(
        size=2, rank=0, channels=alone,
        device=SimpleNamespace(arch="cpu"), array=lambda v, symmetric: Memory(v),
        empty=lambda shape, dtype, symmetric: Memory(np.empty(shape, dtype)),
    )  # fmt: skip

    def rows(plans, algorithms, every=True):
        x = np.arange(4, dtype=np.int32)
        peers = {"nccl": 12.0, "torch": 3.0, "failed": {"other": "why"}}
        one = Collective(16, plans, algorithms, x, x, 16, peers, own_memory=("torch",))
        args = argparse.Namespace(dtype="int32", no_peers=True, all_algorithms=every)
        return list(one.rows(bench.Bench(world, args)))

    return rows


@pytest.mark.parametrize("named", [True, False])
def test_gap_to_the_fastest_of_ours(collective, named):
    plans = Plans(named)
    symmetric, foreign = collective(plans, ["fast", "slow"])
    assert (symmetric["memory"], foreign["memory"]) == ("symmetric", "foreign")
    for row in (symmetric, foreign):
        assert row["gap"] == 1.5
        assert (row["chosen"], row["algorithm"]) == (6.0, "slow")
        assert "error" not in row
    assert (symmetric["ratio"], foreign["ratio"]) == (0.5, 2.0)
    assert "torch" not in foreign
    assert set(plans.given) == {(True, True), (False, False)}
    (row, _) = collective(plans, ["slow"])
    assert row["gap"] == 1.0


@pytest.mark.parametrize("named", [True, False])
def test_without_all_algorithms(collective, named):
    """What is chosen is measured, with its name, and nothing else of ours."""
    plans = Plans(named)
    for row in collective(plans, ["fast", "slow"], every=False):
        assert (row["chosen"], row["algorithm"], row["chosen_host"]) == (6.0, "slow", HOST_US)
        assert row["ratio"] == min(row[name] for name in ("nccl", "torch") if name in row) / 6.0
        assert not row.keys() & {"fast", "slow", "gap"}
    module = SimpleNamespace(COLUMNS=collectives.columns(("nccl",), ("a", "b")), ALGORITHMS="ab")
    every, usual = (bench._columns(module, each) for each in (True, False))
    assert every == list(module.COLUMNS)
    assert usual == [name for name in every if name not in ("a", "b", "gap")]
    assert bench._columns(latency, False) == list(latency.COLUMNS)


@pytest.mark.parametrize("arch", ["sm_90", "host"])
def test_note_of_a_floor(arch):
    """It is said to be with our own matmul only where there is one."""
    world = SimpleNamespace(size=2, device=SimpleNamespace(arch=arch))
    args = argparse.Namespace(dtype="int32", no_peers=True)
    row = {"chosen": 4.0, "fused": 4.0, "tdx+matmul": 6.0, "M": 1}
    bench.Bench(world, args).rate(row, ["fused"], ["tdx+matmul"], sent=8)
    (note,) = bench._notes("why", ["library", "nccl+library", "floor"], [row])
    said = "floor and ratio are" if arch == "sm_90" else "ratio is"
    assert note == (
        f"nothing to compare with (why): those columns are empty; {said} with tdx's own matmul"
    )


def test_a_result_that_is_not_written(collective):
    """In foreign memory that of another algorithm is there."""
    symmetric, foreign = collective(Plans(True), ["slow", "idle"])
    assert symmetric["error"] == foreign["error"] == "idle: wrong result"


def test_panels_of_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(plot, "_panel", lambda axes, rows: drawn.append((axes, rows)))
    rows = [
        {"bytes": nbytes, "memory": memory, "push": 1.0, "gap": 1.0}
        for nbytes in (64, 128)
        for memory in ("symmetric", "foreign")
    ]
    plot.draw("all_gather", "somewhere", rows, str(tmp_path / "rows.png"))
    titles = [axes.get_title() for axes, _ in drawn]
    assert titles == ["symmetric memory", "foreign memory"]
    assert [part for _, part in drawn] == [rows[::2], rows[1::2]]


def test_panels_of_several_types(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    titles = []
    monkeypatch.setattr(plot, "_panel", lambda axes, rows: titles.append(axes))
    rows = [
        {"dtype": name, "M": m, "N": 8, "K": 4, "fused": 1.0}
        for name in ("bfloat16", "float32")
        for m in (64, 128)
    ]
    plot.draw("all_gather_matmul", "somewhere", rows, str(tmp_path / "rows.svg"))
    assert [axes.get_title() for axes in titles] == ["bfloat16, N=8, K=4", "float32, N=8, K=4"]


def test_lines_of_a_picture():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    times = {"push": 1.0, "push_host": 9.0, "floor": 0.5}
    plot._panel(axes, [{"bytes": 64, **times, "gap": 1.0, "ratio": 2.0}])
    lines = axes.get_lines()
    assert [line.get_label() for line in lines] == ["push", "floor"]
    assert all(line.get_marker() != "None" for line in lines)  # of one size nothing else shows
    pyplot.close(figure)


def test_what_cannot_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgument, match="nothing to draw"):
        plot.draw("latency", "", [{"what": "x", "us": 1.0}], str(tmp_path / "rows.png"))
