"""What another process sees of files that are being written: `python observer.py DIRECTORY [COUNT]`.

Prints "ready" once the baseline is taken, then watches until its standard input ends, then prints one JSON object.
For each line that comes before, it prints one with what it saw since the line before. It watches the first COUNT files
(1) that appear in DIRECTORY, also if they are renamed later, and adds up what they have. It uses nothing of pacedio, so
that what it sees does not depend on the code that it judges.

/proc/meminfo is machine-wide and kept in per-CPU counters, so it may be off by a few hundred KiB a CPU; cachestat
counts the pages of the file exactly but walks all of them. So each cachestat is followed by 20 times its own duration
without one: it may take 5 % of one CPU, no more, and "cachestat_longest_gap" says what that cost in sharpness.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import sys
import time

INTERVAL = 0.003
REST = 20  # durations of a cachestat between two of them
CACHESTAT = 451  # the same on all architectures but alpha


class Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class Pages(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


class Meminfo:
    """Dirty and Writeback of the machine, in bytes."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/meminfo", os.O_RDONLY)

    def in_flight(self) -> int:
        text = os.pread(self._fd, 4096, 0)
        total = 0
        for name in (b"\nDirty:", b"\nWriteback:"):
            start = text.index(name) + len(name)
            total += int(text[start : text.index(b"kB", start)])
        return total * 1024


class Cachestat:
    """Pages of a descriptor as the kernel counts them; None where it does not (before 6.5)."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._whole = Range(0, 0)
        self.errno = 0

    def __call__(self, fd: int) -> Pages | None:
        pages = Pages()
        result = self._syscall(
            ctypes.c_long(CACHESTAT),
            ctypes.c_int(fd),
            ctypes.byref(self._whole),
            ctypes.byref(pages),
            ctypes.c_uint(0),
        )
        if result:
            self.errno = ctypes.get_errno()
            return None
        return pages


def new_files(directory: str, known: dict[int, int], count: int) -> None:
    """Open the regular files in `directory` that are not known yet, by inode, until `count` are."""
    with os.scandir(directory) as entries:
        for entry in entries:
            # It may be renamed or removed at this moment; then the next look finds it, or not.
            with contextlib.suppress(FileNotFoundError):
                if len(known) < count and entry.is_file(follow_symlinks=False) and entry.inode() not in known:
                    known[entry.inode()] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)


def watch(directory: str, count: int) -> None:
    meminfo = Meminfo()
    cachestat = Cachestat()
    baseline = min(meminfo.in_flight() for _ in range(5))
    known: dict[int, int] = {}
    print("ready", flush=True)
    while True:
        seen, goes_on = watch_once(directory, count, known, meminfo, cachestat, baseline)
        print(json.dumps(seen), flush=True)
        if not goes_on:
            return


def watch_once(
    directory: str, count: int, known: dict[int, int], meminfo: Meminfo, cachestat: Cachestat, baseline: int
) -> tuple[dict[str, object], bool]:
    """Watch until something comes on standard input; whether that was a line."""
    page = os.sysconf("SC_PAGE_SIZE")
    began, cpu_began = time.perf_counter(), time.process_time()
    samples = counted = most_meminfo = most_dirty = most_writeback = most_in_flight = most_cached = 0
    longest_gap = longest_cachestat_gap = 0.0
    previous = began
    previous_count: float | None = None
    next_count = 0.0
    while True:
        now = time.perf_counter()
        longest_gap = max(longest_gap, now - previous)
        previous = now
        samples += 1
        most_meminfo = max(most_meminfo, meminfo.in_flight() - baseline)
        if len(known) < count:
            new_files(directory, known, count)
        if known and not cachestat.errno and now >= next_count:
            pages = [cachestat(fd) for fd in known.values()]
            after = time.perf_counter()
            all_known = [each for each in pages if each is not None]
            if len(all_known) == len(pages):
                if previous_count is not None:
                    longest_cachestat_gap = max(longest_cachestat_gap, now - previous_count)
                previous_count = now
                next_count = after + REST * (after - now)
                counted += 1
                dirty = sum(each.dirty for each in all_known)
                writeback = sum(each.writeback for each in all_known)
                most_dirty = max(most_dirty, dirty)
                most_writeback = max(most_writeback, writeback)
                most_in_flight = max(most_in_flight, dirty + writeback)
                most_cached = max(most_cached, sum(each.cached for each in all_known))
        if select.select([sys.stdin], [], [], INTERVAL)[0]:
            break
    goes_on = bool(os.read(sys.stdin.fileno(), 1))
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "baseline": baseline,
        "meminfo_samples": samples,
        "meminfo_longest_gap": longest_gap,
        "meminfo_most_in_flight": most_meminfo,
        "cachestat_samples": counted,
        "cachestat_errno": cachestat.errno,
        "cachestat_longest_gap": longest_cachestat_gap,
        "cachestat_most_dirty": most_dirty * page if counted else None,
        "cachestat_most_writeback": most_writeback * page if counted else None,
        "cachestat_most_in_flight": most_in_flight * page if counted else None,
        "cachestat_most_cached": most_cached * page if counted else None,
    }, goes_on


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 1)
