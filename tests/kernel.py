"""Stands in for the kernel behind the system call table: it keeps which pages of a file are dirty, under writeback and
cached, so that a test can say what fails, when, and see whether the bound held all the same. The bytes themselves go
to a real file.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacedio._native import ffi, lib

PAGE = lib.pio_page_size()
WAIT_BEFORE, START, WAIT_AFTER = 1, 2, 4
DONTNEED = os.POSIX_FADV_DONTNEED

EXT4 = 0xEF53
XFS = 0x58465342
BTRFS = 0x9123683E
KEEP_SIZE = 1
DELALLOC = 4  # FIEMAP_EXTENT_DELALLOC
COMPRESSED = 4  # FS_COMPR_FL
OVERLAYFS = 0x794C7630
ZFS = 0x2FC12FC1
TMPFS = 0x01021994

_mounts = itertools.count(1 << 50)

Fault = Callable[[int], int | None]  # the call's number, from 1 on, to a negative errno, or None: it works


def always(code: int) -> Fault:
    return lambda _: -code


def at(*numbers: int, code: int) -> Fault:
    return lambda number: -code if number in numbers else None


def since(first: int, code: int) -> Fault:
    return lambda number: -code if number >= first else None


def every_other(code: int) -> Fault:
    return lambda number: -code if number % 2 else None


class Kernel:
    """A mount that no writer saw before, with one file on it."""

    def __init__(self) -> None:
        self.table = lib.pio_sys_table
        self.real = {name: getattr(self.table, name) for name, _ in ffi.typeof("pio_sys").fields}
        self._kept: list[Any] = []
        self.broken: list[BaseException] = []  # what went wrong in here
        self.calls: list[str] = []
        self.faults: dict[str, Fault] = {}
        self.mount = next(_mounts)
        self.magic = EXT4
        self.dirty: set[int] = set()
        self.writeback: set[int] = set()
        self.cached: set[int] = set()
        self.most = 0  # bytes dirty or under writeback
        self.shortest = 1 << 62  # what one write call takes
        self.sync_file_range_lies = False  # it succeeds and does nothing
        self.other_mapping = False  # cachestat sees nothing
        self.mapped_by_others = False  # pages stay cached
        self.written_through = False  # pages are clean at once
        self.clock = 0  # ahead of the real one, ns
        self.room = 1 << 40  # bytes available
        self.allocated: list[tuple[int, int]] = []  # what fallocate was asked for: from, to
        self.blocks_until = 0  # of the file, beyond its end as well
        self.extent: tuple[int, int, int] | None = None  # somebody else's, beyond the end: offset, length, flags
        self.inode = 0  # FS_IOC_GETFLAGS
        self.shared_memory: Path | None = None  # what /dev/shm is; without, each process has a budget of its own
        self._shared: set[int] = set()  # where its files are mapped
        self.priority = 0
        self.priorities: dict[str, set[int]] = {}  # with which each call was made

    def install(self) -> None:
        for name in self.real:
            if function := getattr(self, name, None):
                self.replace(name, function)

    def restore(self) -> None:
        for name, entry in self.real.items():
            setattr(self.table, name, entry)

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        """Puts `function` in the table, behind what counts and fails the calls."""

        def entry(*arguments: Any) -> int:
            self.calls.append(name)
            self.priorities.setdefault(name, set()).add(self.priority)
            fault = self.faults.get(name)
            code = fault(self.calls.count(name)) if fault else None
            return int(function(*arguments) if code is None else code)

        def onerror(_kind: object, error: BaseException, _traceback: object) -> None:
            self.broken.append(error)

        callback = ffi.callback(ffi.typeof(self.real[name]), entry, error=-errno.ENOTRECOVERABLE, onerror=onerror)
        self._kept.append(callback)
        setattr(self.table, name, callback)

    def count(self, *names: str) -> int:
        return sum(map(self.calls.count, names))

    # ---- the entries ----

    def write(self, fd: int, buf: Any, n: int) -> int:
        written = int(self.real["write"](fd, buf, min(n, self.shortest)))
        end = self.real["lseek"](fd, 0, os.SEEK_CUR)
        if written <= 0 or end < 0:
            return written
        pages = set(range((end - written) // PAGE, -(-end // PAGE)))
        self.cached |= pages
        if not self.written_through:
            self.dirty |= pages
        self.most = max(self.most, len(self.dirty | self.writeback) * PAGE)
        return written

    def write_uncached(self, fd: int, buf: Any, n: int) -> int:
        before = set(self.dirty)
        written = self.write(fd, buf, n)
        self.writeback |= self.dirty - before
        self.dirty = before
        return written

    def sync_file_range(self, _fd: int, off: int, length: int, flags: int) -> int:
        if self.sync_file_range_lies:
            return 0
        pages = range(off // PAGE, (off + length) // PAGE)
        if flags & WAIT_BEFORE:
            self.writeback.difference_update(pages)
        if flags & START:
            self.writeback |= self.dirty.intersection(pages)
            self.dirty.difference_update(pages)
        if flags & WAIT_AFTER:
            self.writeback.difference_update(pages)
        return 0

    def fadvise(self, _fd: int, off: int, length: int, advice: int) -> int:
        assert advice == DONTNEED
        pages = set(range(off // PAGE, (off + length) // PAGE))
        if not self.mapped_by_others:
            self.cached -= pages - self.dirty - self.writeback
        self.writeback |= self.dirty & pages
        self.dirty -= pages
        return 0

    def fdatasync(self, _fd: int) -> int:
        self.dirty.clear()
        self.writeback.clear()
        return 0

    def cachestat(self, _fd: int, off: int, length: int, out: Any) -> int:
        assert length > 0
        pages = set() if self.other_mapping else set(range(off // PAGE, (off + length) // PAGE))
        out.cached = len(self.cached & pages)
        out.dirty = len(self.dirty & pages)
        out.writeback = len(self.writeback & pages)
        return 0

    def mmap(self, fd: int, off: int, _length: int, out: Any) -> int:
        assert os.get_blocking(fd) is not None  # an open descriptor
        assert off % PAGE == 0
        out[0] = ffi.cast("void *", off + PAGE)
        return 0

    def munmap(self, address: Any, length: int) -> int:
        at = int(ffi.cast("intptr_t", address))
        if at in self._shared:
            self._shared.remove(at)
            return int(self.real["munmap"](address, length))
        return 0

    def msync(self, address: Any, length: int) -> int:
        first = int(ffi.cast("intptr_t", address)) // PAGE - 1
        pages = set(range(first, first + -(-length // PAGE)))
        self.dirty -= pages
        self.writeback -= pages
        return 0

    def mincore(self, address: Any, length: int, vec: Any) -> int:
        first = int(ffi.cast("intptr_t", address)) // PAGE - 1
        for i in range(-(-length // PAGE)):
            vec[i] = first + i in self.cached
        self.writeback.difference_update(range(first, first + -(-length // PAGE)))  # time passes
        return 0

    def open(self, path: Any, flags: int) -> int:
        return int(self.real["open"](path, flags))

    def lseek(self, fd: int, off: int, whence: int) -> int:
        return int(self.real["lseek"](fd, off, whence))

    def ftruncate(self, fd: int, size: int) -> int:
        gone = {page for page in self.cached if page * PAGE >= size}
        self.cached -= gone
        self.dirty -= gone
        self.writeback -= gone
        self.blocks_until = min(self.blocks_until, -(-size // PAGE) * PAGE)
        return int(self.real["ftruncate"](fd, size))

    def get_flags(self, fd: int) -> int:
        return int(self.real["get_flags"](fd))

    def status(self, fd: int, out: Any) -> int:
        code = int(self.real["status"](fd, out))
        out.mount = self.mount
        # A device of its own, and none that sysfs knows: what is found out here is not the real one's.
        out.dev_major, out.dev_minor = 0, self.mount & 0xFFFFFFFF
        return code

    def file_system(self, _fd: int, magic: Any) -> int:
        magic[0] = self.magic
        return 0

    def available(self, _fd: int) -> int:
        return self.room

    def fallocate(self, fd: int, mode: int, off: int, length: int) -> int:
        if mode == 0:  # of the memory that is shared with other processes
            return int(self.real["fallocate"](fd, mode, off, length))
        assert mode == KEEP_SIZE
        assert length > 0
        self.allocated.append((off, off + length))
        self.blocks_until = off + length
        return 0

    def next_extent(self, _fd: int, off: int, out: Any) -> int:
        if self.extent is None or sum(self.extent[:2]) <= off:
            return 0
        out.off, out.len, out.flags = self.extent
        return 1

    def inode_flags(self, _fd: int) -> int:
        return self.inode

    def mount_id(self, fd: int) -> int:
        return int(self.real["mount_id"](fd))

    def read(self, fd: int, buf: Any, n: int) -> int:
        return int(self.real["read"](fd, buf, n))

    def ioprio_get(self) -> int:
        return self.priority

    def ioprio_set(self, priority: int) -> int:
        self.priority = priority
        return 0

    def now(self) -> int:
        return int(self.real["now"]()) + self.clock

    def sleep(self, ns: int) -> int:
        self.clock += ns
        return 0

    def _in_shared_memory(self, name: str, path: Any, *arguments: Any) -> int:
        if self.shared_memory is None:
            return -errno.EACCES
        real = os.fsencode(self.shared_memory) + ffi.string(path).removeprefix(b"/dev/shm")
        return int(self.real[name](ffi.new("char[]", real), *arguments))

    def make_directory(self, path: Any, mode: int) -> int:
        return self._in_shared_memory("make_directory", path, mode)

    def path_status(self, path: Any, out: Any) -> int:
        return self._in_shared_memory("path_status", path, out)

    def open_or_create(self, path: Any, mode: int) -> int:
        return self._in_shared_memory("open_or_create", path, mode)

    def map_shared(self, fd: int, length: int, out: Any) -> int:
        code = int(self.real["map_shared"](fd, length, out))
        if code == 0:
            self._shared.add(int(ffi.cast("intptr_t", out[0])))
        return code

    def lock(self, fd: int, byte: int, take: int) -> int:
        return int(self.real["lock"](fd, byte, take))


@contextmanager
def simulated() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        kernel.install()
        yield kernel
    finally:
        kernel.restore()
    if kernel.broken:
        raise kernel.broken[0]
