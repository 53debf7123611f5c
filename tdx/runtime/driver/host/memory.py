"""Shared memory for the host tier: sealed memfd, reserved addresses, MAP_FIXED.

The same verbs as a GPU's virtual-memory calls: create, export, import, reserve, map, unmap.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource

from tdx.runtime.errors import DriverError, HeapExhausted, Unsupported
from tdx.runtime.mappings import Mapping, mappings

__all__ = ["HostMemory", "available_bytes"]

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_GRANULARITY = 2 << 20  # one huge page, also what a GPU's mappings are rounded to

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_SHAREABLE = (
    "the host tier can share what is a file, mapped shared and writable: an array over "
    "multiprocessing.shared_memory.SharedMemory, over mmap.mmap of an os.memfd_create, or a "
    'numpy.memmap(mode="r+"). Everything else is copied: world.array(x)'
)


def available_bytes() -> int:
    """The smaller of the machine's RAM and the process's cgroup limit, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))
    return total


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if got in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise DriverError(f"mmap of {nbytes} bytes failed: {os.strerror(code)}")
    return int(got)


def _no_descriptor(error: OSError) -> DriverError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DriverError(
        f"no file descriptor for shared memory (limit {limit}): {error.strerror}; raise the limit "
        "with `ulimit -n`"
    )


class HostMemory:
    """Handles of shared memory are duplicates of its file descriptor; closing them releases it."""

    def granularity(self) -> int:
        return _GRANULARITY

    def mem_create(self, nbytes: int) -> int:
        try:
            fd = os.memfd_create("tdx-heap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _no_descriptor(error) from error
        try:
            # fallocate commits the pages: running out is an error here, not a signal later
            os.posix_fallocate(fd, 0, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise HeapExhausted(
                    f"heap: {nbytes} bytes of shared memory cannot be committed "
                    f"({error.strerror}); pass a smaller heap_bytes= to tdx.init"
                ) from error
            raise DriverError(f"{nbytes} bytes of shared memory: {error}") from error
        return fd

    def mem_export(self, handle: int) -> int:
        return self._duplicate(handle)

    def mem_import(self, fd: int, nbytes: int) -> int:
        size = os.fstat(fd).st_size
        if -(-size // mmap.PAGESIZE) * mmap.PAGESIZE < nbytes:
            raise DriverError(f"a peer exported {size} bytes where {nbytes} were agreed")
        return self._duplicate(fd)

    def mem_find(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        end = address + nbytes
        maps = [m for m in mappings() if m.start < end and address < m.end]
        for m in maps:
            if not (m.rights.startswith("rw") and m.rights.endswith("s") and m.inode):
                kind = "private to this process" if m.rights.endswith("p") else "read-only"
                raise Unsupported(f"the memory at {address:#x} is {kind}; {_SHAREABLE}")
        # the whole file from its first byte on, mapped here or not: mem_map knows no offset
        files = {(m.device, m.inode, m.start - m.offset) for m in maps}
        if len(files) != 1:
            raise Unsupported(f"{nbytes} bytes at {address:#x} are of several files; {_SHAREABLE}")
        start = maps[0].start - maps[0].offset
        return [(start, maps[-1].end - start)]

    def mem_retain(self, address: int) -> int:
        mapping = next(m for m in mappings() if m.start <= address < m.end)
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if _is_of(int(number), mapping):
                    return self._duplicate(int(number))
        try:
            return os.open(mapping.file, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unsupported(
                f"the memory at {address:#x} is the file {mapping.file}, of which this process "
                f"has no open descriptor and which it cannot open again ({error.strerror}); "
                f"{_SHAREABLE}"
            ) from error

    @staticmethod
    def _duplicate(fd: int) -> int:
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as error:
            raise _no_descriptor(error) from error

    def mem_release(self, handle: int) -> None:
        os.close(handle)

    def addr_reserve(self, nbytes: int) -> int:
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        return _mmap(None, nbytes, _PROT_NONE, flags, -1)

    def addr_free(self, address: int, nbytes: int) -> None:
        if _libc.munmap(address, nbytes) != 0:
            raise DriverError(f"munmap failed: {os.strerror(ctypes.get_errno())}")

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        got = _mmap(address, nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, handle)
        assert got == address

    def mem_unmap(self, address: int, nbytes: int) -> None:
        # mapping PROT_NONE over it keeps the addresses reserved
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, nbytes, _PROT_NONE, flags, -1)


def _is_of(fd: int, mapping: Mapping) -> bool:
    """Whether a descriptor is the mapped file's, for reading and writing."""
    status = os.fstat(fd)
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return writable and (status.st_dev, status.st_ino) == (mapping.device, mapping.inode)
