"""One measured write, in a process of its own: `python worker.py METHOD FILE SIZE [CGROUP_PROCS]`.

METHOD is a JSON object: {"kind": "plain"}, {"kind": "fio"} or {"kind": "pacedio", "preset": NAME, "changes": {...}}.
Prints one JSON object. Joins the control group before anything else, so that every page of the file is charged to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

CHUNK = 1 << 20


def busy_seconds() -> float:
    """CPU time that the whole machine spent working; idle, waiting for I/O and stolen time left out."""
    with open("/proc/stat", "rb") as f:
        user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in f.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def plain(path: str, size: int, chunk: bytes) -> dict[str, Any]:
    busy, cpu, began = busy_seconds(), time.process_time(), time.perf_counter()
    with open(path, "wb", buffering=0) as f:
        for _ in range(size // CHUNK):
            written = f.write(chunk)
            if written != CHUNK:
                raise SystemExit(f"short write of {written} bytes")
        wrote = time.perf_counter()
        os.fsync(f.fileno())
        synced = time.perf_counter()
    return _result(busy, cpu, began, wrote, synced)


def paced(path: str, size: int, chunk: bytes, preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    import pacedio
    from pacedio import pacing

    how = getattr(pacing, preset).replace(**changes)
    busy, cpu, began = busy_seconds(), time.process_time(), time.perf_counter()
    with pacedio.open(path, "wb", pacing=how) as f:
        for _ in range(size // CHUNK):
            f.write(chunk)
        wrote = time.perf_counter()
        f.sync()
        synced = time.perf_counter()
    result = _result(busy, cpu, began, wrote, synced)
    stats = f.stats
    result["allowed_in_flight"] = how.limit + how.window if isinstance(how.limit, int) else None
    result["stats_line"] = str(stats)
    result["stats"] = {
        name: getattr(stats, name)
        for name in (
            "bytes",
            "windows",
            "engine",
            "reason",
            "limit",
            "most_in_flight",
            "stalls",
            "stall_seconds",
            "longest_stall_seconds",
            "sync_seconds",
            "verified_dirty_pages",
        )
    }
    return result


def _result(busy: float, cpu: float, began: float, wrote: float, synced: float) -> dict[str, Any]:
    return {
        "total_seconds": time.perf_counter() - began,
        "write_seconds": wrote - began,
        "sync_seconds": synced - wrote,
        "cpu_seconds": time.process_time() - cpu,
        "busy_seconds": busy_seconds() - busy,
    }


def fio(path: str, size: int) -> dict[str, Any]:
    """fio's own count of its time, its final fsync included: its start and its end are not held against it."""
    command = [
        *("fio", "--name=write", f"--filename={path}", f"--size={size}", "--rw=write", "--bs=1M", "--direct=1"),
        *("--ioengine=libaio", "--iodepth=32", "--end_fsync=1", "--fallocate=none", "--output-format=json"),
    ]
    busy = busy_seconds()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    if job["error"] or job["write"]["io_bytes"] != size:
        raise SystemExit(f"fio: error {job['error']}, {job['write']['io_bytes']} of {size} bytes")
    seconds = job["write"]["runtime"] / 1000
    return {
        "total_seconds": seconds,
        "write_seconds": None,
        "sync_seconds": None,
        "cpu_seconds": (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds,
        "busy_seconds": busy_seconds() - busy,
    }


def main(method: dict[str, Any], path: str, size: int, procs: str | None) -> dict[str, Any]:
    if procs:
        with open(procs, "w") as f:
            f.write(str(os.getpid()))
    if method["kind"] == "fio":
        result = fio(path, size)
    else:
        chunk = os.urandom(CHUNK)
        if method["kind"] == "plain":
            result = plain(path, size, chunk)
        else:
            result = paced(path, size, chunk, method["preset"], method["changes"])
    status = os.stat(path)
    if status.st_size != size:
        raise SystemExit(f"the file has {status.st_size} bytes instead of {size}")
    return result


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), (sys.argv[4:] or [None])[0])))
