"""Which pages of a file are resident, and dropping only those that were not."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pytest

from pacedio._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = mmap.PAGESIZE
PAGES = 256


def resident(fd: int, offset: int = 0, length: int = PAGES * PAGE) -> list[int]:
    pages = ffi.new("unsigned char[]", lib.pio_resident_pages(offset, length))
    found = lib.pio_resident(fd, offset, length, pages)
    assert found == sum(pages)
    return list(pages)


def read_pages(path: Path, *numbers: int) -> None:
    """Make exactly these pages resident."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for number in numbers:
            os.pread(fd, PAGE, number * PAGE)
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE))
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    if any(resident(fd)):
        os.close(fd)
        pytest.skip("this file system keeps its files in memory")
    yield fd
    os.close(fd)


def test_tells_the_pages_that_are_resident(path: Path, fd: int) -> None:
    assert lib.pio_resident_known(fd)
    read_pages(path, 3, 7, 8)
    assert [i for i, there in enumerate(resident(fd)) if there] == [3, 7, 8]


def test_counts_every_page_that_a_range_touches(path: Path, fd: int) -> None:
    read_pages(path, 1)
    assert resident(fd, PAGE - 1, 2) == [0, 1]
    assert resident(fd, PAGE, PAGE) == [1]
    assert resident(fd, 2 * PAGE - 1, PAGE + 2) == [1, 0, 0]
    assert resident(fd, PAGE + 1, 0) == []


def test_drops_what_was_not_resident_and_nothing_else(path: Path, fd: int) -> None:
    read_pages(path, 0, 5, 6, 100, PAGES - 1)
    before = resident(fd)
    read_pages(path, *range(PAGES))
    assert all(resident(fd))
    lib.pio_resident_drop(fd, 0, PAGES * PAGE, bytes(before))
    assert resident(fd) == before


def test_drops_the_unfinished_last_page(path: Path, fd: int) -> None:
    os.truncate(path, 4 * PAGE + 1)
    with path.open("rb") as f:  # the kernel dirtied the page that it cut
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_pages(path, 4)
    assert resident(fd, 0, 4 * PAGE + 1) == [0, 0, 0, 0, 1]
    lib.pio_resident_drop(fd, 0, 4 * PAGE + 1, bytes(5))
    assert resident(fd, 0, 4 * PAGE + 1) == [0] * 5


def test_unknown_of_a_file_that_is_neither_owned_nor_writable(path: Path, fd: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    path.chmod(0o644)
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            # Not even one page is resident, but this is what the kernel says.
            os._exit(0 if not lib.pio_resident_known(fd) and all(resident(fd)) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lib.pio_resident_known(fd)


def test_unknown_of_what_is_no_mappable_file() -> None:
    read_end, write_end = os.pipe()
    status = os.open("/proc/self/status", os.O_RDONLY)
    try:
        assert not lib.pio_resident_known(read_end)
        assert not lib.pio_resident_known(status)
        assert not lib.pio_resident_known(-1)
        assert lib.pio_resident(read_end, 0, PAGE, ffi.new("unsigned char[1]")) < 0
    finally:
        for fd in (read_end, write_end, status):
            os.close(fd)
