"""A stranger of the same user who calls every rank that listens, while worlds come and go."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

import tdx
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, reduced, values

# calls at the doors of the processes it is given; adds a byte to a file whenever it got through
STRANGER = """
import contextlib, os, random, socket, sys
file, *pids = sys.argv[1:]
rng = random.Random(5)
held, reached = [], open(file, "ab", buffering=0)
print("ready", flush=True)
while True:
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table if "@tdx-" in line]
    for name in {row[7] for row in rows if f"socket:[{row[6]}]" in sockets}:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(0.05)
        with contextlib.suppress(OSError):
            sock.connect(b"\\0" + name[1:].encode())
            sock.send(rng.randbytes(rng.choice([0, 1, 28, 4096])))
            reached.write(b".")
        held = [*held[-200:], sock]
"""


@contextlib.contextmanager
def meddling(comm):
    """A stranger at work; yields a function that says how often it has got through."""
    with tempfile.NamedTemporaryFile() as reached:
        stranger, pids = None, comm.allgather(os.getpid())
        if comm.Get_rank() == 0:
            command = [sys.executable, "-c", STRANGER, reached.name, *map(str, pids)]
            stranger = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert stranger.stdout.readline() == b"ready\n"

        def calls():
            return comm.bcast(os.path.getsize(reached.name))

        try:
            yield calls
        finally:
            if stranger is not None:
                stranger.kill()
                stranger.communicate()


@isolated
@worlds(2)
@limit(90)
def case_worlds_beside_a_stranger(comm, backend):
    """Each comes up, and every all_reduce is right, whatever is said to the ranks meanwhile."""
    given = [values(rank, 1000, "float32") for rank in range(comm.Get_size())]
    wanted = reduced(given)
    with meddling(comm) as calls:
        for turn in range(500):
            with tdx.init(comm, backend=backend) as world:
                x = world.array(given[world.rank])
                for _ in range(3):
                    assert_same_bits(tdx.all_reduce(x).numpy(), wanted, turn)
            if turn >= 20 and calls() >= 20:
                break
        # on GPUs the door is open for a small part of the time only
        assert calls() >= (20 if backend == "host" else 1)
