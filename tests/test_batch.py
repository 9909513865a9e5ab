"""Many files made durable together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from machine import FileSystem, Machine, descriptors, needs_cachestat, observed, system_calls

import pacedio
from pacedio._batch import Batch

KIB = 1024
MIB = 1024 * KIB

MANY = """
import os, sys, pacedio
from pacedio._batch import Batch
directory = sys.argv[1]
data = os.urandom(20_000)
for name in ("a", "b", "c"):
    os.mkdir(os.path.join(directory, name))
open(os.path.join(directory, "begin"), "w").close()
with Batch() as batch:
    for i in range(300):
        f = pacedio.open(os.path.join(directory, "abc"[i % 3], str(i)), "wb")
        f.write(data)
        batch.add(f)
    batch.add_directory(directory)
"""


def test_every_file_and_each_directory_once(ext4: FileSystem, tmp_path: Path) -> None:
    calls = system_calls(MANY, ext4.directory, log=tmp_path / "log")
    assert len([call for call in calls if call.startswith("fdatasync(")]) == 300
    assert len([call for call in calls if call.startswith("fsync(")]) == 4
    # Many are started before the first one is waited for by its sync.
    first = next(i for i, call in enumerate(calls) if call.startswith("fdatasync("))
    started = [call for call in calls[:first] if "SYNC_FILE_RANGE_WRITE" in call and "WAIT" not in call]
    assert len(started) >= 100
    assert all((ext4.directory / "abc"[i % 3] / str(i)).stat().st_size == 20_000 for i in range(300))


@needs_cachestat
def test_small_files_in_flight_are_bounded(machine: Machine) -> None:
    with machine.slow_disk() as slow:
        paths = [slow.directory / str(i) for i in range(120)]
        data = os.urandom(100 * KIB)
        for path in paths:
            path.touch()
        os.sync()
        with observed(*paths) as seen, Batch() as batch:
            for path in paths:
                f = pacedio.open(path, "wb")
                f.write(data)
                batch.add(f)
        assert 0 < seen["most"] <= 2 * MIB + 200 * KIB
    assert len(data) * len(paths) > 10 * MIB


def add_fifty(batch: Batch, directory: Path) -> int:
    """50 MB, of which the failing disk has room for half. How many were added: what fails at once is not."""
    added = 0
    for i in range(50):
        f = pacedio.open(directory / str(i), "wb")
        try:
            f.write(os.urandom(1_000_000))
        except OSError:
            f.discard()
        else:
            batch.add(f)
            added += 1
    return added


def test_an_error_names_its_file_and_the_others_are_seen_to(machine: Machine) -> None:
    before = len(descriptors())
    failed: list[tuple[object, OSError]] = []
    with machine.failing_disk() as failing:
        with Batch(on_error=lambda name, error: failed.append((name, error))) as batch:
            added = add_fifty(batch, failing.directory)
        names = {os.path.basename(str(name)) for name, _ in failed}
        assert 0 < len(names & {str(i) for i in range(50)}) < added
        assert all(isinstance(error, OSError) for _, error in failed)
    with machine.failing_disk() as failing, pytest.raises(OSError) as error, Batch() as batch:  # noqa: PT011
        add_fifty(batch, failing.directory)
    assert os.path.dirname(str(error.value.filename)) == str(failing.directory)
    assert len(descriptors()) == before


def test_an_exception_closes_what_was_added(tmp_path: Path) -> None:
    before = len(descriptors())
    with pytest.raises(KeyError), Batch() as batch:  # noqa: PT012
        for i in range(10):
            f = pacedio.open(tmp_path / str(i), "wb")
            f.write(b"x")
            batch.add(f)
        raise KeyError
    assert len(descriptors()) == before
    assert f.closed
    assert (tmp_path / "9").read_bytes() == b"x"  # it was handed to the kernel, and nothing else was promised


def test_without_sync(ext4: FileSystem, tmp_path: Path) -> None:
    script = MANY.replace("Batch()", "Batch(sync=False)").replace('"wb")', '"wb", sync=False)')
    calls = system_calls(script, ext4.directory, log=tmp_path / "log")
    assert [call for call in calls if call.startswith(("fsync(", "fdatasync("))] == []


def test_a_file_that_was_moved_meanwhile(tmp_path: Path) -> None:
    f: Any = pacedio.open(tmp_path / "a", "wb")
    f.write(b"x" * MIB)
    with Batch() as batch:
        batch.add(f)
        os.rename(tmp_path / "a", tmp_path / "b")
        os.unlink(tmp_path / "b")
    assert f.closed


def test_empty_and_big_files(tmp_path: Path) -> None:
    began = time.time()
    with Batch() as batch:
        for name, size in (("empty", 0), ("big", 20 * MIB), ("byte", 1)):
            f = pacedio.open(tmp_path / name, "wb")
            f.write(bytes(size))
            batch.add(f)
            os.utime(tmp_path / name, (1, 1))  # nothing that is done later touches times
    for name, size in (("empty", 0), ("big", 20 * MIB), ("byte", 1)):
        status = (tmp_path / name).stat()
        assert (status.st_size, status.st_mtime) == (size, 1)
        assert status.st_ctime >= began - 1
