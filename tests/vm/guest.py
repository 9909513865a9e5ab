"""The guest's one command (see init): the figures, then the tests, each on the guest's own disk.

`guest.py write METHOD FILE GROUP` is one measured write, in a process of its own, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
DISK, OUT = Path("/mnt/pacedio-disk"), Path("/mnt/pacedio-out")
DEVICE = Path("/dev/vda")
GROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
SIZE, MEMORY, RATE, ROUNDS = 384 * MIB, 256 * MIB, 50_000_000, 3

# What has to do with the kernel; everything is ten times slower here. test_control and test_window, which are pure,
# take three minutes of their own and can be asked for.
TESTS = ("atomic", "errors", "failing_device", "filesystems", "observe", "open", "resident", "reader", "stats")


# ---- One write


def write(method: str, path: str, group: str) -> None:
    # Before anything else, so that every page of the file is charged to the group.
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    import pacedio

    chunk = os.urandom(MIB)
    times = []
    began = time.perf_counter()
    with open(path, "wb") if method == "plain" else pacedio.open(path, "wb") as f:
        for _ in range(SIZE // MIB):
            before = time.perf_counter()
            f.write(chunk)
            times.append(time.perf_counter() - before)
        before = time.perf_counter()
        if isinstance(f, pacedio.PacedWriter):
            f.sync()
        else:
            f.flush()
            os.fsync(f.fileno())
        synced = time.perf_counter()
    result = {
        "total_seconds": synced - began,
        "sync_seconds": synced - before,
        "longest_write_seconds": max(times),
        "p99_write_seconds": statistics.quantiles(times, n=100)[98],
        "write_seconds": times,
    }
    if isinstance(f, pacedio.PacedWriter):
        result |= {"stats_line": str(f.stats), "engine": f.stats.engine}
    json.dump(result, sys.stdout)


# ---- The figures


@contextlib.contextmanager
def control_group(name: str) -> Iterator[Path]:
    group = GROUPS / name
    group.mkdir()
    try:
        number = os.stat(DEVICE).st_rdev
        (group / "memory.max").write_text(str(MEMORY))
        (group / "io.max").write_text(f"{os.major(number)}:{os.minor(number)} wbps={RATE}")
        yield group
    finally:
        group.rmdir()


def in_flight(group: Path) -> int:
    """Bytes that the group has dirty or under writeback."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields["file_dirty"]) + int(fields["file_writeback"])


@contextlib.contextmanager
def most_in_flight(group: Path, result: dict[str, Any]) -> Iterator[None]:
    """Fill `result` with the most that was in flight meanwhile."""
    stop = threading.Event()
    seen = [0]

    def watch() -> None:
        while not stop.wait(0.01):
            seen.append(in_flight(group))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    result["most_in_flight"] = max(seen)


def measured(method: str) -> dict[str, Any]:
    path = DISK / "file"
    os.sync()
    time.sleep(2)
    result: dict[str, Any] = {}
    with control_group(method) as group:
        command = [sys.executable, __file__, "write", method, str(path), str(group)]
        with most_in_flight(group, result):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        path.unlink()
    result.update(json.loads(done.stdout))
    return result


def figures(data: dict[str, Any]) -> tuple[list[str], bool]:
    """The report's sections, and whether the target was reached."""
    from common import Targets, interleaved, most_mib, spread, table

    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "paced": []}
    for number, method in interleaved(tuple(runs), ROUNDS):
        result = measured(method)
        runs[method].append(result)
        longest = result["longest_write_seconds"] * 1000
        print(f"round {number + 1}, {method}: {longest:.0f} ms longest write(), {result['total_seconds']:.1f} s in all")
    data["runs"] = runs

    def of(method: str, name: str, factor: float = 1, digits: int = 1) -> str:
        return spread([run[name] * factor for run in runs[method]], digits)

    rows = [
        (
            title,
            of(method, "longest_write_seconds", 1000),
            of(method, "p99_write_seconds", 1000),
            of(method, "sync_seconds", 1, 3),
            of(method, "total_seconds"),
            spread([SIZE / MIB / run["total_seconds"] for run in runs[method]], 1),
            most_mib(run["most_in_flight"] for run in runs[method]),
        )
        for method, title in (("plain", "open + fsync"), ("paced", "pacedio.open + sync"))
    ]
    header = ("method", "longest write() ms", "p99 ms", "final sync s", "total s", "MiB/s", "most in flight MiB")
    targets = Targets()
    pairs = list(zip(runs["paced"], runs["plain"], strict=True))
    for name, what in (("longest_write_seconds", "longest write()"), ("p99_write_seconds", "p99 write()")):
        ratios = [paced[name] / plain[name] for paced, plain in pairs]
        if name.startswith("longest"):
            targets.at_most(f"{what}, paced / plain", ratios, 0.25)
        else:
            targets.told(f"{what}, paced / plain", ratios)
    targets.told("speed, paced / plain", [plain["total_seconds"] / paced["total_seconds"] for paced, plain in pairs])
    sections = [
        table(header, rows),
        f"Median (least..most) of {ROUNDS} rounds; ratios are taken within a round. In flight is what memory.stat "
        "counts as file_dirty and file_writeback, read every 10 ms.",
        str(targets),
        "## What pacedio said\n\n" + "\n".join(f"- {run['stats_line']}" for run in runs["paced"]),
    ]
    return sections, not any(line.startswith("MISS") for line in targets.lines)


# ---- The tests


def run_tests(arguments: Sequence[str], data: dict[str, Any]) -> tuple[str, bool]:
    chosen = list(arguments)
    if not any(each.startswith("tests/") for each in chosen):
        chosen += [f"tests/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={DISK}/pytest", *chosen]
    said = b""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as pytest:
        assert pytest.stdout
        while piece := pytest.stdout.read(4096):
            os.write(1, piece)  # each dot as it comes
            said += piece
    lines = said.decode(errors="replace").splitlines()
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "SKIPPED "))]
    summary.append(lines[-1].strip("= ") if lines else "pytest said nothing")
    data["tests"] = {"code": pytest.returncode, "summary": summary}
    shown = "\n".join(summary)
    return f"## Tests\n\n```text\n{shown}\n```", not pytest.returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--only", choices=("figures", "tests"))
    parser.add_argument("pytest", nargs="*")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    make = ["mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", str(DEVICE)]
    subprocess.run(make, check=True)
    subprocess.run(["mount", "-t", "ext4", str(DEVICE), str(DISK)], check=True)
    from common import environment, file_system, report

    words = ["sh tests/vm/run", *(["--only", arguments.only] if arguments.only else []), "--output FILE", "PYTHON"]
    env = environment() | {"command": f"`{' '.join([*words, *arguments.pytest])}`", "host": arguments.host}
    env |= file_system(str(DISK))
    data: dict[str, Any] = {"environment": env}
    sections: list[str] = []
    reached = passed = True
    if arguments.only != "tests":
        env["control group"] = f"v2, memory.max {MEMORY // MIB} MiB, io.max wbps={RATE}"
        env["data"] = f"{SIZE // MIB} MiB in writes of 1 MiB, one random MiB over and over, {ROUNDS} rounds"
        sections, reached = figures(data)
    if arguments.only != "figures":
        section, passed = run_tests(arguments.pytest, data)
        sections.append(section)
    text = report("Writing in a control group v2 on an older kernel", env, sections)
    (OUT / "report.md").write_text(text)
    (OUT / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    print(f"\n{text}")
    return 0 if reached and passed else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(*sys.argv[2:5])
    else:
        sys.exit(main())
