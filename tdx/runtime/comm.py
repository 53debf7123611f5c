"""The communicator given to `tdx.init`: what it must offer, and how MPI is found without one.

It is used during `tdx.init` only, and carries bytes only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Protocol, runtime_checkable

from tdx.runtime.errors import InvalidArgument, TdxError

__all__ = [
    "Comm",
    "announced_place",
    "announced_size",
    "close_comm",
    "mpi_name",
    "mpi_takes_gpu_memory",
    "open_comm",
]

_OPEN_MPI = "Open MPI's mpirun"
# Launchers that put the size of the world into the environment of each rank, innermost first:
# inside `srun`, an `mpirun` counts. Slurm's own variables also stand in a batch script, which
# is no rank; only within a step do they speak of this process.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", _OPEN_MPI),
    ("PMI_SIZE", "a PMI launcher (the mpirun of MPICH or Intel MPI)"),
    ("MV2_COMM_WORLD_SIZE", "the mpirun of MVAPICH"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)
# Launchers that announce themselves, but not how many ranks they start.
_SILENT_LAUNCHERS = (("PMIX_RANK", "a PMIx launcher"), ("PMI_RANK", "a PMI launcher"))
# Where launchers put a process's number among those that they started on its host, innermost
# first: torchrun comes after the MPIs, which it does not start, and before srun, which starts it.
_TORCHRUN_PLACE = "LOCAL_RANK"
_PLACES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",  # MPICH and Intel MPI
    "MV2_COMM_WORLD_LOCAL_RANK",
    _TORCHRUN_PLACE,
    "SLURM_LOCALID",
)
_MOST_DIGITS = 6  # what is longer is no place
# How an MPI tells that it takes addresses of a GPU: MPI 4.1's name of the memory, and functions
# of Open MPI, MPICH and those that derive from them, which return 0 or 1.
_GPU_MEMORY = {
    "cuda": ("cuda", ("MPIX_Query_cuda_support",)),
    "hip": ("rocm", ("MPIX_Query_hip_support", "MPIX_Query_rocm_support")),
}


@runtime_checkable
class Comm(Protocol):
    """What tdx needs of a communicator, in mpi4py's spelling."""

    def Get_rank(self) -> int:
        """This rank, in 0..size-1."""

    def Get_size(self) -> int:
        """Number of ranks."""

    def allgather(self, payload: bytes, /) -> list[bytes]:
        """Every rank's payload (lengths may differ) in rank order, on every rank."""


class _SelfComm:
    """A world of one."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, payload: bytes, /) -> list[bytes]:
        return [bytes(payload)]


class _CheckedComm:
    """The caller's communicator: only bytes pass, and each answer's shape is checked."""

    def __init__(self, comm: Any, owned: bool):
        self._comm = comm
        self._owned = owned
        self._rank = _integer(comm, "Get_rank")
        self._size = _integer(comm, "Get_size")
        if not 0 <= self._rank < self._size:
            raise InvalidArgument(
                f"comm.Get_rank() is {self._rank} and comm.Get_size() is {self._size}: "
                "the rank must be in 0..size-1"
            )

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, payload: bytes, /) -> list[bytes]:
        answer = self._gather(bytes(payload))
        if not isinstance(answer, (list, tuple)) or len(answer) != self._size:
            raise InvalidArgument(
                f"comm.allgather must return a list of {self._size} entries, one a rank; "
                f"got {_describe(answer)}"
            )
        for rank, entry in enumerate(answer):
            if not isinstance(entry, (bytes, bytearray, memoryview)):
                raise InvalidArgument(
                    f"comm.allgather returned {_describe(entry)} for rank {rank}: "
                    "it must return the bytes which that rank gave"
                )
        return [bytes(entry) for entry in answer]

    def _gather(self, payload: bytes) -> Any:
        return self._comm.allgather(payload)

    def free(self) -> None:
        """Free the communicator if it was split off for tdx (collective)."""
        if self._owned and callable(getattr(self._comm, "Free", None)):
            self._owned = False
            self._comm.Free()


class _MpiComm(_CheckedComm):
    """A private mpi4py communicator. Buffers only: mpi4py's own `allgather` would pickle."""

    def _gather(self, payload: bytes) -> list[bytes]:
        import numpy as np

        counts = np.empty(self._size, np.int64)
        self._comm.Allgather(np.array([len(payload)], np.int64), counts)
        data = np.empty(int(counts.sum()), np.uint8)
        self._comm.Allgatherv(np.frombuffer(payload, np.uint8), (data, counts))
        ends = counts.cumsum().tolist()
        return [data[e - c : e].tobytes() for e, c in zip(ends, counts.tolist(), strict=True)]

    def free(self) -> None:
        if not _mpi_module().Is_finalized():
            super().free()


def open_comm(comm: Any = None) -> Comm:
    """The communicator that `tdx.init` works with (collective).

    Parameters
    ----------
    comm : mpi4py communicator, object like `Comm`, or None
        An mpi4py communicator, or another one with a working `Split`, is split, so that
        messages of tdx and of the caller cannot meet. None: MPI.COMM_WORLD if an MPI launcher
        started this process or mpi4py.MPI is already imported, else a world of one, for which
        mpi4py is not imported.

    Raises
    ------
    InvalidArgument
        No communicator, an intercommunicator, a null or freed one; the launcher belongs to
        another MPI than the library mpi4py uses; or no communicator was passed where torchrun
        started several processes.
    TdxError
        An MPI launcher started the process and mpi4py cannot be imported.
    """
    if comm is None:
        return _default_comm()
    if means_mpi(comm):
        return _split_mpi(comm)
    if isinstance(comm, type) or not isinstance(comm, Comm):
        raise InvalidArgument(
            f"comm is {_describe(comm)}: pass an mpi4py communicator, an object with Get_rank(), "
            "Get_size() and allgather(bytes), or None"
        )
    return _split_other(comm)


def means_mpi(comm: Any) -> bool:
    """Whether `open_comm` would use MPI."""
    if comm is None:
        return "mpi4py.MPI" in sys.modules or announced_size() is not None
    return "mpi4py.MPI" in sys.modules and isinstance(comm, _mpi_module().Comm)


def close_comm(comm: Comm) -> None:
    """Free what `open_comm` split off (collective); the caller's communicator is left alone."""
    if isinstance(comm, _CheckedComm):
        comm.free()


def announced_size() -> tuple[int, str] | None:
    """Size of the world and name of the launcher that started this process.

    The size is 0 where the launcher does not tell it. None: no MPI launcher did.
    """
    for variable, launcher in _LAUNCHERS:
        text = os.environ.get(variable, "")
        if variable.startswith("SLURM_") and "SLURM_STEP_ID" not in os.environ:
            continue
        if text.isdecimal() and int(text) > 0:
            if variable.startswith("SLURM_") and int(text) == 1:
                continue  # also the shell of an interactive allocation
            return int(text), launcher
    for variable, launcher in _SILENT_LAUNCHERS:
        if variable in os.environ:
            return 0, launcher
    return None


def announced_place() -> int | None:
    """Number of this process among those that its launcher started on this host, from 0.

    None: no launcher tells. Processes that others started may have inherited it and so share it.
    """
    for variable in _PLACES:
        text = os.environ.get(variable, "")
        if variable == _TORCHRUN_PLACE and "LOCAL_WORLD_SIZE" not in os.environ:
            continue  # a name that programs use as well
        if text.isdecimal() and len(text) <= _MOST_DIGITS:
            return int(text)
    return None


def mpi_takes_gpu_memory(backend: str) -> bool | None:
    """Whether this process's MPI takes addresses in memory of a "cuda" or "hip" GPU.

    None: it does not tell, or mpi4py is not loaded or MPI does not run.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    memory, functions = _GPU_MEMORY[backend]
    info = module.COMM_WORLD.Get_info()
    try:
        kinds = (info.Get("mpi_memory_alloc_kinds") or "").split(",")
    finally:
        info.Free()
    if memory in (kind.partition(":")[0] for kind in kinds):
        return True
    library = ctypes.CDLL(module.__file__)  # the functions are found in what it is linked with
    answers = [getattr(library, name)() for name in functions if hasattr(library, name)]
    return any(answers) if answers else None


def mpi_name() -> str:
    """What the MPI of this process calls itself, for messages."""
    module = sys.modules.get("mpi4py.MPI")
    return "MPI (mpi4py is not loaded)" if module is None else _library_of(module)


def _default_comm() -> Comm:
    announced = announced_size()
    if announced is None:
        module: Any = sys.modules.get("mpi4py.MPI")
        runs = module is not None and module.Is_initialized() and not module.Is_finalized()
        if not runs or module.COMM_WORLD.Get_size() == 1:
            _refuse_torchrun()
        return _split_mpi(module.COMM_WORLD) if runs else _SelfComm()
    size, launcher = announced
    if size == 1 and "mpi4py.MPI" not in sys.modules:
        return _SelfComm()
    module = _import_mpi(size, launcher)
    _require_running(module)
    if size > 1 and module.COMM_WORLD.Get_size() == 1:
        raise _other_mpi(module, size, launcher)
    return _split_mpi(module.COMM_WORLD)


def _refuse_torchrun() -> None:
    """Raise where each of several processes would make a world of one.

    torchrun, and launchers like it, number the processes in variables that are not MPI's.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and size.isdecimal() and int(size) > 1:
        raise InvalidArgument(
            f"WORLD_SIZE={size} and RANK={os.environ['RANK']} in the environment: torchrun, or "
            "what took its place, started this process, and no MPI launcher did; each process "
            f"would be a world of one. Start with `tdx run -n {size} ...` or mpirun, or pass "
            "comm=, as examples/frameworks/engine_torch_store.py does; for a world of one remove "
            "the two variables"
        )


def _import_mpi(size: int, launcher: str) -> Any:
    if "mpi4py.MPI" in sys.modules:
        return _mpi_module()
    try:
        import mpi4py

        # Initialising one MPI under the launcher of another one can end the process with an
        # obscure message, so the library is looked at first.
        initialize, finalize = mpi4py.rc.initialize, mpi4py.rc.finalize
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, initialize and finalize is not False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = initialize, finalize
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: no MPI library found
        raise TdxError(
            f"{launcher} started this process, but mpi4py cannot be imported ({error}). "
            "Install it with an MPI: pip install mpi4py mpich"
        ) from error
    if initialize and not MPI.Is_initialized():
        if launcher == _OPEN_MPI and size > 1 and _is_mpich(MPI):
            raise _other_mpi(MPI, size, launcher)
        if mpi4py.rc.threads:
            MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
        else:
            MPI.Init()
    return MPI


def _other_mpi(module: Any, size: int, launcher: str) -> InvalidArgument:
    return InvalidArgument(
        f"{launcher} started {size} ranks, but mpi4py uses another MPI, {_library_of(module)}, "
        f"for which each of them is alone. Start with `tdx run -n {size} ...`, which finds the "
        "launcher that matches, or with the mpirun that belongs to that library"
    )


def _library_of(module: Any) -> str:
    first = module.Get_library_version().strip("\0\n ").splitlines()[0]
    return " ".join(first.partition(",")[0].split())


def _is_mpich(module: Any) -> bool:
    version = module.Get_library_version()
    return any(name in version for name in ("MPICH", "MVAPICH", "Intel(R) MPI"))


def _mpi_module() -> Any:
    return sys.modules["mpi4py.MPI"]


def _require_running(module: Any) -> None:
    if not module.Is_initialized() or module.Is_finalized():
        state = "finalized" if module.Is_finalized() else "not initialized"
        raise InvalidArgument(f"MPI is {state}: call tdx.init between MPI.Init and MPI.Finalize")


def _split_mpi(comm: Any) -> Comm:
    module = _mpi_module()
    _require_running(module)
    if comm == module.COMM_NULL:
        raise InvalidArgument("comm is MPI.COMM_NULL (or was freed): pass a communicator in use")
    if comm.Is_inter():
        raise InvalidArgument(
            "comm is an intercommunicator: merge it first, with comm.Merge(), and pass the result"
        )
    return _MpiComm(comm.Split(0, comm.Get_rank()), owned=True)


def _split_other(comm: Any) -> Comm:
    if callable(getattr(comm, "Split", None)):
        try:
            private = comm.Split(0, _integer(comm, "Get_rank"))
        except NotImplementedError:
            private = None
        if private is not None and private is not comm:
            return _CheckedComm(private, owned=True)
    return _CheckedComm(comm, owned=False)


def _integer(comm: Any, name: str) -> int:
    value = getattr(comm, name)()
    try:
        return value.__index__()
    except AttributeError:
        raise InvalidArgument(f"comm.{name}() returned {_describe(value)}, not an int") from None


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
