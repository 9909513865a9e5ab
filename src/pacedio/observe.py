"""What the kernel says about the page cache. Only reading: nothing here writes, starts or drops anything."""

from __future__ import annotations

import os
from time import monotonic

from pacedio import _native

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more to import than this whole module
    from typing import Any, ClassVar, NoReturn

    Target = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]

__all__ = ["CacheStat", "DirtyThresholds", "cachestat", "dirty_thresholds", "limit_cap", "meminfo", "resident"]

_PIECE = 1 << 28  # bytes that resident() maps at once
_PAGE: int = _native.lib.pio_page_size()
_UNLIMITED = 1 << 62  # bytes; cgroup v1 calls it 9223372036854771712


class _Frozen:
    """A value: made of what `__match_args__` names, in that order, and never changed."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __init__(self, *values: object) -> None:
        for name, value in zip(self.__match_args__, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot assign to {name!r}: a {type(self).__name__} is frozen")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r}: a {type(self).__name__} is frozen")

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[type[_Frozen], tuple[Any, ...]]:
        return type(self), self._values()

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in zip(self.__match_args__, self._values(), strict=True))
        return f"{type(self).__name__}({', '.join(values)})"


class CacheStat(_Frozen):
    """Pages of a file's range in the page cache, as cachestat(2) counts them.

    All are numbers of pages (`os.sysconf("SC_PAGESIZE")` bytes each): `cached` in all, of which `dirty` and under
    `writeback`; `evicted` were cached once and are no longer, `recently_evicted` those whose return would say that
    memory is short. A large folio counts whole as soon as a part of it is dirty.
    """

    __slots__ = ("cached", "dirty", "evicted", "recently_evicted", "writeback")
    __match_args__ = ("cached", "dirty", "writeback", "evicted", "recently_evicted")

    cached: int
    dirty: int
    writeback: int
    evicted: int
    recently_evicted: int

    def __init__(self, cached: int, dirty: int, writeback: int, evicted: int, recently_evicted: int) -> None:
        super().__init__(cached, dirty, writeback, evicted, recently_evicted)


class DirtyThresholds(_Frozen):
    """How much memory may be dirty before the kernel acts, in bytes.

    Above `background` its own writeback starts, at `dirty` it holds writers back as far as it takes. It begins to
    do so at `freerun`, half-way between the two. They were computed from `dirtyable`: the memory that could hold
    dirty pages. `source` says whose they are: "machine", or the memory cgroup's path as in /proc/self/cgroup.
    """

    __slots__ = ("background", "dirty", "dirtyable", "source")
    __match_args__ = ("background", "dirty", "dirtyable", "source")

    background: int
    dirty: int
    dirtyable: int
    source: str

    def __init__(self, background: int, dirty: int, dirtyable: int, source: str) -> None:
        super().__init__(background, dirty, dirtyable, source)

    @property
    def freerun(self) -> int:
        """(background + dirty) / 2: while no more is dirty or under writeback, the kernel does not stop a writer."""
        return (self.background + self.dirty) // 2


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


def dirty_thresholds(*, root: str = "/") -> DirtyThresholds:
    """Read the dirty thresholds that apply to this process: the machine's or those of its memory cgroup, whichever
    has the lower `background`.

    The machine's are the kernel's own numbers (nr_dirty_threshold and nr_dirty_background_threshold of /proc/vmstat;
    computed where they are missing). Those of a cgroup are computed as mm/page-writeback.c does it for cgroup
    writeback: its file pages and what it may still take (the least of limit - usage over itself and all visible
    ancestors, and not more than the machine has of other clean memory), of which the ratios are taken;
    vm.dirty_bytes and vm.dirty_background_bytes become ratios of the machine's dirtyable memory. Both cgroup v2
    (memory.max, memory.high) and v1 (memory.limit_in_bytes) count, although on v1 the kernel knows no such thresholds:
    there a writer is stopped when the cgroup is full, which comes later. A cgroup file that is missing or cannot be
    read counts as no limit, and without any limit the thresholds are the machine's.

    `root` is where a tree of files like the kernel's begins, for recorded ones. Raises OSError with errno and
    filename where /proc cannot be read.
    """
    return _Source(root).read()


def limit_cap() -> int | None:
    """The most bytes that writers of this process should have in flight together, a quarter of the background
    threshold of `dirty_thresholds`: whole pages, at least one. None where nothing could be read.

    Read at most once a second a process (threads that ask at the same moment may each do so); in between, the answer
    is the last one.
    """
    global _cap  # noqa: PLW0603
    now = monotonic()
    if now >= _cap[0]:
        try:
            pages = _here.read().background // _PAGE // 4
        except OSError:
            _cap = now + 1, None
        else:
            _cap = now + 1, max(pages, 1) * _PAGE
    return _cap[1]


class _Source:
    """Where thresholds are read. What hardly ever changes is kept from one reading to the next: where the cgroup's
    files are, for as long as the process is in the same one, and the machine's reserve of free pages. Numbers are in
    pages where nothing else is said, as in the kernel.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._reserve: int | None = None
        self._membership: bytes | None = None
        self._cgroup = _Cgroup("", [], v2=True)

    def read(self) -> DirtyThresholds:
        vmstat = b"\n" + _contents(f"{self._root}/proc/vmstat")
        if self._reserve is None:
            self._reserve = _reserve(_contents_or_nothing(f"{self._root}/proc/zoneinfo"))
        # In kB. Where memory is brought online bit by bit, vmstat's nr_free_pages is less than the kernel reckons with.
        free = _number(b"\n" + _contents(f"{self._root}/proc/meminfo"), b"MemFree:") * 1024 // _PAGE
        files = _number(vmstat, b"nr_active_file") + _number(vmstat, b"nr_inactive_file")
        dirtyable = free - min(free, self._reserve) + files + 1
        dirty = _number(vmstat, b"nr_dirty_threshold")
        background = _number(vmstat, b"nr_dirty_background_threshold")
        if not dirty:  # before Linux 2.6.37, or something that only looks like Linux
            background, dirty = self._limits(dirtyable)
        source = "machine"

        membership = _contents_or_nothing(f"{self._root}/proc/self/cgroup")
        if membership != self._membership:
            self._cgroup = _find_cgroup(self._root, membership)
            self._membership = membership
        found = self._cgroup.memory()
        if found is not None:
            cached, not_clean, headroom = found
            clean = dirtyable - min(dirtyable, _number(vmstat, b"nr_dirty") + _number(vmstat, b"nr_writeback"))
            others = clean - min(clean, cached - min(cached, not_clean))
            available = cached + min(headroom, others)
            limits = self._limits(available, dirtyable)
            if limits[0] < background:
                background, dirty = limits
                dirtyable, source = available, self._cgroup.path
        return DirtyThresholds(background * _PAGE, dirty * _PAGE, dirtyable * _PAGE, source)

    def _limits(self, available: int, machine: int | None = None) -> tuple[int, int]:
        """Background and dirty threshold for so much memory: the machine's own or, where that is given as well, a
        cgroup's.
        """
        dirty = self._limit("dirty", available, machine)
        background = self._limit("dirty_background", available, machine)
        return (background if background < dirty else dirty // 2), dirty

    def _limit(self, name: str, available: int, machine: int | None) -> int:
        amount = int(_contents(f"{self._root}/proc/sys/vm/{name}_bytes"))
        if amount and machine is None:
            return -(-amount // _PAGE)
        if amount and machine is not None:  # in 1/_PAGE, as the ratios are
            ratio = min(-(-amount // machine), _PAGE)
        else:
            ratio = int(_contents(f"{self._root}/proc/sys/vm/{name}_ratio")) * _PAGE // 100
        return ratio * available // _PAGE


class _Cgroup:
    """A memory cgroup. `directories` are its own and its ancestors', as far up as they are to be seen and count."""

    def __init__(self, path: str, directories: list[str], *, v2: bool) -> None:
        self.path = path
        self._directories = directories
        self._limits = ("memory.max", "memory.high") if v2 else ("memory.limit_in_bytes",)
        self._usage = "memory.current" if v2 else "memory.usage_in_bytes"
        # All these include the cgroups below, as the kernel's do.
        self._cached = (b"active_file", b"inactive_file") if v2 else (b"total_active_file", b"total_inactive_file")
        self._not_clean = (b"file_dirty", b"file_writeback") if v2 else (b"total_dirty", b"total_writeback")

    def memory(self) -> tuple[int, int, int] | None:
        """File pages, those of them that are dirty or under writeback, and how many pages it may take yet. None
        without a limit.
        """
        own = None  # on v2 a cgroup without the controller belongs to the next above that has it
        headroom = _UNLIMITED
        for directory in self._directories:
            limits = [_contents_or_nothing(f"{directory}/{name}").strip() for name in self._limits]
            if own is None and any(limits):
                own = directory
            limit = min(int(limit) if limit.isdigit() else _UNLIMITED for limit in limits)  # the word is "max"
            if limit < _UNLIMITED:
                usage = _contents_or_nothing(f"{directory}/{self._usage}").strip()
                if usage.isdigit():
                    headroom = min(headroom, max(limit - int(usage), 0))
        if headroom == _UNLIMITED:
            return None
        stat = b"\n" + _contents_or_nothing(f"{own}/memory.stat")
        if stat == b"\n":
            return None
        cached = sum(_number(stat, name) for name in self._cached)
        not_clean = sum(_number(stat, name) for name in self._not_clean)
        return cached // _PAGE, not_clean // _PAGE, headroom // _PAGE


def _find_cgroup(root: str, membership: bytes) -> _Cgroup:
    """The memory cgroup that /proc/self/cgroup tells of. A v1 hierarchy that has the memory controller decides, since
    the v2 one has none then.
    """
    v2, path = True, None
    for line in membership.splitlines():
        number, controllers, where = line.split(b":", 2)
        if b"memory" in controllers.split(b","):
            v2, path = False, where
            break
        if number == b"0":
            path = where
    if path is None:
        return _Cgroup("", [], v2=True)
    # A mount may begin at any cgroup, such as a container's own. The best one shows the most ancestors, and is on top.
    best = None
    for line in _contents_or_nothing(f"{root}/proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(b" - ")
        kinds = kind.split()
        if kinds[0] != (b"cgroup2" if v2 else b"cgroup") or not (v2 or b"memory" in kinds[-1].split(b",")):
            continue
        top, point = (_unescaped(field).rstrip(b"/") for field in mount.split()[3:5])
        below = path.rstrip(b"/") + b"/"
        if below.startswith(top + b"/") and (best is None or len(top) <= len(best[0])):
            best = top, point, below[len(top) : -1]
    directories = []
    if best is not None and b".." not in best[2].split(b"/"):  # ".." leads out of the cgroup namespace and the mount
        _, point, below = best
        while True:
            directories.append(root + os.fsdecode(point + below))
            if not below:
                break
            below = below.rpartition(b"/")[0]
            # Until Linux 5.11, limits could be made not to count for what is below.
            if not v2 and _contents_or_nothing(f"{root}{os.fsdecode(point + below)}/memory.use_hierarchy") == b"0\n":
                break
    return _Cgroup(os.fsdecode(path), directories, v2=v2)


def _reserve(zoneinfo: bytes) -> int:
    """Free pages that the kernel does not count as dirtyable: each zone's high watermark and most protection.

    A boost, which raises the watermarks for a while, is not part of it.
    """
    reserve = high = boost = managed = 0
    for line in zoneinfo.splitlines():
        name, _, value = line.strip().partition(b" ")
        if name == b"high":
            high = int(value)
        elif name == b"boost":
            boost = int(value)
        elif name == b"managed":
            managed = int(value)
        elif name == b"protection:":
            reserve += min(high - boost + max(int(pages) for pages in value.strip(b" ()").split(b",")), managed)
    return reserve


def _unescaped(field: bytes) -> bytes:
    """What mountinfo wrote with octal escapes."""
    first, *rest = field.split(b"\\")
    return first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)


def _number(text: bytes, name: bytes) -> int:
    """The number behind a name at the beginning of a line, but not of the text, in kB or without a unit; 0 if there is
    none.
    """
    at = text.find(b"\n" + name + b" ")
    return 0 if at < 0 else int(text[at + len(name) + 2 : text.find(b"\n", at + 1)].removesuffix(b"kB"))


def _contents(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # open() would take several times as long
    try:
        data = b""
        while piece := os.read(fd, 1 << 16):
            data += piece
    except OSError as e:
        e.filename = path
        raise
    finally:
        os.close(fd)
    return data


def _contents_or_nothing(path: str) -> bytes:
    try:
        return _contents(path)
    except OSError:
        return b""


def _descriptor(path_or_fd: Target) -> int:
    if isinstance(path_or_fd, int):
        return path_or_fd
    # Without O_NONBLOCK, opening a FIFO would wait for its other end.
    return os.open(path_or_fd, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)


_here = _Source("/")
_cap: tuple[float, int | None] = (0.0, None)  # when it is to be read again, and what was read
