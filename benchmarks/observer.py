"""What another process sees of a file that is being written: `python observer.py DIRECTORY`.

Prints "ready" once the baseline is taken, then watches until its standard input ends, then prints one JSON object.
It watches the first file that appears in DIRECTORY, also if that is renamed later. It uses nothing of pacedio, so that
what it sees does not depend on the code that it judges.

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


def first_file(directory: str) -> int | None:
    """A descriptor of a regular file in `directory`, or None while there is none."""
    with os.scandir(directory) as entries:
        for entry in entries:
            # It may be renamed at this moment; then the next look finds it.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    return os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def watch(directory: str) -> dict[str, object]:
    meminfo = Meminfo()
    cachestat = Cachestat()
    page = os.sysconf("SC_PAGE_SIZE")
    baseline = min(meminfo.in_flight() for _ in range(5))
    print("ready", flush=True)
    began, cpu_began = time.perf_counter(), time.process_time()
    samples = counted = most_meminfo = most_dirty = most_writeback = most_in_flight = most_cached = 0
    longest_gap = longest_cachestat_gap = 0.0
    fd: int | None = None
    previous = began
    previous_count: float | None = None
    next_count = 0.0
    while True:
        now = time.perf_counter()
        longest_gap = max(longest_gap, now - previous)
        previous = now
        samples += 1
        most_meminfo = max(most_meminfo, meminfo.in_flight() - baseline)
        if fd is None:
            fd = first_file(directory)
        if fd is not None and not cachestat.errno and now >= next_count:
            pages = cachestat(fd)
            after = time.perf_counter()
            if pages is not None:
                if previous_count is not None:
                    longest_cachestat_gap = max(longest_cachestat_gap, now - previous_count)
                previous_count = now
                next_count = after + REST * (after - now)
                counted += 1
                most_dirty = max(most_dirty, pages.dirty)
                most_writeback = max(most_writeback, pages.writeback)
                most_in_flight = max(most_in_flight, pages.dirty + pages.writeback)
                most_cached = max(most_cached, pages.cached)
        if select.select([sys.stdin], [], [], INTERVAL)[0]:
            break
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
    }


if __name__ == "__main__":
    print(json.dumps(watch(sys.argv[1])))
