"""What `close` and `sync` call durable survives a power cut, new directory entries included.

The disk is copied right after, without what only memory knows, and the copy mounted. The file systems are told to
commit nothing of their own accord in between (`commit`; xfs waits for 30 s anyway), and test_without_a_sync shows
that a file that was not synced is indeed lost.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import MIB, FileSystem, Machine

import pacedio

CONTENT = random.Random(3).randbytes(5 * MIB + 321)
OLD = random.Random(4).randbytes(3 * MIB + 123)
OPTIONS = {"ext4": ["commit=300"], "xfs": [], "btrfs": ["commit=300"]}


class Disk:
    def __init__(self, machine: Machine, kind: str, copy: Path) -> None:
        self._machine, self.kind, self._copy = machine, kind, copy

    def mounted(self) -> contextlib.AbstractContextManager[FileSystem]:
        return self._machine.mounted(self.kind, 400 * MIB, *OPTIONS[self.kind])

    def cut_power(self, file_system: FileSystem) -> None:
        file_system.cut_power(self._copy)

    @contextlib.contextmanager
    def after(self) -> Iterator[Path]:
        """The copy, mounted, once the original is unmounted."""
        with self._machine.remounted(self.kind, self._copy) as found:
            yield found.directory
        self._copy.unlink()


@pytest.fixture(params=OPTIONS)
def disk(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> Disk:
    return Disk(machine, request.param, tmp_path / "copy")


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory)) - {"lost+found"}


def test_without_a_sync_the_file_is_lost(disk: Disk) -> None:
    """The control: were the copy not like a power cut, the tests below could not fail."""
    with disk.mounted() as before:
        with pacedio.open(before.directory / "new", "wb", sync=False) as f:
            f.write(CONTENT)
        disk.cut_power(before)
        assert names(before.directory) == {"new"}
    with disk.after() as directory:
        assert names(directory) == set()


@pytest.mark.parametrize("atomic", [False, True], ids=["in place", "atomic"])
@pytest.mark.parametrize("size", [0, 100, len(CONTENT)])
def test_a_new_file_is_there_after_close(disk: Disk, size: int, atomic: bool) -> None:
    with disk.mounted() as before:
        with pacedio.open(before.directory / "new", "wb", atomic=atomic) as f:
            f.write(CONTENT[:size])
        disk.cut_power(before)
    with disk.after() as directory:
        assert names(directory) == {"new"}
        assert (directory / "new").read_bytes() == CONTENT[:size]


def test_what_was_written_is_there_after_sync_though_the_file_is_still_open(disk: Disk) -> None:
    with disk.mounted() as before, pacedio.open(before.directory / "new", "wb") as f:
        f.write(CONTENT)
        f.sync()
        disk.cut_power(before)
    with disk.after() as directory:
        assert (directory / "new").read_bytes() == CONTENT


def test_a_text_file_is_there_after_close(disk: Disk) -> None:
    text = "déjà vu\n" * 200_000
    with disk.mounted() as before:
        with pacedio.open(before.directory / "new", "w", encoding="utf-8") as f:
            f.write(text)
        disk.cut_power(before)
    with disk.after() as directory:
        assert (directory / "new").read_bytes() == text.encode()


def test_appended_and_patched_bytes_are_there_after_close(disk: Disk) -> None:
    with disk.mounted() as before:
        path = before.directory / "file"
        with pacedio.open(path, "wb") as f:
            f.write(OLD)
        with pacedio.open(path, "ab") as f:
            f.write(CONTENT)
        with pacedio.open(path, "r+b") as f:
            f.seek(MIB)
            f.write(b"patched")
        disk.cut_power(before)
    with disk.after() as directory:
        whole = bytearray(OLD + CONTENT)
        whole[MIB : MIB + 7] = b"patched"
        assert (directory / "file").read_bytes() == whole


def test_a_replaced_file_is_there_after_close(disk: Disk) -> None:
    with disk.mounted() as before:
        path = before.directory / "file"
        path.write_bytes(OLD)
        path.chmod(0o640)
        os.sync()
        with pacedio.open(path, "wb", atomic=True) as f:
            f.write(CONTENT)
        disk.cut_power(before)
    with disk.after() as directory:
        assert names(directory) == {"file"}
        assert (directory / "file").read_bytes() == CONTENT
        assert (directory / "file").stat().st_mode & 0o777 == 0o640


def test_a_power_cut_before_the_commit_leaves_the_old_file(disk: Disk) -> None:
    with disk.mounted() as before:
        path = before.directory / "file"
        path.write_bytes(OLD)
        os.sync()
        with pacedio.open(path, "wb", atomic=True) as f:
            f.write(CONTENT)
            f.sync()
            disk.cut_power(before)
    with disk.after() as directory:
        assert (directory / "file").read_bytes() == OLD
