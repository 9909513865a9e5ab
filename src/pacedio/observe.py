"""What the kernel says about the page cache. Only reading: nothing here writes, starts or drops anything."""

from __future__ import annotations

import os

from pacedio import _native

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more to import than this whole module
    from typing import NoReturn

    Target = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]

__all__ = ["CacheStat", "cachestat", "meminfo", "resident"]

_PIECE = 1 << 28  # bytes that resident() maps at once


class CacheStat:
    """Pages of a file's range in the page cache, as cachestat(2) counts them.

    All are numbers of pages (`os.sysconf("SC_PAGESIZE")` bytes each): `cached` in all, of which `dirty` and under
    `writeback`; `evicted` were cached once and are no longer, `recently_evicted` those whose return would say that
    memory is short. A large folio counts whole as soon as a part of it is dirty.
    """

    __slots__ = ("cached", "dirty", "evicted", "recently_evicted", "writeback")

    cached: int
    dirty: int
    writeback: int
    evicted: int
    recently_evicted: int

    def __init__(self, cached: int, dirty: int, writeback: int, evicted: int, recently_evicted: int) -> None:
        put = object.__setattr__
        put(self, "cached", cached)
        put(self, "dirty", dirty)
        put(self, "writeback", writeback)
        put(self, "evicted", evicted)
        put(self, "recently_evicted", recently_evicted)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot assign to {name!r}: a CacheStat is frozen")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r}: a CacheStat is frozen")

    def _values(self) -> tuple[int, int, int, int, int]:
        return self.cached, self.dirty, self.writeback, self.evicted, self.recently_evicted

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, CacheStat) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[type[CacheStat], tuple[int, int, int, int, int]]:
        return CacheStat, self._values()

    def __repr__(self) -> str:
        return (
            f"CacheStat(cached={self.cached}, dirty={self.dirty}, writeback={self.writeback}, "
            f"evicted={self.evicted}, recently_evicted={self.recently_evicted})"
        )


def cachestat(path_or_fd: Target, offset: int = 0, length: int = 0) -> CacheStat:
    """Count the pages of `length` bytes from `offset` (0: to the end of the file) that are in the page cache.

    cachestat(2): Linux 6.5 or later, and a descriptor open for writing, the file's ownership or, since 6.12, the
    permission to write it. On overlayfs every number is 0, since the pages belong to the file below; `resident`
    sees those. Raises OSError with errno (ENOSYS: kernel too old; EPERM; EOPNOTSUPP: hugetlbfs) and filename, and
    ValueError for a negative offset or length.
    """
    if offset < 0 or length < 0:
        raise ValueError(f"offset and length must not be negative: {offset}, {length}")
    fd = _descriptor(path_or_fd)
    try:
        pages = _native.ffi.new("pio_pages *")
        code = _native.lib.pio_sys_table.cachestat(fd, offset, length, pages)
    finally:
        if fd is not path_or_fd:
            os.close(fd)
    if code < 0:
        raise _native.error(code, path_or_fd)
    return CacheStat(pages.cached, pages.dirty, pages.writeback, pages.evicted, pages.recently_evicted)


def resident(path_or_fd: Target) -> int:
    """Count the file's pages in the page cache through a mapping of it, as fincore(1) does.

    Slower than `cachestat`, but it needs no recent kernel and tells the truth on overlayfs. The descriptor must be
    open for reading. For a file that is neither owned nor writable mincore(2) calls every page resident (Linux
    5.2). Raises OSError with errno and filename.
    """
    table, ffi = _native.lib.pio_sys_table, _native.ffi
    page = _native.lib.pio_page_size()
    fd = _descriptor(path_or_fd)
    try:
        size = os.fstat(fd).st_size
        count = 0
        for offset in range(0, size, _PIECE):
            length = min(_PIECE, size - offset)
            address = ffi.new("void **")
            flags = ffi.new("unsigned char[]", -(-length // page))
            code = table.mmap(fd, offset, length, address)
            if code == 0:
                code = table.mincore(address[0], length, flags)
                table.munmap(address[0], length)
            if code < 0:
                raise _native.error(code, path_or_fd)
            count += sum(flag & 1 for flag in ffi.buffer(flags)[:])  # the other bits are reserved
    finally:
        if fd is not path_or_fd:
            os.close(fd)
    return count


def meminfo() -> dict[str, int]:
    """Read the machine's memory counters (proc_meminfo(5)): "Dirty", "Writeback", "Cached" and so on, in bytes.

    What is not an amount of memory (the numbers of huge pages) is left out.
    """
    amounts = {}
    with open("/proc/meminfo", "rb") as f:
        for line in f:
            fields = line.split()
            if len(fields) == 3:  # name, number, "kB"
                amounts[fields[0][:-1].decode()] = int(fields[1]) * 1024
    return amounts


def _descriptor(path_or_fd: Target) -> int:
    if isinstance(path_or_fd, int):
        return path_or_fd
    # Without O_NONBLOCK, opening a FIFO would wait for its other end.
    return os.open(path_or_fd, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
