"""What Python writes big files with, paced and not: the same bytes, at what speed, with how much in flight.

On the disk (--directory), and on overlayfs over it: each producer writes its file by a path of its own, then fsync, and
the same through pacedio, durable as well. In flight is what another process sees. In memory (--memory) the disk is out
of the way: what is left of the difference is what pacedio costs; both sides take turns.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import common
from common import Targets, spread
from places import MIB, overlay, scratch, undo_on_signals
from small import memory_directory

import pacedio
from pacedio.archives import open_tar, open_zip

TREE = "/usr/lib"
FILES = 20_000

Writes = Callable[[str, bool, bool], None]  # a path; paced?; durable?


def opened(path: str, paced: bool, durable: bool) -> Any:
    return pacedio.open(path, "wb", sync=durable) if paced else open(path, "wb")


def tree_as_tar(path: str, paced: bool, durable: bool) -> None:
    with open_tar(path, "w", sync=durable) if paced else tarfile.open(path, "w") as tar:
        tar.add(TREE, "lib")


def many_files() -> Writes:
    directory = tempfile.mkdtemp(prefix="pacedio-benchmark-", dir=memory_directory())
    content = os.urandom(8192)
    for i in range(FILES):
        with open(os.path.join(directory, str(i)), "wb") as f:
            f.write(content[: i % 8192])

    def write(path: str, paced: bool, durable: bool) -> None:
        with open_zip(path, "w", sync=durable) if paced else zipfile.ZipFile(path, "w") as archive:
            for i in range(FILES):
                archive.write(os.path.join(directory, str(i)), str(i))

    write.undo = lambda: shutil.rmtree(directory)  # type: ignore[attr-defined]
    return write


def array(size: int) -> Writes:
    import numpy as np

    values = np.arange(size // 8)

    def write(path: str, paced: bool, durable: bool) -> None:
        with opened(path, paced, durable) as f:
            np.save(f, values)

    return write


def stream(size: int) -> Writes:
    block = os.urandom(MIB // 4) + bytes(MIB * 3 // 4)

    def write(path: str, paced: bool, durable: bool) -> None:
        with opened(path, paced, durable) as f, gzip.GzipFile("", "wb", 1, f, 0) as packed:
            for _ in range(size // MIB):
                packed.write(block)

    return write


def frame(size: int, kind: str) -> Writes:
    import numpy as np
    import pandas as pd

    choose = np.random.default_rng(1)
    values = pd.DataFrame({name: choose.random(size // 64) for name in "abcdefgh"})

    def write(path: str, paced: bool, durable: bool) -> None:
        options = {"sync": durable} if paced else None
        url = f"paced://{path}" if paced else path
        if kind == "parquet":
            values.to_parquet(url, storage_options=options, compression=None)
        else:
            values.to_csv(url, storage_options=options)

    return write


PRODUCERS: dict[str, tuple[str, Callable[[int], Writes], float]] = {
    "tar": (f"tar of {TREE}", lambda _: tree_as_tar, 1),
    "zip": (f"zip of {FILES} files", lambda _: many_files(), 1),
    "numpy": ("numpy.save", array, 2),
    "gzip": ("gzip, level 1", stream, 1),
    "parquet": ("pandas, parquet", lambda size: frame(size, "parquet"), 1),
    "csv": ("pandas, csv", lambda size: frame(size, "csv"), 1 / 16),
}


@contextlib.contextmanager
def producer(name: str, size: int) -> Iterator[Writes]:
    _, make, share = PRODUCERS[name]
    write = make(int(size * share))
    try:
        yield write
    finally:
        getattr(write, "undo", lambda: None)()


def digest(path: str) -> str:
    with pacedio.open(path, "rb") as f:
        return hashlib.blake2b(f.read() if os.path.getsize(path) < MIB else b"".join(_hashes(f))).hexdigest()


def _hashes(f: Any) -> Iterator[bytes]:
    while data := f.read(16 * MIB):
        yield hashlib.blake2b(data).digest()


def timed(write: Writes, path: str, paced: bool, durable: bool) -> float:
    began = time.perf_counter()
    write(path, paced, durable)
    if durable and not paced:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.perf_counter() - began


def on_disk(directory: str, watched: Callable[[str], str], name: str, size: int, settle: float) -> dict[str, Any]:
    """Both sides once. `watched`: where the pages of a file in the directory are."""
    result: dict[str, Any] = {}
    with producer(name, size) as write:
        for side in ("plain", "paced"):
            inside = os.path.join(directory, side)
            os.mkdir(inside)
            path = os.path.join(inside, "file")
            common.settle(settle)
            seen: dict[str, Any] = {}
            with common.observed(watched(inside), seen):
                result[f"{side}_seconds"] = timed(write, path, side == "paced", True)
            result[f"{side}_in_flight"] = seen["cachestat_most_in_flight"]
            result[f"{side}_digest"], result["size"] = digest(path), os.path.getsize(path)
            os.unlink(path)
            os.rmdir(inside)
    return result


def in_memory(directory: str, name: str, size: int, batches: int) -> list[float]:
    """paced / plain, of each batch."""
    ratios = []
    with producer(name, size) as write:
        path = os.path.join(directory, "file")
        for number in range(batches + 1):
            seconds = {}
            for paced in (True, False) if number % 2 else (False, True):
                seconds[paced] = timed(write, path, paced, False)
                os.unlink(path)
            ratios.append(seconds[True] / seconds[False])
    return ratios[1:]  # the first fills caches


def main() -> None:
    undo_on_signals()
    p = common.parser(__doc__, default_size="1GiB")
    p.add_argument("--memory", action="store_true", help="in memory: what pacedio costs, disk aside")
    p.add_argument("--batches", type=int, default=9, help="of both sides, in memory (default 9)")
    a = p.parse_args()
    names = common.chosen(a.methods, list(PRODUCERS))
    targets, results = Targets(), {}
    env = {**common.environment(), **common.file_system(a.directory)}
    rows = []
    if a.memory:
        with scratch(memory_directory() or a.directory, a.size // 8, 8) as directory:
            for name in names:
                results[name] = ratios = in_memory(directory, name, a.size // 8, a.batches)
                rows.append([PRODUCERS[name][0], spread(ratios, 3)])
                targets.at_most(f"{PRODUCERS[name][0]}: time, paced / plain", ratios, 1.05)
        sections = [common.table(["producer", "time, paced / plain"], rows), str(targets)]
    else:
        header = [
            "producer",
            "where",
            "MiB",
            "plain s",
            "paced s",
            "paced / plain",
            "in flight MiB, plain",
            "paced",
            "same bytes",
        ]
        with scratch(a.directory, 2 * a.size, 3) as base, overlay(base) as (over, upper):
            plain = os.path.join(base, "plain")
            os.mkdir(plain)
            places = {
                "the disk": (plain, lambda path: path),
                "overlayfs": (over, lambda path: path.replace(over, upper, 1)),
            }
            for where, (directory, watched) in places.items():
                for name in names:
                    r = on_disk(directory, watched, name, a.size, a.settle)
                    results[f"{name} on {where}"] = r
                    same = r["plain_digest"] == r["paced_digest"]
                    row = [PRODUCERS[name][0], where, f"{r['size'] / MIB:.0f}"]
                    row += [f"{r['plain_seconds']:.2f}", f"{r['paced_seconds']:.2f}"]
                    row.append(f"{r['paced_seconds'] / r['plain_seconds']:.2f}")
                    row += [f"{(r[f'{side}_in_flight'] or 0) / MIB:.1f}" for side in ("plain", "paced")]
                    rows.append([*row, "yes" if same else "NO"])
                    targets.equal(
                        f"{PRODUCERS[name][0]} on {where}: bytes", "the same" if same else "others", "the same"
                    )
        sections = [common.table(header, rows, left=2), str(targets)]
    text = common.report("What Python writes big files with", env, sections)
    common.publish(a, text, {"environment": env, "results": results})


if __name__ == "__main__":
    main()
