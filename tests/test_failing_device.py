"""A device that fails under writeback, and one that is full: nothing reports success, the descriptor is released, an
atomic file's old content stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import MIB, FileSystem, Machine, descriptors

import pacedio
from pacedio import Pacing

CHUNK = bytes(range(256)) * 4096
FAILURES = {errno.EIO, errno.ENOSPC}  # a loop device passes its backing file's ENOSPC on, or makes EIO of it


@pytest.fixture
def failing(machine: Machine) -> Iterator[FileSystem]:
    with machine.failing_disk() as made:
        yield made


@pytest.fixture
def full(machine: Machine) -> Iterator[FileSystem]:
    """A file system that has no room for 64 MiB."""
    with machine.mounted("ext4", 32 * MIB) as made:
        yield made


def write_64_mib(f: Any) -> None:
    for _ in range(64):
        assert f.write(CHUNK) == len(CHUNK)


def write_and_sync(f: Any) -> None:
    write_64_mib(f)
    f.sync()


def error_of(call: Callable[[], object]) -> OSError | None:
    try:
        call()
    except OSError as e:
        return e
    return None


def check_failed_for_ever(f: Any, first: OSError) -> None:
    """Whatever is tried with it, closing it included, which releases the descriptor."""
    for again in (lambda: f.write(CHUNK), f.sync, f.flush, lambda: f.truncate(0)):
        later = error_of(again)
        assert later is not None
        assert later.errno == first.errno
    assert f.stats.error is not None
    assert f.stats.error.errno == first.errno
    before = len(descriptors())
    last = error_of(f.close)
    assert last is not None
    assert last.errno == first.errno
    assert f.closed
    assert len(descriptors()) < before
    assert f.stats.error is not None


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no sync"])
@pytest.mark.parametrize("engine", ["auto", "range", "uncached", "advise", "datasync"])
def test_a_writeback_error_is_raised_and_never_forgotten(failing: FileSystem, engine: str, sync: bool) -> None:
    before = descriptors()
    f = pacedio.open(failing.directory / "file", "wb", pacing=Pacing(engine=engine), sync=sync)
    with pytest.raises(OSError) as e:  # noqa: PT011
        write_and_sync(f)
    assert isinstance(e.value, pacedio.WritebackError)
    assert e.value.errno in FAILURES
    assert os.fspath(e.value.filename) == str(failing.directory / "file")
    if engine != "advise":  # advice reports no errors, and the sync at the end does
        assert f.stats.bytes < 40 * MIB
    check_failed_for_ever(f, e.value)
    assert descriptors() == before


@pytest.mark.parametrize("size", [100, 64 * MIB])
def test_an_error_that_only_the_sync_can_meet_is_raised_by_close(failing: FileSystem, size: int) -> None:
    with open(failing.directory / "filler", "wb") as filler:
        with pytest.raises(OSError) as e:  # noqa: PT011, PT012
            write_64_mib(filler)
            os.fsync(filler.fileno())
        assert e.value.errno in FAILURES
    before = descriptors()
    f = pacedio.open(failing.directory / "file", "wb", pacing=Pacing(engine="none"))
    f.write(bytes([1]) * size)
    with pytest.raises(OSError) as e:  # noqa: PT011
        f.close()
    assert e.value.errno in FAILURES
    assert f.closed
    assert f.stats.error is not None
    assert descriptors() == before


def test_an_error_in_a_with_block_leaves_it(failing: FileSystem) -> None:
    before = descriptors()
    with pytest.raises(OSError) as e, pacedio.open(failing.directory / "file", "wb") as f:  # noqa: PT011
        write_64_mib(f)
    assert e.value.errno in FAILURES
    assert f.closed
    assert f.stats.error is not None
    assert descriptors() == before


def test_a_writeback_error_leaves_the_old_file(failing: FileSystem) -> None:
    path = failing.directory / "file"
    with pacedio.open(path, "wb", atomic=True) as f:
        f.write(b"old")
    names = set(os.listdir(failing.directory))
    before = descriptors()
    with pytest.raises(OSError) as e, pacedio.open(path, "wb", atomic=True) as f:  # noqa: PT011
        write_64_mib(f)
    assert e.value.errno in FAILURES
    assert path.read_bytes() == b"old"
    assert set(os.listdir(failing.directory)) == names
    assert descriptors() == before


def test_a_swallowed_error_commits_nothing(failing: FileSystem) -> None:
    path = failing.directory / "file"
    path.write_bytes(b"old")
    f = pacedio.open(path, "wb", atomic=True)
    assert error_of(lambda: write_64_mib(f)) is not None
    error_of(f.close)
    assert f.closed
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("engine", ["auto", "uncached", "datasync", "none"])
def test_a_full_file_system(full: FileSystem, engine: str) -> None:
    before = descriptors()
    f = pacedio.open(full.directory / "file", "wb", pacing=Pacing(engine=engine))
    with pytest.raises(OSError, match="No space left") as e:
        write_64_mib(f)
    assert e.value.errno == errno.ENOSPC
    assert os.fspath(e.value.filename) == str(full.directory / "file")
    assert not isinstance(e.value, pacedio.WritebackError)
    check_failed_for_ever(f, e.value)
    assert descriptors() == before


def test_a_full_file_system_leaves_the_old_file(full: FileSystem) -> None:
    path = full.directory / "file"
    path.write_bytes(b"old")
    names = set(os.listdir(full.directory))
    with pytest.raises(OSError, match="No space left"), pacedio.open(path, "wb", atomic=True) as f:
        write_64_mib(f)
    assert path.read_bytes() == b"old"
    assert set(os.listdir(full.directory)) == names
    room_again: Path = full.directory / "room again"
    room_again.write_bytes(bytes(10 * MIB))
