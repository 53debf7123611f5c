"""The exceptions: what each derives from and carries."""

from __future__ import annotations

import pickle

import pytest

from tdx.runtime import errors
from tdx.runtime.outcomes import pack_error, raise_for_peers

BASES = {
    "InvalidArgument": ValueError,
    "DtypeError": TypeError,
    "HeapExhausted": MemoryError,
    "PeerTimeout": TimeoutError,
    "PeerLost": ConnectionError,
    "Unsupported": NotImplementedError,
    "Closed": RuntimeError,
    "DriverError": RuntimeError,
    "CollectiveMismatch": RuntimeError,
}


def test_every_error_has_its_built_in():
    assert set(BASES) | {"TdxError"} == set(errors.__all__)
    for name, base in BASES.items():
        kind = getattr(errors, name)
        assert issubclass(kind, errors.TdxError)
        assert issubclass(kind, base)
        assert kind.__doc__


@pytest.mark.parametrize("name", BASES)
def test_errors_travel_as_text(name):
    error = getattr(errors, name)("what happened")
    with pytest.raises(getattr(errors, name), match=r"step failed: rank 1: .*what happened"):
        raise_for_peers({0: b"", 1: pack_error(error)}, "step")
    assert str(pickle.loads(pickle.dumps(error))) == "what happened"


def test_attributes():
    timeout = errors.PeerTimeout("text", rank=1, peer=2, signal="s", expected=3, seen=-1)
    assert (timeout.rank, timeout.peer, timeout.signal) == (1, 2, "s")
    assert (timeout.expected, timeout.seen, timeout.call_number) == (3, -1, 0)
    lost = errors.PeerLost("text", [4, 3], rank=1)
    assert (lost.ranks, lost.rank, lost.peer, lost.origin) == ((4, 3), 1, 3, None)
    assert (errors.PeerLost("text").rank, errors.PeerLost("text").peer) == (-1, -1)
    assert errors.PeerTimeout("text", origin=(2, "why")).origin == (2, "why")
    assert errors.CollectiveMismatch("text", {0: "a"}).calls == {0: "a"}


def test_the_public_module_has_all_of_them():
    from tdx import errors as attribute
    from tdx.errors import PeerTimeout, TdxError

    assert attribute.PeerTimeout is PeerTimeout is errors.PeerTimeout
    assert issubclass(PeerTimeout, TdxError)
    assert set(attribute.__all__) == set(errors.__all__)
