"""Small writes and small files through pacedio.open against the builtin open, as ratios.

Both sides run in this process, in short batches that take turns, so that whatever else the machine does falls on both.
The memory file system keeps the disk out of the way; small files are tried on the disk too. Verdicts go by the median
over the batches; the least is shown beside it.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common
from common import Targets

import pacedio

KIB = 1024
MEMORY = "/dev/shm"
SMALL_FILE = 4 * KIB
Opener = Callable[..., Any]
Batch = Callable[[], float]  # runs once, gives the seconds for one operation


def unsynced(path: str, mode: str) -> Any:
    return pacedio.open(path, mode, sync=False)


SIDES: dict[str, Opener] = {"builtin": builtins.open, "pacedio": unsynced}


class Writes:
    """Many writes of one small piece to one open file, over and over from its start, so that it does not grow."""

    def __init__(self, directory: str, opener: Opener, piece: bytes | str, count: int) -> None:
        self._f = opener(os.path.join(directory, "writes"), "w" if isinstance(piece, str) else "wb")
        self._piece = piece
        self._count = count

    def __call__(self) -> float:
        f, piece = self._f, self._piece
        f.seek(0)
        write = f.write
        began = time.perf_counter()
        for _ in range(self._count):
            write(piece)
        f.flush()
        return (time.perf_counter() - began) / self._count

    def close(self) -> None:
        self._f.close()


class Files:
    """Many files opened, written and closed; removed again out of the time that counts."""

    def __init__(self, directory: str, opener: Opener, count: int) -> None:
        self._opener = opener
        self._paths = [os.path.join(directory, str(i)) for i in range(count)]
        self._content = os.urandom(SMALL_FILE)

    def __call__(self) -> float:
        opener, content = self._opener, self._content
        began = time.perf_counter()
        for path in self._paths:
            with opener(path, "wb") as f:
                f.write(content)
        seconds = time.perf_counter() - began
        for path in self._paths:
            os.unlink(path)
        return seconds / len(self._paths)

    def close(self) -> None:
        """Nothing is left open."""


class Reads:
    """Many small files, in the page cache, opened, read and closed."""

    def __init__(self, directory: str, opener: Opener, count: int) -> None:
        self._opener = opener
        self._paths = [os.path.join(directory, str(i)) for i in range(count)]
        for path in self._paths:
            with builtins.open(path, "wb") as f:
                f.write(os.urandom(SMALL_FILE))

    def __call__(self) -> float:
        opener = self._opener
        began = time.perf_counter()
        for path in self._paths:
            with opener(path, "rb") as f:
                f.read()
        return (time.perf_counter() - began) / len(self._paths)

    def close(self) -> None:
        """Nothing is left open."""


@dataclass(frozen=True)
class Case:
    title: str
    make: Callable[[str, Opener], Writes | Files | Reads]
    on_disk: bool
    least_rate: float | None = None  # pacedio's rate / the builtin's
    most_time: float | None = None  # pacedio's time / the builtin's


TEXT = "x" * 63 + "\n"
CASES = {
    "write-64": Case("64-byte writes", lambda d, o: Writes(d, o, bytes(64), 16384), False, least_rate=0.9),
    "write-4k": Case("4 KiB writes", lambda d, o: Writes(d, o, bytes(4 * KIB), 2048), False, least_rate=0.9),
    # No target: a text file is a subclass of io.TextIOWrapper (for `stats` and `sync`), which CPython checks for being
    # closed the slow way at each call.
    "text-64": Case("64-character text writes", lambda d, o: Writes(d, o, TEXT, 8192), False),
    "files": Case("write a 4 KiB file, sync=False, in memory", lambda d, o: Files(d, o, 100), False, most_time=1.5),
    "files-disk": Case(
        "write a 4 KiB file, sync=False, on the disk", lambda d, o: Files(d, o, 100), True, most_time=1.5
    ),
    "reads": Case("read a 4 KiB file, in memory", lambda d, o: Reads(d, o, 100), False),
    "reads-disk": Case("read a 4 KiB file, on the disk", lambda d, o: Reads(d, o, 100), True),
}


def memory_directory() -> str | None:
    """Where memory files go, or None: then the temporary directory must do."""
    return MEMORY if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK) else None


@contextlib.contextmanager
def place(case: Case, disk: str) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="pacedio-benchmark-", dir=disk if case.on_disk else memory_directory())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def compare(case: Case, disk: str, batches: int) -> dict[str, list[float]]:
    """Seconds for one operation in each batch, for both sides."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    with place(case, disk) as base, contextlib.ExitStack() as stack:
        batch = {}
        for name, opener in SIDES.items():
            directory = os.path.join(base, name)
            os.mkdir(directory)
            batch[name] = case.make(directory, opener)
            stack.callback(batch[name].close)
        for each in batch.values():
            each()
        gc.collect()
        gc.disable()
        try:
            order = list(SIDES)
            for _ in range(batches):
                for name in order:
                    seconds[name].append(batch[name]())
                order.reverse()
        finally:
            gc.enable()
    return seconds


def time_ratio(seconds: dict[str, list[float]], of: Callable[[list[float]], float] = statistics.median) -> float:
    """pacedio's time / the builtin's."""
    return of(seconds["pacedio"]) / of(seconds["builtin"])


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--batches", type=int, default=200, help="batches for each side and case (default 200)")
    p.add_argument("--methods", help=f"only these cases: {','.join(CASES)}")
    a = p.parse_args()
    env = {**common.environment(), **common.file_system(a.directory)}
    if memory_directory() is None:
        env["note"] = f"no {MEMORY} here: the temporary directory instead"
    rows, targets, results = [], Targets(), {}
    for name in common.chosen(a.methods, list(CASES)):
        case = CASES[name]
        seconds = results[name] = compare(case, a.directory, a.batches)
        median, least = time_ratio(seconds), time_ratio(seconds, min)
        row = [case.title]
        for of in (statistics.median, min):
            row += [f"{of(seconds[side]) * 1e6:.3f}" for side in SIDES]
        rows.append([*row, f"{median:.2f}", f"{least:.2f}", f"{1 / median:.2f}", f"{1 / least:.2f}"])
        if case.least_rate is not None:
            targets.at_least(f"{case.title}: rate / the builtin's", [1 / median], case.least_rate)
        elif case.most_time is None:
            targets.told(f"{case.title}: time / the builtin's", [median])
        else:
            targets.at_most(f"{case.title}: time / the builtin's", [median], case.most_time)
    header = ["case", "builtin median us", "pacedio median us", "builtin least us", "pacedio least us"]
    header += ["time, of medians", "time, of least", "rate, of medians", "rate, of least"]
    sections = [
        common.table(header, rows),
        f"Microseconds for one operation, {a.batches} batches for each side, taking turns; time and rate are pacedio's "
        "/ the builtin's.",
        str(targets),
    ]
    text = common.report("Small writes and small files", env, sections)
    common.publish(a, text, {"environment": env, "seconds": results})


if __name__ == "__main__":
    main()
