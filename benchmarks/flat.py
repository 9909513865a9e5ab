"""One very big file in a row: rate, memory and bytes in flight of each slice, so that what grows with time is seen.

Writes --size, or what is free but 2 GiB, in writes of 1 MiB. After each slice: the writing process's resident memory,
and the most that another process saw in flight since the slice before, of the file and of the whole machine.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import common
from common import WRITERS, Targets, median
from places import GIB, MIB, CannotMeasure, scratch, undo_on_signals

Slice = dict[str, Any]


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS:")) * 1024


def measure(name: str, base: str, size: int, step: int) -> tuple[list[Slice], dict[str, Any]]:
    directory = os.path.join(base, "run")
    os.mkdir(directory)
    slices: list[Slice] = []
    try:
        with (
            common.child("observer.py", directory) as observer,
            common.flood(directory, WRITERS[name].how, size=size, slice=step) as writer,
        ):
            began = time.monotonic()
            writer.tell()
            for number in range(size // step):
                if writer.line() != "slice":
                    raise CannotMeasure("the writer ended early")
                now = time.monotonic()
                observer.tell()
                seen = observer.answer()
                slices.append(
                    {
                        "bytes": (number + 1) * step,
                        "rate_mib": step / MIB / (now - began),
                        "resident": resident(writer.pid),
                        "seen": seen,
                        "in_flight": seen["cachestat_most_in_flight"],
                        "machine": seen["meminfo_most_in_flight"],
                    }
                )
                began = now
                common.progress(f"{slices[-1]['bytes'] // MIB} MiB: {slices[-1]['rate_mib']:.0f} MiB/s")
            ((file,),) = writer.answer()
    finally:
        shutil.rmtree(directory)
    return slices, file


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--size", type=common.size, default=64 * GIB, help="of the file (default 64GiB)")
    p.add_argument("--slice", type=common.size, default=2 * GIB, help="(default 2GiB)")
    p.add_argument("--writer", choices=tuple(WRITERS), default="auto", help="(default auto)")
    a = p.parse_args()
    undo_on_signals()
    room = max(0, shutil.disk_usage(a.directory).free - 2 * GIB)
    size = min(a.size, room) // a.slice * a.slice
    if size < 2 * a.slice:
        raise CannotMeasure(f"{room / GIB:.1f} GiB can be used; needed are at least two slices")
    env = common.environment()
    with scratch(a.directory, size, 1) as base:
        env |= common.file_system(base)
        env["data"] = f"{size // MIB} MiB of {a.size // MIB} asked for, slices of {a.slice // MIB} MiB"
        common.settle(5)
        slices, file = measure(a.writer, base, size, a.slice)

    def mib(value: int | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value / MIB:.{digits}f}"

    header = ["written MiB", "MiB/s", "resident MiB", "in flight MiB", "machine MiB", "cached MiB", "samples"]
    rows = [
        [
            *(mib(s["bytes"], 0), f"{s['rate_mib']:.0f}", mib(s["resident"]), mib(s["in_flight"]), mib(s["machine"])),
            *(mib(s["seen"]["cachestat_most_cached"]), str(s["seen"]["cachestat_samples"])),
        ]
        for s in slices
    ]
    part = max(1, len(slices) // 4)
    first, last = slices[:part], slices[-part:]

    def quarter(of: list[Slice], key: str) -> float:
        return median(s[key] for s in of)

    t = Targets()
    t.at_least("rate, last quarter / first", [quarter(last, "rate_mib") / quarter(first, "rate_mib")], 0.9)
    t.told("rate, last slice / first", [slices[-1]["rate_mib"] / slices[0]["rate_mib"]])
    t.at_most(
        "resident memory, last slice - first", [(slices[-1]["resident"] - slices[0]["resident"]) / MIB], 2, " MiB"
    )
    if all(s["in_flight"] for s in slices):
        t.at_most("in flight, last quarter / first", [quarter(last, "in_flight") / quarter(first, "in_flight")], 1.25)
        t.told("in flight, last slice / first", [slices[-1]["in_flight"] / slices[0]["in_flight"]])
    total = file["durable"] - file["began"]
    sections = [
        common.table(header, rows, left=0),
        f"{size // MIB} MiB in {total:.1f} s from open to durable close, {size / MIB / total:.0f} MiB/s; longest "
        f"write() of 1 MiB {file['longest_write_seconds'] * 1000:.1f} ms. In flight and machine are the most within "
        "the slice, as another process saw it: of the file by cachestat, of the machine above its state before by "
        "/proc/meminfo.",
        str(t),
        *(["## What pacedio said", f"- {file['stats_line']}"] if "stats_line" in file else []),
    ]
    text = common.report(f"{size // GIB} GiB in a row, {WRITERS[a.writer].title}", env, sections)
    common.publish(a, text, {"environment": env, "size": size, "slices": slices, "file": file})


if __name__ == "__main__":
    main()
