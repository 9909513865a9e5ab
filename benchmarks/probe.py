"""What a neighbour feels, in a process of its own and without pacedio: `python probe.py FILE BYTES PERIOD [sync]`.

Appends BYTES to FILE every PERIOD seconds, each write followed by fsync if asked for, and prints "ready" after the
first. When its standard input ends, prints one JSON object: of each of them, when it began (CLOCK_MONOTONIC) and how
long it took. One that lasts longer than the period delays the next to the next multiple of it.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import time


def watch(path: str, size: int, period: float, sync: bool) -> list[tuple[float, float]]:
    piece = os.urandom(size)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    samples: list[tuple[float, float]] = []
    gc.disable()
    first = time.monotonic()
    while True:
        began = time.monotonic()
        if os.write(fd, piece) != size:
            raise SystemExit("a short write")
        if sync:
            os.fsync(fd)
        ended = time.monotonic()
        if not samples:
            print("ready", flush=True)
        samples.append((began, ended - began))
        wait = period - (time.monotonic() - first) % period
        if select.select([sys.stdin], [], [], wait)[0]:
            os.close(fd)
            return samples


if __name__ == "__main__":
    found = watch(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:] == ["sync"])
    print(json.dumps({"samples": [(round(began, 6), round(took, 6)) for began, took in found]}))
