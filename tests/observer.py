"""Watches one file from a process of its own, with nothing of pacedio in it: about a thousand times a second it
asks cachestat(2) how much of the file is dirty or under writeback, and /proc/meminfo how much of the machine's
memory is. Run as `python observer.py PATH`; it waits for PATH to appear, stops when its standard input ends, and
writes one JSON object:

samples             samples of the file
most                most bytes seen dirty or under writeback in one sample
most_dirty          most bytes seen dirty
most_writeback      most bytes seen under writeback
most_cached         most bytes seen in the page cache
longest_gap         seconds between the two samples furthest apart
machine_most        most bytes dirty or under writeback in the whole machine
machine_before      the same before the file appeared
error               what went wrong, or null
"""

import ctypes
import errno
import json
import mmap
import os
import select
import sys
import time

NR_CACHESTAT = 451
INTERVAL = 0.0008  # and the sampling itself takes 0.1 ms to 0.2 ms


class Range(ctypes.Structure):
    _fields_ = [("off", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class Pages(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


libc = ctypes.CDLL(None, use_errno=True)
WHOLE_FILE = Range(0, 0)


def file_pages(fd):
    pages = Pages()
    if libc.syscall(NR_CACHESTAT, fd, ctypes.byref(WHOLE_FILE), ctypes.byref(pages), 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pages


def machine_bytes(fd):
    total = 0
    for line in os.pread(fd, 4096, 0).split(b"\n"):
        if line.startswith((b"Dirty:", b"Writeback:")):
            total += int(line.split()[1]) * 1024
    return total


def opened(path):
    """The file as soon as it is there, or None if the watch ends before."""
    while not told_to_stop(0.0002):
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
    return None


def told_to_stop(seconds):
    return bool(select.select([0], [], [], seconds)[0])


def main():
    meminfo = os.open("/proc/meminfo", os.O_RDONLY)
    found = dict.fromkeys(("samples", "most", "most_dirty", "most_writeback", "most_cached"), 0)
    found.update(longest_gap=0.0, machine_before=machine_bytes(meminfo), machine_most=0, error=None)
    os.write(1, b"ready\n")
    fd = opened(sys.argv[1])
    last = time.monotonic()
    try:
        while fd is not None:
            pages = file_pages(fd)
            now = time.monotonic()
            found["samples"] += 1
            found["longest_gap"], last = max(found["longest_gap"], now - last), now
            for name, count in (
                ("most", pages.dirty + pages.writeback),
                ("most_dirty", pages.dirty),
                ("most_writeback", pages.writeback),
                ("most_cached", pages.cached),
            ):
                found[name] = max(found[name], count * mmap.PAGESIZE)
            found["machine_most"] = max(found["machine_most"], machine_bytes(meminfo))
            if told_to_stop(INTERVAL):
                break
    except OSError as e:
        found["error"] = f"{errno.errorcode[e.errno]}: {e.strerror}"
    json.dump(found, sys.stdout)


main()
