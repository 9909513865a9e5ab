"""The longest single write() in a memory control group of 256 MiB and of 1 GiB, plain and paced, as root.

There the kernel's thresholds follow the group's memory, and it stops a plain writer in the middle of a write. Each run
writes one file in writes of 1 MiB, all of them timed, and makes it durable.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import common
from common import WRITERS, Targets, spread
from places import GIB, MIB, memory_cgroup, memory_cgroup_version, scratch, undo_on_signals

Run = dict[str, Any]

MEMORY = (256 * MIB, GIB)
METHODS = ("plain", "auto")


def measure(name: str, base: str, size: int, memory: int) -> Run:
    directory = os.path.join(base, "run")
    os.mkdir(directory)
    try:
        with memory_cgroup(memory) as procs, common.flood(directory, WRITERS[name].how, size=size, procs=procs) as f:
            f.tell()
            ((run,),) = f.answer()
    finally:
        shutil.rmtree(directory)
    run["longest_ms"] = run["longest_write_seconds"] * 1000
    run["p999_ms"] = run["p999_write_seconds"] * 1000
    run["rate_mib"] = run["bytes"] / MIB / (run["durable"] - run["began"])
    return dict(run)


def main() -> None:
    p = common.parser(__doc__, default_size="4GiB")
    a = p.parse_args()
    undo_on_signals()
    names = common.chosen(a.methods or ",".join(METHODS), list(WRITERS))
    env = common.environment()
    keys = {f"{memory // MIB} MiB, {WRITERS[name].title}": (memory, name) for memory in MEMORY for name in names}
    runs: dict[str, list[Run]] = {key: [] for key in keys}
    with scratch(a.directory, a.size, 2) as base:
        env |= common.file_system(base)
        env["memory"] = f"control group v{memory_cgroup_version()} for each writer"
        env["data"] = f"{a.size // MIB} MiB in writes of 1 MiB, {a.repeat} rounds"
        for number, key in common.interleaved(list(keys), a.repeat):
            common.settle(a.settle)
            memory, name = keys[key]
            runs[key].append(measure(name, base, a.size, memory))
            common.progress(f"round {number + 1}: {key}: {runs[key][-1]['longest_ms']:.1f} ms")
    header = ["memory, writer", "longest write() ms", "p99.9 ms", "final sync s", "MiB/s"]
    rows = [
        [
            key,
            *(spread((r[figure] for r in own), 1) for figure in ("longest_ms", "p999_ms")),
            spread((r["durable"] - r["wrote"] for r in own), 3),
            spread((r["rate_mib"] for r in own), 0),
        ]
        for key, own in runs.items()
    ]
    t = Targets()
    for key, (memory, name) in keys.items():
        if name != "plain":
            t.at_most(f"{key}: longest write()", [r["longest_ms"] for r in runs[key]], 20, " ms")
            plain = runs.get(f"{memory // MIB} MiB, {WRITERS['plain'].title}", [])
            t.told(
                f"{key}: longest write() / plain's",
                [r["longest_ms"] / p["longest_ms"] for r, p in zip(runs[key], plain, strict=False)],
            )
    sections = [common.table(header, rows), "Median (least..most) of the rounds; one write() is 1 MiB.", str(t)]
    text = common.report("The longest write() in a memory control group", env, sections)
    common.publish(a, text, {"environment": env, "size": a.size, "runs": runs})


if __name__ == "__main__":
    main()
