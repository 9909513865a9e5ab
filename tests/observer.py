"""Watches files from a process of its own, with nothing of pacedio in it: about a thousand times a second it
asks cachestat(2) how much of them together is dirty or under writeback, and /proc/meminfo how much of the machine's
memory is. Run as `python observer.py PATH...`; it waits for the first of them to appear, looks for the others at
each sample, stops when its standard input ends, and writes one JSON object:

samples             samples of the files
most                most bytes seen dirty or under writeback in one sample
most_dirty          most bytes seen dirty
most_writeback      most bytes seen under writeback
most_cached         most bytes seen in the page cache
longest_gap         seconds between the two samples furthest apart
machine_most        most bytes dirty or under writeback in the whole machine
machine_before      the same before the first file appeared
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
APART = 0.0004


class Range(ctypes.Structure):
    _fields_ = [("off", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class Pages(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


libc = ctypes.CDLL(None, use_errno=True)
WHOLE_FILE = Range(0, 0)


def file_pages(fds):
    """Of all files together."""
    total, pages = Pages(), Pages()
    for fd in fds:
        if libc.syscall(NR_CACHESTAT, fd, ctypes.byref(WHOLE_FILE), ctypes.byref(pages), 0) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        for name in ("cached", "dirty", "writeback"):
            setattr(total, name, getattr(total, name) + getattr(pages, name))
    return total


def machine_bytes(fd):
    total = 0
    for line in os.pread(fd, 4096, 0).split(b"\n"):
        if line.startswith((b"Dirty:", b"Writeback:")):
            total += int(line.split()[1]) * 1024
    return total


def open_those_there(paths):
    """Opens those of the paths that are there by now, and takes them off the list."""
    fds = []
    for path in paths[:]:
        try:
            fds.append(os.open(path, os.O_RDONLY))
        except FileNotFoundError:
            continue
        paths.remove(path)
    return fds


def told_to_stop(seconds):
    return bool(select.select([0], [], [], seconds)[0])


def main():
    meminfo = os.open("/proc/meminfo", os.O_RDONLY)
    found = dict.fromkeys(("samples", "most", "most_dirty", "most_writeback", "most_cached"), 0)
    found.update(longest_gap=0.0, machine_before=machine_bytes(meminfo), machine_most=0, error=None)
    os.write(1, b"ready\n")
    paths, fds, stop = sys.argv[1:], [], False
    while not fds and not stop:
        stop = told_to_stop(0.0002)
        fds = open_those_there(paths)
    last = time.monotonic()
    try:
        while not stop:
            fds += open_those_there(paths)
            begin = time.monotonic()
            pages = file_pages(fds)
            now = time.monotonic()
            # Between two files the sum is of two moments. Where they are far apart, it says nothing.
            if len(fds) > 1 and now - begin > APART:
                stop = told_to_stop(INTERVAL)
                continue
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
            stop = told_to_stop(INTERVAL)
    except OSError as e:
        found["error"] = f"{errno.errorcode[e.errno]}: {e.strerror}"
    json.dump(found, sys.stdout)


main()
