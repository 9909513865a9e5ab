"""How long a process that writes little is blocked in write() while another floods a slow disk, as root.

Disk A is like a USB stick (20 MB/s, 20 ms a write; made, in memory), disk B the one that --directory is on. Somebody
writes to A for --seconds, plainly or paced, in writes of 1 MiB; meanwhile another process appends 100 bytes every 20
ms, without fsync, to a file on A, and in another run to one on B. All of that with vm.dirty_bytes at 128 MiB (put back
after), and with the machine's own settings.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

import common
from common import WRITERS, Targets, percentile, spread
from places import DISKS, GIB, MIB, dirty_bytes, programmable, scratch, undo_on_signals

Run = dict[str, Any]

MEMORY = {"128 MiB": 128 * MIB, "own": None}
MOST = 6 * GIB  # of dirty pages that a plain writer may leave: it ends early where memory takes more
METHODS = ("plain", "auto")


def measure(name: str, flooded: str, small: str, seconds: float, dirty: int | None) -> Run:
    """`flooded` is where the flood goes, `small` where the small writes go."""
    flooded, small = os.path.join(flooded, "flood"), os.path.join(small, "small")
    with contextlib.ExitStack() as stack:
        for directory in (flooded, small):
            os.mkdir(directory)
            stack.callback(shutil.rmtree, directory)
        stack.enter_context(dirty_bytes(dirty))
        writer = stack.enter_context(common.flood(flooded, WRITERS[name].how, size=MOST, seconds=seconds, sync=False))
        occasional = stack.enter_context(common.child("probe.py", os.path.join(small, "log"), "100", "0.02"))
        writer.tell()
        ((file,),) = writer.answer()
        samples = occasional.end()["samples"]
    # What is dirty at the end of a plain flood is not waited for, so the flood lasts until its last write.
    took = [took * 1000 for at, took in samples if file["began"] <= at <= file["wrote"]]
    return {
        **file,
        "samples": len(took),
        "longest_ms": max(took),
        "p99_ms": percentile(took, 99),
        "flood_longest_ms": file["longest_write_seconds"] * 1000,
        "flood_rate_mib": file["bytes"] / MIB / (file["wrote"] - file["began"]),
    }


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--seconds", type=float, default=30.0, help="of each run (default 30)")
    common.add_rounds(p, repeat=1, settle=2.0)
    a = p.parse_args()
    undo_on_signals()
    names = common.chosen(a.methods or ",".join(METHODS), list(WRITERS))
    env = common.environment()
    keys = {
        f"vm.dirty_bytes {memory}, to {disk}, {WRITERS[name].title}": (memory, disk, name)
        for memory in MEMORY
        for disk in ("A", "B")
        for name in names
    }
    runs: dict[str, list[Run]] = {key: [] for key in keys}
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(scratch(a.directory, MIB))
        slow, what = stack.enter_context(programmable(DISKS["usb"], base, MOST + GIB))
        env |= {"disk A": f"{common.Mount.of(slow).kind}, {what}"}
        env |= {f"{key} B": value for key, value in common.file_system(base).items()}
        env["work"] = f"{a.seconds:g} s of flood, {a.repeat} rounds; 100 bytes every 20 ms beside it"
        for number, key in common.interleaved(list(keys), a.repeat):
            common.settle(a.settle)
            memory, disk, name = keys[key]
            run = measure(name, slow, slow if disk == "A" else base, a.seconds, MEMORY[memory])
            runs[key].append(run)
            common.progress(f"round {number + 1}: {key}: {run['longest_ms']:.1f} ms, own {run['flood_longest_ms']:.0f}")
    header = ["settings, small writes, flood", "longest write() ms", "p99 ms", "samples", "flood's longest write() ms"]
    rows = [
        [
            key,
            *(spread((r[figure] for r in own), 2) for figure in ("longest_ms", "p99_ms")),
            str(min(r["samples"] for r in own)),
            spread((r["flood_longest_ms"] for r in own), 0),
            spread((r["bytes"] / MIB for r in own), 0),
            spread((r["flood_rate_mib"] for r in own), 0),
        ]
        for key, own in runs.items()
    ]
    t = Targets()
    for key, (memory, disk, name) in keys.items():
        plain = runs.get(f"vm.dirty_bytes {memory}, to {disk}, {WRITERS['plain'].title}", [])
        longest = [r["longest_ms"] for r in runs[key]]
        share = [ms / p["longest_ms"] for ms, p in zip(longest, plain, strict=False)]
        if disk == "B" or name == "plain":
            t.told(f"{key}: longest write()", longest, " ms")
            continue
        t.at_most(f"{key}: longest write()", longest, 100, " ms")
        # Where the kernel did not stop the plain flood, there is nothing to be better than.
        if plain and memory == "own":
            t.told(f"{key}: longest write() / beside plain", share)
        elif plain:
            t.at_most(f"{key}: longest write() / beside plain", share, 0.05)
    sections = [
        common.table([*header, "flood MiB", "flood MiB/s"], rows),
        "Longest of a run, median (least..most) of the rounds. The flood's MiB/s are what its write() accepted: plain, "
        "most of that is in memory, and dropped with the file at the end.",
        str(t),
    ]
    text = common.report("Occasional writes while a slow disk is flooded", env, sections)
    common.publish(a, text, {"environment": env, "seconds": a.seconds, "runs": runs})


if __name__ == "__main__":
    main()
