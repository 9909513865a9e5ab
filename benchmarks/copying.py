"""Copies a big file in several ways, side by side, and says how long each took until the disk had the copy.

The page cache is dropped before each, so that every byte is read from the disk. The rounds interleave the methods.
Methods: pacedcp; cp, then sync; rsync, then sync; dd with O_DIRECT; dd that drops the cache behind; and, as the limit,
fio (libaio, O_DIRECT, 512 KiB, depth 8) reading one file and writing another at once, the slower of its two jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any

import common
from common import Targets, most_mib, spread
from places import MIB, CannotMeasure, needs_root, scratch, undo_on_signals
from worker import busy_seconds

from pacedio.pacing import BALANCED

Run = dict[str, Any]


PACEDCP = os.path.join(os.path.dirname(sys.executable), "pacedcp")
DD = "dd if={src} of={dst} bs=1M conv=fsync status=none"
FIO = (
    "fio --ioengine=libaio --direct=1 --bs=512k --iodepth=8 --fallocate=none --size={size} --output-format=json"
    " --name=read --rw=read --filename={src} --name=write --rw=write --end_fsync=1 --filename={dst}"
)


@dataclass(frozen=True)
class Method:
    title: str
    steps: tuple[str, ...]  # commands without quoting, run one after the other

    def commands(self, src: str, dst: str, size: str) -> list[list[str]]:
        return [[word.format(src=src, dst=dst, size=size) for word in step.split(" ")] for step in self.steps]


METHODS = {
    "pacedcp": Method("pacedcp", ("pacedcp --stats {src} {dst}",)),
    "cp": Method("cp && sync", ("cp {src} {dst}", "sync")),
    # In place: else it writes to a name of its own and renames, which changes nothing for the disk.
    "rsync": Method("rsync && sync", ("rsync --inplace {src} {dst}", "sync")),
    "dd-direct": Method("dd O_DIRECT", (f"{DD} iflag=direct oflag=direct",)),
    "dd-nocache": Method("dd nocache", (f"{DD} iflag=nocache oflag=nocache",)),
    "fio": Method("fio read and write", (FIO,)),
}


def program(command: str) -> str | None:
    """Where it is: pacedcp that of this Python's environment, everything else by name."""
    return shutil.which(PACEDCP if command == "pacedcp" else command)


def make_source(path: str, size: int) -> None:
    """Random data, each MiB with its own number at its head, so that a block in the wrong place is noticed."""
    chunk = bytearray(os.urandom(MIB))
    with open(path, "wb", buffering=0) as f:
        for number in range(size // MIB):
            chunk[:8] = number.to_bytes(8, "little")
            if f.write(chunk) != MIB:
                raise CannotMeasure("the source came out short")
        os.fsync(f.fileno())


def check(path: str, source: str | None, size: int) -> None:
    """That the copy is whole: its size, no holes, and a sample of its blocks (fio writes its own data)."""
    status = os.stat(path)
    if status.st_size != size or status.st_blocks * 512 < size:
        raise CannotMeasure(f"the copy has {status.st_size} bytes in {status.st_blocks} blocks instead of {size}")
    if source is None:
        return
    count = size // MIB
    with open(path, "rb") as copy, open(source, "rb") as original:
        for number in {0, count // 3, count // 2, count - 1}:
            copy.seek(number * MIB)
            original.seek(number * MIB)
            if copy.read(MIB) != original.read(MIB):
                raise CannotMeasure(f"the copy differs in MiB {number}")


def drop_caches() -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as f:
        f.write("3")


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def copied(method: Method, src: str, dst: str, size: int) -> Run:
    """Run its steps one after the other."""
    steps: list[float] = []
    text = ""
    busy, cpu, began = busy_seconds(), children_cpu(), time.perf_counter()
    for command in method.commands(src, dst, str(size)):
        step_began = time.perf_counter()
        out, err = common.Group([program(command[0]) or command[0], *command[1:]]).wait()
        steps.append(time.perf_counter() - step_began)
        text += out + err
    result: Run = {
        "total_seconds": time.perf_counter() - began,
        "cpu_seconds": children_cpu() - cpu,
        "busy_seconds": busy_seconds() - busy,
        "step_seconds": steps,
    }
    if method.steps == (FIO,):
        jobs = {job["jobname"]: job for job in json.loads(text)["jobs"]}
        if any(job["error"] or job[name]["io_bytes"] != size for name, job in jobs.items()):
            raise CannotMeasure("fio reported an error")
        # Its own count, so that its start and its end are not held against it.
        runtime = {name: job[name]["runtime"] / 1000 for name, job in jobs.items()}
        result["fio_runtime"] = runtime
        result["total_seconds"] = max(runtime.values())
        result["cpu_seconds"] = sum((j["usr_cpu"] + j["sys_cpu"]) / 100 * runtime[name] for name, j in jobs.items())
    elif text.strip():
        result["said"] = text.strip().replace(src, "SRC").replace(dst, "DST")
    return result


def measure(method: Method, base: str, source: str, size: int) -> Run:
    directory = os.path.join(base, "run")
    os.mkdir(directory)
    target = os.path.join(directory, "copy")
    seen: Run = {}
    try:
        with common.observed(directory, seen):
            result = copied(method, source, target, size)
        check(target, None if method.steps == (FIO,) else source, size)
    finally:
        shutil.rmtree(directory)
    result["busy_seconds"] -= seen["cpu_seconds"] / seen["seconds"] * result["total_seconds"]
    result["rate_mib"] = size / MIB / result["total_seconds"]
    result["seen"] = seen
    return result


def ratios(runs: dict[str, list[Run]], name: str, base: str) -> list[float]:
    return [b["total_seconds"] / a["total_seconds"] for a, b in zip(runs[name], runs[base], strict=True)]


def speed_table(runs: dict[str, list[Run]]) -> str:
    bases = [base for base in ("cp", "fio") if base in runs]
    header = ["method", "total s", "MiB/s", "copy s", "sync s", "CPU s", "machine CPU s"]
    header += [f"x {base}" for base in bases]
    header += ["cachestat MiB", "meminfo MiB", "most cached MiB", "longest gap ms"]
    rows = []
    for name, own in runs.items():
        seen = [r["seen"] for r in own]
        row = [METHODS[name].title, spread(r["total_seconds"] for r in own), spread((r["rate_mib"] for r in own), 0)]
        two = len(METHODS[name].steps) == 2
        row += [spread(r["step_seconds"][i] for r in own) if two else "-" for i in range(2)]
        row += [spread(r[key] for r in own) for key in ("cpu_seconds", "busy_seconds")]
        row += [spread(ratios(runs, name, base)) for base in bases]
        row.append(most_mib(s["cachestat_most_in_flight"] for s in seen))
        row.append(most_mib(s["meminfo_most_in_flight"] for s in seen))
        row.append(most_mib(s["cachestat_most_cached"] for s in seen))
        row.append(f"{max(s['cachestat_longest_gap'] for s in seen) * 1000:.0f}")
        rows.append(row)
    return common.table(header, rows)


def targets(runs: dict[str, list[Run]]) -> Targets:
    t = Targets()
    own = runs.get("pacedcp")
    if own is None:
        return t
    if "cp" in runs:
        t.at_least("pacedcp: speed / cp && sync", ratios(runs, "pacedcp", "cp"), 1.7)
    for base in ("rsync", "dd-direct", "dd-nocache", "fio"):
        if base in runs:
            t.told(f"pacedcp: speed / {METHODS[base].title}", ratios(runs, "pacedcp", base))
    most = [r["seen"]["cachestat_most_in_flight"] for r in own]
    if None not in most:
        t.at_most(
            "pacedcp: most in flight, seen by cachestat",
            [max(most) / MIB],
            (BALANCED.limit + BALANCED.window) / MIB,
            " MiB",
        )
    return t


def main() -> None:
    a = common.parser(__doc__, default_size="4GiB").parse_args()
    undo_on_signals()
    needs_root("dropping the page cache before each copy")
    names = list(METHODS)
    for name, method in METHODS.items():
        command = method.steps[0].partition(" ")[0]
        if not program(command):
            common.progress(f"{command} is not installed: left out")
            names.remove(name)
    names = common.chosen(a.methods, names)
    env = common.environment()
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(scratch(a.directory, a.size))
        env.update(common.file_system(base))
        if "fio" in names:
            env["fio"] = common.fio_version()
        env["data"] = f"{a.size // MIB} MiB, random, nothing cached, {a.repeat} rounds"
        source = os.path.join(base, "source")
        make_source(source, a.size)
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for number, name in common.interleaved(names, a.repeat):
            drop_caches()
            common.settle(a.settle)
            run = measure(METHODS[name], base, source, a.size)
            runs[name].append(run)
            common.progress(f"round {number + 1}: {METHODS[name].title}: {run['total_seconds']:.2f} s")
    said = [f"- {METHODS[name].title}: {own[-1]['said']}" for name, own in runs.items() if "said" in own[-1]]
    commands = [" && ".join(map(" ".join, METHODS[name].commands("SRC", "DST", "SIZE"))) for name in names]
    sections = [
        speed_table(runs),
        "Seconds are median (least..most). CPU is the copying command, machine CPU everything but the observer. Ratios "
        "of speed are taken within a round. In flight and cached are the copy's, the most of all rounds, as another "
        "process saw them by cachestat; meminfo is machine-wide, above its state before. fio's time is its own count "
        "of the slower of its two jobs; the machine's CPU time has its start too.",
        str(targets(runs)),
        "## Commands",
        "\n".join(f"- `{command}`" for command in commands),
        *(["## What they said in the last round", "\n".join(said)] if said else []),
    ]
    text = common.report(f"Copying {a.size // MIB} MiB", env, sections)
    common.publish(a, text, {"environment": env, "size": a.size, "runs": runs})


if __name__ == "__main__":
    main()
