"""Writes a big file in several ways, side by side, and says how long each took until the disk had it.

Each method runs in a process of its own; the rounds interleave the methods; before each run the file before is gone,
the disk is synced and has rested. Ratios are taken within a round and then summed up as median (least..most), since the
machine's own speed drifts. What was in flight is what another process saw (observer.py), the most of all rounds.

Methods: plain (1 MiB writes, then fsync), the RECIPE preset (8 MiB windows, cache kept), BALANCED with each engine, and
fio with O_DIRECT at depth 32 where it is installed. Two more tell where the gain comes from: recipe-dropped (RECIPE,
but pages dropped behind) and balanced-kept (BALANCED, but pages kept).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any

import common
from common import Targets, median, most_mib, spread
from places import MIB, CannotMeasure, loop, memory_cgroup, memory_cgroup_version, overlay, scratch, undo_on_signals

Run = dict[str, Any]


@dataclass(frozen=True)
class Method:
    title: str
    how: dict[str, Any]
    below: bool = False  # on the disk below, where a file system is stacked on it


def _paced(title: str, preset: str, *, below: bool = False, **changes: object) -> Method:
    return Method(title, {"kind": "pacedio", "preset": preset, "changes": changes}, below)


METHODS = {
    "plain": Method("plain + fsync", {"kind": "plain"}),
    "recipe": _paced("RECIPE", "RECIPE"),
    "recipe-dropped": _paced("RECIPE, dropped behind", "RECIPE", drop_cache=True),
    "balanced-kept": _paced("BALANCED, cache kept", "BALANCED", drop_cache=False),
    "balanced-range": _paced("BALANCED, range", "BALANCED", engine="range"),
    "balanced-uncached": _paced("BALANCED, uncached", "BALANCED", engine="uncached"),
    "balanced": _paced("BALANCED, auto", "BALANCED"),
    "fio": Method("fio O_DIRECT, depth 32", {"kind": "fio"}),
    "balanced-below": _paced("BALANCED, auto, without overlayfs", "BALANCED", below=True),
}
ENGINES = ("balanced-range", "balanced-uncached", "balanced")
ON_OVERLAYFS = ("plain", "recipe", "balanced", "fio", "balanced-below")


def measure(method: Method, places: dict[bool, tuple[str, str]], size: int, limit: int | None) -> Run:
    """Run it once. `places`: for the stacked file system and the one below, where to write and where the pages are."""
    directory, watched = (os.path.join(place, "run") for place in places[method.below])
    os.mkdir(directory)
    seen: Run = {}
    command = [sys.executable, os.path.join(common.HERE, "worker.py"), json.dumps(method.how)]
    command += [os.path.join(directory, "file"), str(size)]
    try:
        with memory_cgroup(limit) as procs, common.observed(watched, seen):
            out, _ = common.Group([*command, *([procs] if procs else [])]).wait()
    finally:
        shutil.rmtree(directory)
    result: Run = json.loads(out)
    # The observer works on the same machine; what it used meanwhile is not the method's.
    result["busy_seconds"] -= seen["cpu_seconds"] / seen["seconds"] * result["total_seconds"]
    result["rate_mib"] = size / MIB / result["total_seconds"]
    result["seen"] = seen
    return result


def ratios(runs: dict[str, list[Run]], name: str, base: str) -> list[float]:
    """How many times faster than `base`, round by round."""
    return [b["total_seconds"] / a["total_seconds"] for a, b in zip(runs[name], runs[base], strict=True)]


def seen_in_flight(runs: list[Run]) -> list[int]:
    return [r["seen"]["cachestat_most_in_flight"] for r in runs if r["seen"]["cachestat_most_in_flight"] is not None]


def speed_table(runs: dict[str, list[Run]]) -> str:
    bases = [base for base in ("plain", "recipe", "fio") if base in runs]
    header = ["method", "total s", "MiB/s", "write s", "final sync s", "CPU s", "machine CPU s"]
    rows = []
    for name, own in runs.items():
        row = [METHODS[name].title, spread(r["total_seconds"] for r in own)]
        row.append(spread((r["rate_mib"] for r in own), 0))
        row.append(spread(r["write_seconds"] for r in own))
        row.append(spread((r["sync_seconds"] for r in own), 3))
        row += [spread(r[key] for r in own) for key in ("cpu_seconds", "busy_seconds")]
        row += [spread(ratios(runs, name, base)) for base in bases]
        rows.append(row)
    return common.table([*header, *(f"x {METHODS[base].title.split(' ')[0]}" for base in bases)], rows)


def flight_table(runs: dict[str, list[Run]]) -> str:
    header = ["method", "cachestat MiB", "meminfo MiB", "own count MiB", "allowed MiB", "most cached MiB"]
    header += ["engine", "stalls", "longest stall ms", "samples", "longest gap ms"]
    rows = []
    for name, own in runs.items():
        seen = [r["seen"] for r in own]
        stats = [r["stats"] for r in own if "stats" in r]
        row = [METHODS[name].title, most_mib(s["cachestat_most_in_flight"] for s in seen)]
        row.append(most_mib(s["meminfo_most_in_flight"] for s in seen))
        row.append(most_mib(s["most_in_flight"] for s in stats))
        row.append(most_mib(r.get("allowed_in_flight") for r in own))
        row.append(most_mib(s["cachestat_most_cached"] for s in seen))
        row.append(", ".join(dict.fromkeys(s["engine"] for s in stats)) or "-")
        row.append(spread((s["stalls"] for s in stats), 0))
        row.append(f"{max(s['longest_stall_seconds'] for s in stats) * 1000:.1f}" if stats else "-")
        row.append(str(min(s["cachestat_samples"] for s in seen)))
        row.append(f"{max(s['cachestat_longest_gap'] for s in seen) * 1000:.0f}")
        rows.append(row)
    return common.table(header, rows)


def targets(runs: dict[str, list[Run]], kind: str, limited: bool) -> Targets:
    """On the bare disk all of them count. Where pages are warm for everyone, or the disk is a loop device, the
    ratios are told without a verdict."""
    t = Targets()
    full = kind == "disk" and not limited
    for name in ENGINES:
        if name not in runs:
            continue
        title = METHODS[name].title
        for base, bound in (("plain", 3.0), ("recipe", 1.5), ("fio", 1.0)):
            if base in runs and full:
                t.at_least(f"{title}: speed / {METHODS[base].title}", ratios(runs, name, base), bound)
            elif base in runs:
                t.told(f"{title}: speed / {METHODS[base].title}", ratios(runs, name, base))
        if "plain" in runs:
            plain = median(r["sync_seconds"] for r in runs["plain"])
            share = [100 * r["sync_seconds"] / plain for r in runs[name]]
            if full:
                t.at_most(f"{title}: final sync / plain's", share, 1.0, " %")
            else:
                t.told(f"{title}: final sync / plain's", share, " %")
    if "balanced-below" in runs and "balanced" in runs:
        without = ratios(runs, "balanced", "balanced-below")
        t.at_least("BALANCED, auto: speed / the same without overlayfs", without, 0.75)
        t.equal("engine", ", ".join(dict.fromkeys(r["stats"]["engine"] for r in runs["balanced"])), "advise")
    for name, own in runs.items():
        if not own[0].get("allowed_in_flight"):
            continue
        allowed = own[0]["allowed_in_flight"] / MIB
        if kind == "overlayfs" and not METHODS[name].below:
            # RECIPE promises its own limit there; 16 MiB is what was asked of the default.
            allowed = 16.0 if name == "balanced" else allowed
        what = f"{METHODS[name].title}: most in flight, seen by cachestat"
        most = seen_in_flight(own)
        if most:
            t.at_most(what, [max(most) / MIB], allowed, " MiB")
        else:
            t.lines.append(f"  --  {what}: not known, this kernel has no cachestat")
    return t


def where_from(runs: dict[str, list[Run]]) -> str:
    """The gain over plain, taken apart: from pacing alone, and from recycling pages instead of taking new ones."""
    lines = []
    for kept, dropped in (("recipe", "recipe-dropped"), ("balanced-kept", "balanced-range")):
        if not {"plain", kept, dropped} <= runs.keys():
            continue
        cpu = [median(r["busy_seconds"] for r in runs[name]) for name in ("plain", kept, dropped)]
        lines.append(
            f"- {METHODS[kept].title}: {spread(ratios(runs, kept, 'plain'))} x plain with its pages kept, "
            f"{spread(ratios(runs, dropped, 'plain'))} x plain with its pages dropped behind, that is "
            f"{spread(ratios(runs, dropped, kept))} x from dropping; the machine's CPU time was {cpu[0]:.2f} s plain, "
            f"{cpu[1]:.2f} s kept, {cpu[2]:.2f} s dropped."
        )
    return "\n".join(["## Where the gain comes from", "", *lines]) if lines else ""


def parse_arguments() -> argparse.Namespace:
    p = common.parser(__doc__, default_size="4GiB")
    p.add_argument("--memory-cgroup", type=common.size, metavar="SIZE", help="run each method with this much memory")
    p.add_argument(
        "--file-system",
        choices=("disk", "overlayfs", "xfs", "btrfs", "ext4"),
        default="disk",
        help="write to DIR itself, to an overlayfs over it, or to a new file system on a loop device over it",
    )
    return p.parse_args()


def main() -> None:
    a = parse_arguments()
    undo_on_signals()
    kind = a.file_system
    # On overlayfs there is one engine that works, so the others are not compared; the disk below is, instead.
    names = list(ON_OVERLAYFS if kind == "overlayfs" else (name for name in METHODS if not METHODS[name].below))
    if not shutil.which("fio"):
        common.progress("fio is not installed: left out")
        names.remove("fio")
    names = common.chosen(a.methods, names)
    env = common.environment()
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(scratch(a.directory, a.size))
        if common.Mount.of(base).kind in ("tmpfs", "ramfs"):
            raise CannotMeasure(f"{a.directory} is in memory, not on a disk; choose another --directory")
        places = {True: (base, base), False: (base, base)}
        if kind == "overlayfs":
            places[False] = stack.enter_context(overlay(base))
        elif kind != "disk":
            mounted = stack.enter_context(loop(kind, base, a.size))
            places[False] = (mounted, mounted)
        env.update(common.file_system(places[False][0], None if kind == "disk" else base))
        if a.memory_cgroup:
            env["memory"] = f"control group v{memory_cgroup_version()} of {a.memory_cgroup // MIB} MiB for each method"
        if "fio" in names:
            env["fio"] = common.fio_version()
        env["data"] = f"{a.size // MIB} MiB in writes of 1 MiB, one random MiB over and over, {a.repeat} rounds"
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for number, name in common.interleaved(names, a.repeat):
            common.settle(a.settle)
            run = measure(METHODS[name], places, a.size, a.memory_cgroup)
            runs[name].append(run)
            common.progress(f"round {number + 1}: {METHODS[name].title}: {run['total_seconds']:.2f} s")
    where = f" on {kind}" if kind != "disk" else ""
    memory = f" in {a.memory_cgroup // MIB} MiB of memory" if a.memory_cgroup else ""
    sections = [
        speed_table(runs),
        "Seconds are median (least..most). CPU is the writing process, machine CPU everything but the observer. The "
        "last columns are ratios of speed within a round. fio's time is its own count: its start is not in it "
        "(but in the machine's CPU time), its last fsync is.",
        "## In flight, as another process saw it",
        flight_table(runs),
        "The most of all rounds: dirty pages and pages under writeback of the file (cachestat) and of the whole "
        "machine above its state before (/proc/meminfo, kept in per-CPU counters). Samples and the longest gap between "
        "two are cachestat's, the worst round's.",
        where_from(runs),
        str(targets(runs, kind, bool(a.memory_cgroup))),
    ]
    last = {METHODS[name].title: own[-1] for name, own in runs.items()}
    lines = [f"- {title}: {run['stats_line']}" for title, run in last.items() if "stats_line" in run]
    sections += ["## What pacedio said in the last round", "\n".join(lines)] if lines else []
    text = common.report(f"Writing {a.size // MIB} MiB{where}{memory}", env, sections)
    common.publish(a, text, {"environment": env, "size": a.size, "runs": runs})


if __name__ == "__main__":
    main()
