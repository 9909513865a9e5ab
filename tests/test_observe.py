from __future__ import annotations

import copy
import errno
import mmap
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import HAS_CACHESTAT, FileSystem, needs_cachestat, observed

from pacedio.observe import CacheStat, cachestat, meminfo, resident

PAGES = 64
PAGE = mmap.PAGESIZE


@pytest.fixture
def dirty_file(ext4: FileSystem) -> Path:
    """A new file of 64 pages, none of which is on the disk yet."""
    path = ext4.directory / "file"
    path.write_bytes(bytes([1]) * PAGES * PAGE)
    return path


def drop(path: Path) -> None:
    with open(path, "rb") as f:
        os.fdatasync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@needs_cachestat
def test_cachestat_counts_pages_as_they_go_from_dirty_to_clean_to_gone(dirty_file: Path) -> None:
    assert cachestat(dirty_file) == CacheStat(PAGES, PAGES, 0, 0, 0)
    with open(dirty_file, "rb") as f:
        os.fdatasync(f.fileno())
        assert cachestat(f.fileno()) == CacheStat(PAGES, 0, 0, 0, 0)
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cachestat(os.fsencode(dirty_file)).cached == 0


@needs_cachestat
def test_cachestat_of_a_range(dirty_file: Path) -> None:
    drop(dirty_file)
    with open(dirty_file, "r+b") as f:
        f.write(bytes(8 * PAGE))
    assert cachestat(dirty_file).dirty == 8
    assert cachestat(str(dirty_file), 6 * PAGE).dirty == 2
    assert cachestat(str(dirty_file), 6 * PAGE, PAGE) == CacheStat(1, 1, 0, 0, 0)


def test_cachestat_agrees_with_the_observer(dirty_file: Path) -> None:
    with observed(dirty_file) as seen:
        time.sleep(0.1)
        drop(dirty_file)
        time.sleep(0.1)
    assert seen["most"] == seen["most_cached"] == PAGES * PAGE
    assert seen["samples"] > 50


@needs_cachestat
def test_overlayfs_has_pages_only_for_resident(overlayfs: FileSystem) -> None:
    path = overlayfs.directory / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    assert cachestat(path) == CacheStat(0, 0, 0, 0, 0)
    assert resident(path) == PAGES
    assert cachestat(overlayfs.pages(path)).dirty == PAGES


def test_resident_counts_what_is_cached(dirty_file: Path) -> None:
    assert resident(dirty_file) == PAGES
    drop(dirty_file)
    assert resident(str(dirty_file)) == 0
    with open(dirty_file, "rb", buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing read ahead
        os.pread(f.fileno(), 1, 3 * PAGE)
        assert resident(f.fileno()) == 1


@needs_cachestat
def test_resident_agrees_with_cachestat(dirty_file: Path) -> None:
    drop(dirty_file)
    with open(dirty_file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), bytes(PAGE), 3 * PAGE)
        assert resident(f.fileno()) == cachestat(f.fileno()).cached == 1


def test_resident_of_an_empty_file_and_of_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert resident(path) == 0
    os.truncate(path, (1 << 30) + 1)
    assert resident(path) == 0


@pytest.mark.parametrize("look", [cachestat, resident])
def test_a_missing_file_is_named(look: Callable[[object], object], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as e:
        look(tmp_path / "missing")
    assert os.fspath(e.value.filename) == str(tmp_path / "missing")


@pytest.mark.parametrize("look", [pytest.param(cachestat, marks=needs_cachestat), resident])
def test_a_closed_descriptor(look: Callable[[object], object]) -> None:
    with pytest.raises(OSError) as e:  # noqa: PT011
        look(987654)
    assert e.value.errno == errno.EBADF
    if look is cachestat:
        assert e.value.filename == 987654


def test_no_descriptor_is_left_open(dirty_file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    if HAS_CACHESTAT:
        cachestat(dirty_file)
    resident(dirty_file)
    with pytest.raises(OSError):  # noqa: PT011
        resident(dirty_file.parent)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(HAS_CACHESTAT, reason="this kernel has cachestat")
def test_an_older_kernel_has_no_cachestat(dirty_file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=str(dirty_file)) as e:
        cachestat(dirty_file)
    assert e.value.errno == errno.ENOSYS
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("offset", "length"), [(-1, 0), (0, -1)])
def test_a_negative_range_is_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="-1"):
        cachestat(0, offset, length)


def test_meminfo_is_in_bytes() -> None:
    found = meminfo()
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0.9 * total <= found["MemTotal"] <= 1.1 * total
    assert {"Dirty", "Writeback", "Cached", "MemFree"} <= found.keys()
    assert "HugePages_Total" not in found


def test_meminfo_sees_dirty_pages(ext4: FileSystem) -> None:
    before = meminfo()["Dirty"]
    with open(ext4.directory / "file", "wb") as f:
        f.write(bytes(64 << 20))
        f.flush()
        after = meminfo()["Dirty"]
        f.truncate(0)
    # Others may write out pages of their own meanwhile, but hardly this many.
    assert after - before > 32 << 20


def test_a_cachestat_is_a_frozen_value() -> None:
    one = CacheStat(1, 2, 3, 4, 5)
    assert repr(one) == "CacheStat(cached=1, dirty=2, writeback=3, evicted=4, recently_evicted=5)"
    assert one == CacheStat(1, 2, 3, 4, 5) == pickle.loads(pickle.dumps(one)) == copy.copy(one)
    assert hash(one) == hash(CacheStat(1, 2, 3, 4, 5))
    assert one != CacheStat(1, 2, 3, 4, 6)
    assert one != (1, 2, 3, 4, 5)
    with pytest.raises(AttributeError, match="dirty"):
        one.dirty = 7
    with pytest.raises(AttributeError, match="dirty"):
        del one.dirty
    with pytest.raises(AttributeError):
        one.clean = 7  # type: ignore[attr-defined]
