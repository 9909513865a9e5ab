"""What a neighbour on the same disk feels: the latency of its 4 KiB appends, each with fsync, one every 20 ms.

Phases: quiet (nobody else writes), then somebody writes at full speed: plain (1 MiB writes, fsync at the end, which
counts as writing), the RECIPE preset, a fixed limit of 2 MiB, the default ("auto"), POLITE. Writer and neighbour are
processes of their own. The writer goes on for --seconds, in files of at most --file-size, each made durable; those
seconds count from open to durable close. A file that is done is removed before the next begins. The neighbour's
appends count while a file is being written, not between files.

Disks: "this" is the one that --directory is on. "hdd" (150 MB/s, 8 ms), "usb" (20 MB/s, 20 ms) and "cloud" (200 MB/s,
2 ms) are made: memory behind a delay for each write and a rate for all of them, with ext4 on it, as root. There the
writer ends after --seconds too, or after as much as the disk writes in that time, so that a plain writer's backlog
drains in about that time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import Any

import common
from common import WRITERS, Targets, percentile, spread
from places import DISKS, GIB, MIB, CannotMeasure, programmable, scratch, undo_on_signals

Run = dict[str, Any]

QUIET = "quiet"
PHASES = (QUIET, *WRITERS)
PERCENTILES = (50, 90, 99)


def phase(name: str, directory: str, seconds: float, file_size: int, size: int) -> Run:
    """Run it once, in a new directory."""
    os.mkdir(directory)
    try:
        with common.child("probe.py", os.path.join(directory, "neighbour"), "4096", "0.02", "sync") as neighbour:
            run: Run = {}
            if name == QUIET:
                began = time.monotonic()
                time.sleep(seconds)
                times = [(began, time.monotonic())]
            else:
                how = WRITERS[name].how
                sizes = {"size": size, "file_size": min(size, file_size)}
                with common.flood(directory, how, **sizes, seconds=seconds, rest=0.5) as writer:
                    writer.tell()
                    (files,) = writer.answer()
                run["files"] = files
                times = [(file["began"], file["durable"]) for file in files]
                run["bytes"] = sum(file["bytes"] for file in files)
                run["rate_mib"] = run["bytes"] / MIB / sum(durable - began for began, durable in times)
            samples = neighbour.end()["samples"]
    finally:
        shutil.rmtree(directory)
    took = [took * 1000 for at, took in samples if any(began <= at <= ended for began, ended in times)]
    if not took:
        raise CannotMeasure(f"{name} ended before the neighbour wrote once; more --seconds")
    run["samples"] = len(took)
    run |= {f"p{percent}_ms": percentile(took, percent) for percent in PERCENTILES}
    run["max_ms"] = max(took)
    return run


def title(name: str) -> str:
    return name if name == QUIET else WRITERS[name].title


def ratios(runs: dict[str, list[Run]], key: str, name: str, base: str) -> list[float]:
    return [a[key] / b[key] for a, b in zip(runs[name], runs[base], strict=True)]


def best_rates(runs: dict[str, list[Run]]) -> list[float]:
    """The best writer's of each round."""
    writers = [own for name, own in runs.items() if name != QUIET]
    return [max(run["rate_mib"] for run in number) for number in zip(*writers, strict=True)]


def shares(runs: dict[str, list[Run]], name: str) -> list[float]:
    return [run["rate_mib"] / best for run, best in zip(runs[name], best_rates(runs), strict=True)]


def latency_table(runs: dict[str, list[Run]]) -> str:
    header = ["phase", "p50 ms", "p90 ms", "p99 ms", "max ms", "samples", "p99 x quiet", "MiB/s", "x best"]
    rows = []
    for name, own in runs.items():
        row = [title(name), *(spread(r[f"p{percent}_ms"] for r in own) for percent in PERCENTILES)]
        row += [f"{max(r['max_ms'] for r in own):.1f}", str(min(r["samples"] for r in own))]
        row.append(spread(ratios(runs, "p99_ms", name, QUIET), 1) if QUIET in runs else "-")
        row += ["-", "-"] if name == QUIET else [spread((r["rate_mib"] for r in own), 0), spread(shares(runs, name))]
        rows.append(row)
    return common.table(header, rows)


def writer_table(runs: dict[str, list[Run]]) -> str:
    """What the paced writers say of themselves."""
    header = [
        "writer",
        "limit at the end MiB",
        "most in flight MiB",
        "engine",
        "longest stall ms",
        "longest write() ms",
    ]
    rows = []
    for name, own in runs.items():
        files = [file for run in own for file in run.get("files", ())]
        stats = [file["stats"] for file in files if "stats" in file]
        if files:
            row = [title(name), spread((s["limit"] / MIB for s in stats), 1)]
            row.append(spread((s["most_in_flight"] / MIB for s in stats), 1))
            row.append(", ".join(dict.fromkeys(s["engine"] for s in stats)) or "-")
            row.append(f"{max(s['longest_stall_seconds'] for s in stats) * 1000:.1f}" if stats else "-")
            rows.append([*row, f"{max(file['longest_write_seconds'] for file in files) * 1000:.1f}"])
    return common.table(header, rows) if rows else ""


def targets(runs: dict[str, list[Run]], programmed: bool) -> Targets:
    t = Targets()

    def at_most(name: str, base: str, bound: float) -> None:
        if {name, base} <= runs.keys():
            values = ratios(runs, "p99_ms", name, base)
            t.at_most(f"{title(name)}: neighbour's p99 / {title(base)}", values, bound)

    def speed(name: str, bound: float | None) -> None:
        if name not in runs:
            return
        what = f"{title(name)}: speed / the best writer's"
        if bound is None:
            t.told(what, shares(runs, name))
        else:
            t.at_least(what, shares(runs, name), bound)

    if programmed:
        at_most("auto", "plain", 0.1)
        at_most("auto", "recipe", round(1 / 3, 3))
        speed("auto", 0.95)
        at_most("polite", "auto", 0.5)
        speed("polite", None)
    else:
        at_most("auto", QUIET, 5)
        speed("auto", 0.95)
        at_most("polite", QUIET, 2)
        speed("polite", 0.5)
        if QUIET in runs:
            fewest = min(run["samples"] for own in runs.values() for run in own)
            t.at_least("samples of the neighbour in a phase, the fewest", [fewest], 500, "")
    return t


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--disk", choices=("this", *DISKS), default="this", help="the disk to measure (default: this)")
    p.add_argument("--seconds", type=float, help="of writing in each phase (default 12, on made disks 6)")
    p.add_argument("--file-size", type=common.size, default=4 * GIB, help="the most of one file (default 4GiB)")
    common.add_rounds(p, settle=2.0)
    a = p.parse_args()
    seconds = a.seconds or (12.0 if a.disk == "this" else 6.0)
    undo_on_signals()
    names = common.chosen(a.methods, PHASES)
    env = common.environment()
    with contextlib.ExitStack() as stack:
        disk = DISKS.get(a.disk)
        if disk is None:
            # Between two files the first is gone.
            where = stack.enter_context(scratch(a.directory, a.file_size, 2))
            size = 1 << 50
            env |= common.file_system(where)
        else:
            base = stack.enter_context(scratch(a.directory, MIB))
            size = max(1, round(seconds * disk.rate / MIB)) * MIB
            where, what = stack.enter_context(programmable(disk, base, 2 * size + 512 * MIB))
            env |= common.file_system(where) | {"disk": f"{a.disk}: {what}"}
        env["work"] = f"{seconds:g} s of writing a phase, {a.repeat} rounds; neighbour: 4 KiB and fsync every 20 ms"
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for number, name in common.interleaved(names, a.repeat):
            common.settle(a.settle)
            run = phase(name, os.path.join(where, "run"), seconds, a.file_size, size)
            runs[name].append(run)
            rate = f", {run['rate_mib']:.0f} MiB/s" if "rate_mib" in run else ""
            common.progress(f"round {number + 1}: {title(name)}: p99 {run['p99_ms']:.2f} ms{rate}")
    sections = [
        latency_table(runs),
        "Milliseconds are one append and its fsync, median (least..most) of the rounds; max is that of all rounds, "
        "samples those of the poorest. Ratios are taken within a round. MiB/s are bytes over the time from open to "
        "durable close; best is the fastest writer of the round. A neighbour that waits appends less often, so few "
        "samples flatter whoever makes it wait, most of all in p50 and p90.",
        "## What the writers say",
        writer_table(runs),
        "One figure for each file. The longest write() is that of 1 MiB, as the caller saw it.",
        str(targets(runs, disk is not None)),
    ]
    largest = {name: max(own[-1].get("files", [{}]), key=lambda f: f.get("bytes", 0)) for name, own in runs.items()}
    lines = [f"- {title(name)}: {f['stats_line']}" for name, f in largest.items() if "stats_line" in f]
    sections += ["## What pacedio said of the largest file in the last round", "\n".join(lines)] if lines else []
    text = common.report(f"A neighbour's fsync while others write ({a.disk} disk)", env, sections)
    common.publish(a, text, {"environment": env, "disk": a.disk, "seconds": seconds, "runs": runs})


if __name__ == "__main__":
    main()
