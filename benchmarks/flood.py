"""Writers that go on for a while, in a process of their own: `python flood.py JOB`, a JSON object of

how        {"kind": "plain"}, or {"kind": "pacedio", "preset": NAME} or {"kind": "pacedio", "arguments": {...}}
directory  where the files go, named by `name` and the writer's number
writers    how many write at once, each in a thread
size       bytes that each of them writes at most
seconds    after which it ends what it writes, or null
file_size  bytes of one file; the next one begins after it is durable and gone, and after `rest` seconds
keep       whether the last file stays
sync       whether plain files end with fsync
procs      the cgroup.procs of a control group to join, or null
slice      bytes after which a line is printed while it writes, or null

Prints "ready" and begins when a line comes. Prints one JSON object at the end: for each writer its files, with the
time (CLOCK_MONOTONIC) at which each was opened and at which it was durable and closed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pacedio

CHUNK = 1 << 20


def pacing(how: dict[str, Any]) -> pacedio.Pacing:
    if "preset" in how:
        preset: pacedio.Pacing = getattr(pacedio, how["preset"])
        return preset
    return pacedio.Pacing(**how["arguments"])


def write_file(job: dict[str, Any], path: str, size: int, until: float, chunk: bytes) -> dict[str, Any]:
    """One file, from open to durable and closed; every write is timed."""
    paced = job["how"]["kind"] == "pacedio"
    took = array("d")
    written = 0
    began = time.monotonic()
    f: Any
    # The builtin one without a buffer, since every write is larger than it.
    with pacedio.open(path, "wb", pacing=pacing(job["how"])) if paced else open(path, "wb", buffering=0) as f:
        write, now, every = f.write, time.monotonic, job["slice"]
        before = began
        while written < size and before < until:
            before = now()
            written += write(chunk)  # an unbuffered file may take less
            took.append(now() - before)
            if every and written % every == 0:
                print("slice", flush=True)
        wrote = now()
        if paced:
            f.sync()
        elif job["sync"]:
            os.fsync(f.fileno())
    result: dict[str, Any] = {"bytes": written, "began": began, "wrote": wrote, "durable": time.monotonic()}
    ordered = sorted(took)
    result["longest_write_seconds"] = ordered[-1]
    result["p999_write_seconds"] = ordered[int(len(ordered) * 0.999)]
    if paced:
        result["stats"] = f.stats.as_dict()
        result["stats_line"] = str(f.stats)
    return result


def write_files(job: dict[str, Any], number: int, chunk: bytes) -> list[dict[str, Any]]:
    path = os.path.join(job["directory"], f"{job['name']}{number}")
    left, seconds = job["size"], job["seconds"] or float("inf")
    files: list[dict[str, Any]] = []
    while True:
        done = write_file(job, path, min(left, job["file_size"]), time.monotonic() + seconds, chunk)
        files.append(done)
        left -= done["bytes"]
        seconds -= done["durable"] - done["began"]
        last = left < CHUNK or seconds <= 0
        if not (last and job["keep"]):
            os.unlink(path)
        if last:
            return files
        time.sleep(job["rest"])


def main(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    if job["procs"]:
        with open(job["procs"], "w") as f:
            f.write(str(os.getpid()))
    chunk = os.urandom(CHUNK)
    with ThreadPoolExecutor(job["writers"]) as pool:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("ended before it began")
        return list(pool.map(lambda number: write_files(job, number, chunk), range(job["writers"])))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
