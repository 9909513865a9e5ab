"""Many writers at once against one of the same total: speed, what is in flight, fairness, fragments.

Each writer makes a file of --size durable: --writers of them as threads of one process and as processes of one thread,
all begun at once, and one writer alone with as much as all of them. In flight is what another process sees of all files
together (cachestat). Then, as root, plain and paced threads write the same on new ext4, xfs and btrfs file systems on
loop devices, and filefrag counts the extents.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any

import common
from common import WRITERS, Targets, most_mib, spread
from places import MAKE, MIB, CannotMeasure, loop, run, scratch, undo_on_signals

Run = dict[str, Any]

METHODS = ("one", "threads", "processes", "plain-one", "plain-threads")
TITLES = {
    "one": "auto, one writer",
    "threads": "auto, threads",
    "processes": "auto, processes",
    "plain-one": "plain, one writer",
    "plain-threads": "plain, threads",
}


def extents(path: str) -> int:
    found = re.search(r": (\d+) extents? found", run("filefrag", path))
    if not found:
        raise CannotMeasure("filefrag said nothing of extents")
    return int(found[1])


def measure(name: str, base: str, size: int, writers: int, *, fragments: bool = False) -> Run:
    how = WRITERS["plain" if name.startswith("plain") else "auto"].how
    kind = name.removeprefix("plain-")
    jobs: list[dict[str, Any]]
    if kind == "one":
        jobs = [{"size": size * writers}]
    elif kind == "threads":
        jobs = [{"size": size, "writers": writers}]
    else:
        jobs = [{"size": size, "name": f"{number}-"} for number in range(writers)]
    directory = os.path.join(base, "run")
    os.mkdir(directory)
    seen: Run = {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(common.observed(directory, seen, 1 if kind == "one" else writers))
            floods = [stack.enter_context(common.flood(directory, how, **job, keep=True)) for job in jobs]
            for flood in floods:
                flood.tell()
            files = [file for flood in floods for (file,) in flood.answer()]
        found = sum(extents(entry.path) for entry in os.scandir(directory)) if fragments else None
    finally:
        shutil.rmtree(directory)
    began = min(file["began"] for file in files)
    finished = [file["durable"] - began for file in files]
    return {
        "files": files,
        "seen": seen,
        "extents": found,
        "rate_mib": sum(file["bytes"] for file in files) / MIB / max(finished),
        "slowest_to_fastest": max(finished) / min(finished),
        "in_flight": seen["cachestat_most_in_flight"],
    }


def ratios(runs: dict[str, list[Run]], key: str, name: str, base: str) -> list[float]:
    pairs = zip(runs[name], runs[base], strict=True)
    return [a[key] / b[key] for a, b in pairs if a[key] is not None and b[key]]


def speed_table(runs: dict[str, list[Run]]) -> str:
    header = ["writers", "MiB/s", "x one", "in flight MiB", "own count MiB", "slowest / fastest", "samples", "gap ms"]
    rows = []
    for name, own in runs.items():
        one = "plain-one" if name.startswith("plain") else "one"
        counts = [f["stats"]["most_in_flight"] for r in own for f in r["files"] if "stats" in f]
        row = [TITLES[name], spread((r["rate_mib"] for r in own), 0)]
        row.append(spread(ratios(runs, "rate_mib", name, one)) if one in runs else "-")
        row += [most_mib(r["in_flight"] for r in own), most_mib(counts)]
        row.append(spread(r["slowest_to_fastest"] for r in own))
        row.append(str(min(r["seen"]["cachestat_samples"] for r in own)))
        row.append(f"{max(r['seen']['cachestat_longest_gap'] for r in own) * 1000:.0f}")
        rows.append(row)
    return common.table(header, rows)


def fragment_table(made: dict[str, dict[str, Run]], t: Targets) -> str:
    rows = []
    for kind, own in made.items():
        plain, paced = own["plain-threads"]["extents"], own["threads"]["extents"]
        rates = [f"{own[name]['rate_mib']:.0f}" for name in ("plain-threads", "threads")]
        rows.append([kind, str(plain), str(paced), f"{paced / plain:.2f}", *rates])
        t.at_most(f"{kind}: extents / plain writers'", [paced / plain], 2)
    header = ["file system", "extents, plain", "extents, paced", "ratio", "MiB/s, plain", "MiB/s, paced"]
    return common.table(header, rows) if rows else ""


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--size", type=common.size, default=128 * MIB, help="of each writer's file (default 128MiB)")
    p.add_argument("--writers", type=int, default=16, help="at once (default 16)")
    p.add_argument(
        "--file-systems",
        default=",".join(MAKE),
        help=f"on which fragments are counted, or none (default {','.join(MAKE)})",
    )
    common.add_rounds(p, settle=3.0)
    a = p.parse_args()
    undo_on_signals()
    names = common.chosen(a.methods, METHODS)
    kinds = [] if a.file_systems == "none" else common.chosen(a.file_systems, list(MAKE))
    env = common.environment()
    total = a.size * a.writers
    runs: dict[str, list[Run]] = {name: [] for name in names}
    made: dict[str, dict[str, Run]] = {}
    with scratch(a.directory, total) as base:
        env |= common.file_system(base)
        env["data"] = f"{a.writers} files of {a.size // MIB} MiB, one of {total // MIB} MiB, {a.repeat} rounds"
        for number, name in common.interleaved(names, a.repeat):
            common.settle(a.settle)
            runs[name].append(measure(name, base, a.size, a.writers))
            common.progress(f"round {number + 1}: {TITLES[name]}: {runs[name][-1]['rate_mib']:.0f} MiB/s")
        for kind in kinds:
            place = os.path.join(base, f"on-{kind}")
            os.mkdir(place)
            made[kind] = {}
            with loop(kind, place, 3 * total) as mounted:  # xfs allocates generously ahead of plain writers
                for name in ("plain-threads", "threads"):
                    common.settle(a.settle)
                    made[kind][name] = measure(name, mounted, a.size, a.writers, fragments=True)
                    common.progress(f"{kind}: {TITLES[name]}: {made[kind][name]['extents']} extents")
            shutil.rmtree(place)
    t = Targets()
    for name in ("threads", "processes"):
        if {name, "one"} <= runs.keys():
            t.at_least(f"{TITLES[name]}: speed / one writer's", ratios(runs, "rate_mib", name, "one"), 0.95)
            in_flight = ratios(runs, "in_flight", name, "one")
            if in_flight:
                t.at_most(f"{TITLES[name]}: in flight together / one writer's", in_flight, 2)
        if name in runs:
            t.at_most(f"{TITLES[name]}: slowest / fastest", [r["slowest_to_fastest"] for r in runs[name]], 1.3)
    sections = [
        speed_table(runs) if names else "",
        "MiB/s are all bytes over the time from the first open to the last durable close. In flight is what another "
        "process saw of all files together, the most of all rounds; own count that of one writer. Slowest / fastest "
        "are the times from the first open to each writer's durable close.",
        *(["## Fragments", fragment_table(made, t)] if made else []),
        str(t),
    ]
    text = common.report(f"{a.writers} writers at once", env, sections)
    common.publish(a, text, {"environment": env, "size": a.size, "runs": runs, "fragments": made})


if __name__ == "__main__":
    main()
