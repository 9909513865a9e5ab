"""What the benchmarks share: running one method under observation, describing the machine, tables, targets, results."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from places import MIB, CannotMeasure

from pacedio.pacing import parse_size

HERE = os.path.dirname(os.path.abspath(__file__))


# ---- Running and observing


@dataclass(frozen=True)
class Writer:
    """A way to write, as flood.py reads it."""

    title: str
    how: dict[str, Any]


WRITERS = {
    "plain": Writer("plain", {"kind": "plain"}),
    "recipe": Writer("RECIPE", {"kind": "pacedio", "preset": "RECIPE"}),
    "fixed": Writer("fixed 2 MiB", {"kind": "pacedio", "arguments": {"window": "512KiB", "limit": "2MiB"}}),
    "auto": Writer("auto", {"kind": "pacedio", "arguments": {}}),
    "polite": Writer("POLITE", {"kind": "pacedio", "preset": "POLITE"}),
}


class Group:
    """A command in a process group of its own, ended with its children when we are."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def wait(self) -> tuple[str, str]:
        try:
            out, err = self._process.communicate()
        except BaseException:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.communicate(timeout=10)
                    break
            raise
        text, errors = out.decode(errors="replace"), err.decode(errors="replace")
        if self._process.returncode:
            raise CannotMeasure(
                f"{self._process.args[0]!r} ended with {self._process.returncode}: {errors.strip() or text.strip()}"
            )
        return text, errors


class Child:
    """One of the programs beside this one: says that it is ready, is told to begin or to end, and answers in JSON."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._script = script
        command = [sys.executable, os.path.join(HERE, script), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdin
        assert self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def ready(self) -> None:
        if self.line() != "ready":
            raise CannotMeasure(f"{self._script} did not start")

    def tell(self) -> None:
        self._in.write("\n")
        self._in.flush()

    def line(self) -> str:
        """The next that it prints, "" after the last."""
        return self._out.readline().rstrip("\n")

    def answer(self) -> Any:
        text = self.line()
        if not text:
            raise CannotMeasure(f"{self._script} ended with {self._process.wait()}")
        return json.loads(text)

    def end(self) -> Any:
        """End its standard input, and take what it says then."""
        self._in.close()
        return self.answer()

    def kill(self) -> None:
        """Leave nothing of it, whatever it does. Where it sits in a write, that ends first."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._out.close()
        self._process.wait()


@contextlib.contextmanager
def child(script: str, *arguments: str) -> Iterator[Child]:
    """Start it, and have it gone after."""
    started = Child(script, *arguments)
    try:
        started.ready()
        yield started
    finally:
        started.kill()


@contextlib.contextmanager
def observed(directory: str, result: dict[str, Any], files: int = 1) -> Iterator[None]:
    """Fill `result` with what another process sees of the first files that appear in `directory` meanwhile."""
    with child("observer.py", directory, str(files)) as observer:
        yield
        result.update(observer.end())


def flood(directory: str, how: dict[str, Any], **changes: Any) -> contextlib.AbstractContextManager[Child]:
    """A process that writes (flood.py) once it is told to: one writer, one file, unless `changes` say more."""
    job = {"how": how, "directory": directory, "name": "flood", "writers": 1, "seconds": None, "rest": 0, "keep": False}
    job |= {"sync": True, "procs": None, "slice": None, "file_size": changes["size"]}
    return child("flood.py", json.dumps(job | changes))


def settle(seconds: float) -> None:
    """What is left of the file before reaches the disk, and the disk comes to rest."""
    os.sync()
    time.sleep(seconds)


def interleaved(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each round begins with another method, and every other one goes on backwards, so that neither place nor
    predecessor is always the same."""
    for number in range(rounds):
        start = number * max(1, len(names) // rounds) % len(names)
        rest = [*names[start + 1 :], *names[:start]]
        for name in (names[start], *(reversed(rest) if number % 2 else rest)):
            yield number, name


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- Figures


def spread(values: Iterable[float | None], digits: int = 2) -> str:
    """Median (least..most)."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{statistics.median(known):.{digits}f}"
    if len(known) == 1:
        return middle
    return f"{middle} ({min(known):.{digits}f}..{max(known):.{digits}f})"


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def percentile(values: Iterable[float], percent: float) -> float:
    """The least value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def most_mib(values: Iterable[int | None]) -> str:
    """The most over all rounds: a limit that is broken once is broken."""
    known = [value for value in values if value is not None]
    return f"{max(known) / MIB:.1f}" if known else "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table that also reads well as text; the first `left` columns to the left, figures to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return f"| {' | '.join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells))} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


@dataclass
class Targets:
    """What was asked for and whether it was reached."""

    lines: list[str] = field(default_factory=list)

    def at_least(self, what: str, values: Iterable[float], bound: float, unit: str = "x") -> None:
        values = list(values)
        self._add(median(values) >= bound, f"{what}: {spread(values)}{unit}, target >= {bound:g}{unit}")

    def at_most(self, what: str, values: Iterable[float], bound: float, unit: str = "x") -> None:
        values = list(values)
        self._add(median(values) <= bound, f"{what}: {spread(values)}{unit}, target <= {bound:g}{unit}")

    def equal(self, what: str, value: str, wanted: str) -> None:
        self._add(value == wanted, f"{what}: {value}, target {wanted}")

    def told(self, what: str, values: Iterable[float], unit: str = "x") -> None:
        """A figure that has no target here."""
        self.lines.append(f"  --  {what}: {spread(values)}{unit}")

    def _add(self, reached: bool, text: str) -> None:
        self.lines.append(f"{'PASS' if reached else 'MISS'}  {text}")

    def __str__(self) -> str:
        return "\n".join(["## Targets", "", "```text", *self.lines, "```"]) if self.lines else ""


# ---- The machine


def _first(path: str, wanted: str) -> str:
    with open(path) as f:
        for line in f:
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Mount:
    kind: str
    source: str
    options: str
    device: str

    @classmethod
    def of(cls, path: str) -> Mount:
        """The mount that `path` is on: the last of those whose mount point is the longest."""
        path = os.path.realpath(path)
        best = (-1, cls("?", "?", "", ""))
        with open("/proc/self/mountinfo") as f:
            for line in f:
                fields = line.split()
                point = fields[4].encode().decode("unicode_escape")
                if os.path.commonpath([point, path]) == point and len(point) >= best[0]:
                    kind, source, extra = fields[fields.index("-") + 1 :][:3]
                    # Of the directories that overlayfs is made of nobody learns anything.
                    options = dict.fromkeys(o for o in f"{fields[5]},{extra}".split(",") if "dir=" not in o)
                    best = (len(point), cls(kind, source, ",".join(options), fields[2]))
        return best[1]

    def disk(self) -> str:
        """Size, queue and kind of the disk below, as far as the kernel tells."""
        numbers = self.device
        if os.path.exists(self.source):
            status = os.stat(self.source)
            numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        where = os.path.realpath(f"/sys/dev/block/{numbers}")
        if os.path.exists(os.path.join(where, "partition")):
            where = os.path.dirname(where)
        if not os.path.exists(os.path.join(where, "queue")):
            return "none"
        scheduler = _read(f"{where}/queue/scheduler")
        driver = os.path.basename(os.path.realpath(f"{where}/device/driver"))
        return ", ".join(
            filter(
                None,
                (
                    os.path.basename(where),
                    _read(f"{where}/device/model") or (driver if os.path.exists(f"{where}/device/driver") else ""),
                    f"{int(_read(f'{where}/size') or 0) * 512 / (1 << 30):.0f} GiB",
                    f"scheduler {scheduler.partition('[')[2].partition(']')[0] or scheduler}",
                    _read(f"{where}/queue/write_cache"),
                ),
            )
        )


def _revision() -> str:
    if not shutil.which("git"):
        return ""
    done = subprocess.run(
        ["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return f" ({done.stdout.strip()})" if not done.returncode else ""


def command_line() -> str:
    """The command as it was typed, but for directories and files, which say nothing to anybody else."""
    words = ["python", f"benchmarks/{os.path.basename(sys.argv[0])}", *sys.argv[1:]]
    for option, shown in (("--directory", "DIR"), ("--output", "FILE"), ("--json", "FILE")):
        for i, word in enumerate(words):
            if word == option and i + 1 < len(words):
                words[i + 1] = shown
            elif word.startswith(f"{option}="):
                words[i] = f"{option}={shown}"
    return shlex.join(words)


def environment() -> dict[str, str]:
    cpuinfo = "/proc/cpuinfo"
    virtual = "hypervisor" in _first(cpuinfo, "flags").split()
    dirty = [f"{name} {_read(f'/proc/sys/vm/{name}')}" for name in ("dirty_background_ratio", "dirty_ratio")]
    dirty += [f"{name} {_read(f'/proc/sys/vm/{name}')}" for name in ("dirty_background_bytes", "dirty_bytes")]
    return {
        "command": f"`{command_line()}`",
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_first(cpuinfo, 'model name') or platform.machine()}, {os.cpu_count()} cores, "
        f"{int(_first('/proc/meminfo', 'MemTotal').split()[0]) / (1 << 20):.1f} GiB memory"
        f"{', virtual' if virtual else ''}, load {os.getloadavg()[0]:.2f} before",
        "kernel": f"{platform.system()} {platform.release()}, vm: {', '.join(dirty)}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "pacedio": importlib.metadata.version("pacedio") + _revision(),
    }


def file_system(directory: str, below: str | None = None) -> dict[str, str]:
    """What `directory` is on, and what that is on where it is stacked or on a loop device."""
    mount = Mount.of(directory)
    text = f"{mount.kind} ({mount.options})"
    if below is None:
        return {"file system": text, "disk": mount.disk()}
    lower = Mount.of(below)
    link = "over" if mount.kind == "overlay" else "on a loop device with direct I/O to a preallocated file on"
    return {"file system": f"{text} {link} {lower.kind} ({lower.options})", "disk": lower.disk()}


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


# ---- The command line and the results


def size(text: str) -> int:
    """A size as pacedio reads it, in whole MiB."""
    value = parse_size(text)
    if value < MIB or value % MIB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of MiB")
    return value


def parser(description: str | None, *, default_size: str | None = None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if default_size:
        p.add_argument("--size", type=size, default=size(default_size), help=f"of the file (default {default_size})")
        add_rounds(p)
    p.add_argument("--directory", default=".", help="on the disk to measure (default: the current one)")
    p.add_argument("--output", metavar="FILE", help="write the report as Markdown, and JSON beside it (.json)")
    p.add_argument("--json", metavar="FILE", help="write every figure of every run as JSON")
    return p


def add_rounds(p: argparse.ArgumentParser, *, repeat: int = 3, settle: float = 5.0) -> None:
    p.add_argument("--repeat", type=int, default=repeat, help=f"rounds, each runs all once (default {repeat})")
    p.add_argument("--settle", type=float, default=settle, help=f"seconds of rest before each run (default {settle:g})")
    p.add_argument("--methods", help="only these, by name and separated by commas")


def chosen(wanted: str | None, names: Sequence[str]) -> list[str]:
    """Those of `names` that the comma-separated `wanted` lists, or all of them."""
    if wanted is None:
        return list(names)
    listed = wanted.split(",")
    unknown = [name for name in listed if name not in names]
    if unknown:
        raise CannotMeasure(f"no method {', '.join(unknown)} here; there are {', '.join(names)}")
    return [name for name in names if name in listed]


def report(title: str, env: dict[str, str], sections: Sequence[str]) -> str:
    header = table(("what", "value"), list(env.items()), left=2)
    return "\n\n".join([f"# {title}", header, *filter(None, sections)]) + "\n"


def publish(arguments: argparse.Namespace, text: str, data: dict[str, Any]) -> None:
    print(text)
    beside = arguments.json
    if arguments.output:
        with open(arguments.output, "w") as f:
            f.write(text)
        beside = beside or f"{os.path.splitext(arguments.output)[0]}.json"
    if beside:
        with open(beside, "w") as f:
            json.dump(data, f, indent=1)
            f.write("\n")
