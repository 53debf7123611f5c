"""What a mismatch of calls says."""

from __future__ import annotations

import pytest

from tdx.runtime.errors import CollectiveMismatch
from tdx.runtime.outcomes import require_same_calls

SUM = "all_reduce(shape=({}, 2), dtype={}, config=Config(algorithm='{}', block={})) team=[0, 2]"


@pytest.mark.parametrize(
    ("calls", "differences"),
    [
        ((SUM.format(4, "int32", "a", 1), SUM.format(5, "int32", "a", 1)),
         "shape: (4, 2) on ranks 0, 2, (5, 2) on rank 1"),
        ((SUM.format(4, "int32", "a", 1), SUM.format(4, "bool", "b", 16)),
         "dtype: int32 on ranks 0, 2, bool on rank 1; in algorithm: 'a' on ranks 0, 2, 'b' on rank "
         "1; in block: 1 on ranks 0, 2, 16 on rank 1"),
        (("f(a=1, b=2)", "f(a=1, b=3)"), "b: 2 on ranks 0, 2, 3 on rank 1"),
        (("f(a=1)", "f(a=1, b=3)"), "b: nothing on ranks 0, 2, 3 on rank 1"),
        (("f(a=1, b=2, c=3)", "f(a=1, b=3)"), "b: 2 on ranks 0, 2, 3 on rank 1"),
    ],
)  # fmt: skip
def test_calls_of_one_operation_are_compared(calls, differences):
    with pytest.raises(CollectiveMismatch) as info:
        require_same_calls({0: calls[0], 1: calls[1], 2: calls[0]})
    assert str(info.value).endswith(f". They differ in {differences}")


@pytest.mark.parametrize(
    "calls",
    [("f(a=1)", "g(a=2)"), ("barrier", "f(a=1)"), ("f: no (a=1)", "f: no (a=2)"), ("f(1)", "f(2)")],
)
def test_other_calls_are_only_listed(calls):
    with pytest.raises(CollectiveMismatch, match=r"the same one: rank 0: .*; rank 1: ") as info:
        require_same_calls(dict(enumerate(calls)))
    assert str(info.value).endswith(f"rank 1: {calls[1]}")


def test_equal_calls_pass():
    require_same_calls({0: "f(a=1)", 1: "f(a=1)"})
