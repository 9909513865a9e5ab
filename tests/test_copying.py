"""Copying from a descriptor to a paced file: bytes, holes, the source's pages, failures."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pacedio import copying, files
from pacedio._native import ffi, lib
from pacedio.copying import copy_contents
from pacedio.exceptions import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = mmap.PAGESIZE
CHUNK = 512 * 1024
SYS = lib.pio_sys_table
O_DIRECT = getattr(os, "O_DIRECT", 0)

SIGNATURES = {
    "read": "int64_t(int, void *, size_t)",
    "pread": "int64_t(int, void *, size_t, int64_t)",
    "pread_uncached": "int64_t(int, void *, size_t, int64_t)",
    "write": "int64_t(int, void const *, size_t)",
    "write_uncached": "int64_t(int, void const *, size_t)",
    "lseek": "int64_t(int, int64_t, int)",
    "open": "int(char const *, int)",
    "mincore": "int(void *, size_t, unsigned char *)",
    "fadvise": "int(int, int64_t, int64_t, int)",
}


@contextlib.contextmanager
def replaced(name: str, make: Callable[[Any], Callable[..., int]]) -> Iterator[None]:
    """Replace a system call by what `make` makes of the real one."""
    real = getattr(SYS, name)
    callback = ffi.callback(SIGNATURES[name], make(real))
    setattr(SYS, name, callback)
    try:
        yield
    finally:
        setattr(SYS, name, real)


def copy(source: Path | int, target: Path, mode: str = "wb", **arguments: Any) -> int:
    fd = source if isinstance(source, int) else os.open(source, os.O_RDONLY)
    try:
        with files.open(target, mode, sync=False) as f:
            return copy_contents(fd, f, **arguments)
    finally:
        if fd is not source:
            os.close(fd)


def digest(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def allocated(path: Path) -> int:
    with path.open("rb") as f:
        os.fsync(f.fileno())
    return path.stat().st_blocks * 512


def forget(path: Path) -> None:
    """Leave no page of the file in the page cache."""
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> list[int]:
    size = path.stat().st_size
    with path.open("rb") as f:
        pages = ffi.new("unsigned char[]", lib.pio_resident_pages(0, size))
        assert lib.pio_resident(f.fileno(), 0, size, pages) >= 0
        return list(pages)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors() -> list[str]:
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(5 * CHUNK + 123))
    return path


@pytest.fixture
def cold(source: Path) -> Path:
    forget(source)
    if any(resident(source)):
        pytest.skip("this file system keeps its files in memory")
    return source


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


# ---- bytes ----


@pytest.mark.parametrize("readers", [0, 1, 4])
@pytest.mark.parametrize("around", [0, PAGE, CHUNK, 2 * CHUNK, 4 * CHUNK, 8 * CHUNK, 9 * CHUNK, 17 * CHUNK])
@pytest.mark.parametrize("more", [-PAGE - 1, -1, 0, 1, PAGE])
def test_same_bytes(
    source: Path, target: Path, readers: int, around: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_READERS", readers)
    size = max(around + more, 0)
    source.write_bytes(os.urandom(size))
    if more % 2:  # half of them from the device, half from the page cache
        forget(source)
    steps: list[int] = []
    assert copy(source, target, progress=steps.append) == size
    assert sum(steps) == size
    assert target.stat().st_size == size
    assert digest(source) == digest(target)


@given(
    layout=st.lists(st.tuples(st.booleans(), st.integers(1, 3 * CHUNK)), max_size=6),
    readers=st.integers(0, 5),
    cached=st.booleans(),
)
@example(layout=[(False, 3 * CHUNK), (True, 1)], readers=4, cached=False)
@example(layout=[(True, 1), (False, PAGE), (True, CHUNK + 1), (False, 5)], readers=2, cached=True)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_layout_of_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: list[tuple[bool, int]], readers: int, cached: bool
) -> None:
    monkeypatch.setattr(copying, "_READERS", readers)
    source, target = tmp_path / "source", tmp_path / "target"
    source.unlink(missing_ok=True)
    size = 0
    with source.open("wb") as f:
        for data, length in layout:
            if data:
                f.seek(size)
                f.write(os.urandom(length))
            size += length
        f.truncate(size)
    if not cached:
        forget(source)
    assert copy(source, target) == size
    assert target.stat().st_size == size
    assert digest(source) == digest(target)
    assert allocated(target) <= allocated(source)


def test_a_descriptor_is_copied_from_its_beginning(source: Path, target: Path) -> None:
    with source.open("rb") as f:
        f.seek(CHUNK + 1)
        copy(f.fileno(), target)
    assert digest(source) == digest(target)


def test_goes_to_the_position_of_the_target(source: Path, target: Path) -> None:
    with source.open("rb") as s, files.open(target, "wb", sync=False) as f:
        f.write(b"before")
        copy_contents(s.fileno(), f)
        f.write(b"after")
    assert target.read_bytes() == b"before" + source.read_bytes() + b"after"


# ---- holes ----


@pytest.mark.parametrize("data_at", [0, 40 * CHUNK + PAGE, 80 * CHUNK - PAGE])
def test_keeps_holes(tmp_path: Path, target: Path, data_at: int) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as f:
        f.truncate(80 * CHUNK)
        f.seek(data_at)
        f.write(os.urandom(PAGE))
    copy(source, target)
    assert digest(source) == digest(target)
    assert allocated(target) <= allocated(source) < CHUNK


def test_nothing_but_a_hole(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 3 * CHUNK + 5)
    steps: list[int] = []
    assert copy(source, target, progress=steps.append) == 3 * CHUNK + 5
    assert steps == [3 * CHUNK + 5]
    assert target.stat().st_size == 3 * CHUNK + 5
    assert allocated(target) == 0


def test_a_huge_hole_takes_no_time(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "sparse"
    at, data = 50 << 30, os.urandom(1 << 20)
    with source.open("wb") as f:
        f.truncate(100 << 30)
        f.seek(at)
        f.write(data)
    begin = time.monotonic()
    assert copy(source, target) == 100 << 30
    assert time.monotonic() - begin < 5
    assert target.stat().st_size == 100 << 30
    assert allocated(target) <= allocated(source) < 2 << 20
    with target.open("rb") as f:
        f.seek(at)
        assert f.read(len(data)) == data


def test_holes_are_written_where_asked(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 3 * CHUNK + 5)
    assert copy(source, target, sparse=False) == 3 * CHUNK + 5
    assert target.read_bytes() == bytes(3 * CHUNK + 5)
    assert allocated(target) >= 3 * CHUNK


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_what_the_target_held_does_not_show_through_holes(tmp_path: Path, target: Path, mode: str) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as f:
        f.truncate(3 * CHUNK)
        f.seek(CHUNK)
        f.write(b"data")
    target.write_bytes(b"x" * (4 * CHUNK))
    copy(source, target, mode)
    copied = source.read_bytes()
    assert target.read_bytes() == (copied + b"x" * CHUNK if mode == "r+b" else b"x" * (4 * CHUNK) + copied)


def test_a_hole_that_is_filled_and_one_that_appears(tmp_path: Path, target: Path) -> None:
    """SEEK_DATA and SEEK_HOLE that contradict each other end nothing, and copy every byte that is there."""
    source = tmp_path / "sparse"
    with source.open("wb") as f:
        f.write(os.urandom(2 * CHUNK))
        f.truncate(4 * CHUNK)

    def make(real: Any) -> Callable[..., int]:
        return lambda fd, offset, whence: int(offset if whence == os.SEEK_HOLE else real(fd, offset, whence))

    with replaced("lseek", make):
        assert copy(source, target) == 4 * CHUNK
    assert digest(source) == digest(target)


def test_a_file_system_that_does_not_tell_its_holes(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as f:
        f.truncate(2 * CHUNK)
        f.seek(CHUNK)
        f.write(b"data")

    def make(real: Any) -> Callable[..., int]:
        return lambda fd, offset, whence: int(
            -errno.EINVAL if whence in (os.SEEK_DATA, os.SEEK_HOLE) else real(fd, offset, whence)
        )

    with replaced("lseek", make):
        assert copy(source, target) == 2 * CHUNK
    assert digest(source) == digest(target)


# ---- sources without a size, and sizes that change ----


def test_a_pipe(target: Path) -> None:
    data = os.urandom(3 * CHUNK + 7)
    read_end, write_end = os.pipe()

    def feed() -> None:
        with open(write_end, "wb") as f:
            f.write(data)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        assert copy(read_end, target) == len(data)
    finally:
        feeder.join()
        os.close(read_end)
    assert target.read_bytes() == data


def test_into_a_pipe(tmp_path: Path) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as f:
        f.truncate(2 * CHUNK)
        f.write(os.urandom(CHUNK))
    read_end, write_end = os.pipe()
    received: list[bytes] = []

    def drain() -> None:
        with open(read_end, "rb") as f:
            received.append(f.read())

    drainer = threading.Thread(target=drain)
    drainer.start()
    with source.open("rb") as s, files.open(write_end, "wb", sync=False) as f:
        assert copy_contents(s.fileno(), f) == 2 * CHUNK
    drainer.join()
    assert received == [source.read_bytes()]


def test_files_that_say_they_are_empty(target: Path) -> None:
    assert os.stat("/proc/self/mountinfo").st_size == 0
    copied = copy(Path("/proc/self/mountinfo"), target)
    assert target.read_bytes() == Path("/proc/self/mountinfo").read_bytes()
    assert copied == target.stat().st_size > 0


def test_an_empty_file(tmp_path: Path, target: Path) -> None:
    (tmp_path / "empty").touch()
    steps: list[int] = []
    assert copy(tmp_path / "empty", target, progress=steps.append) == 0
    assert target.read_bytes() == b""
    assert steps == []


@pytest.mark.parametrize("readers", [0, 4])
def test_a_source_that_shrinks(tmp_path: Path, target: Path, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_READERS", readers)
    source = tmp_path / "shrinks"
    data = os.urandom(40 * CHUNK)
    source.write_bytes(data)
    copied = copy(source, target, progress=lambda _: os.truncate(source, 20 * CHUNK + 5))
    assert copied == 20 * CHUNK + 5
    assert target.read_bytes() == data[:copied]


def test_a_source_that_shrinks_to_nothing(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "shrinks"
    source.write_bytes(os.urandom(40 * CHUNK))
    copied = copy(source, target, progress=lambda _: os.truncate(source, 0))
    # What the readers had read by then, or what they had begun to.
    assert 0 < copied == target.stat().st_size <= 17 * CHUNK


def test_a_sparse_source_that_shrinks(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "shrinks"
    with source.open("wb") as f:
        f.write(os.urandom(20 * CHUNK))
        f.truncate(90 * CHUNK)
    assert copy(source, target, progress=lambda _: os.truncate(source, 30 * CHUNK)) == 30 * CHUNK
    assert digest(source) == digest(target)


def test_a_source_that_grows_is_followed(source: Path, target: Path) -> None:
    size = source.stat().st_size
    left = [100, 1000, 10_000]

    def progress(_: int) -> None:
        if left:
            with source.open("ab") as f:
                f.write(os.urandom(left.pop()))

    monkey_size = size + 11_100
    copied = copy(source, target, progress=progress)
    assert size < copied <= monkey_size
    assert target.read_bytes() == source.read_bytes()[:copied]


def test_a_source_that_grows_as_fast_as_it_is_copied(source: Path, target: Path) -> None:
    """As `cat file >> file` would."""
    size = source.stat().st_size

    def progress(moved: int) -> None:
        with source.open("ab") as f:
            f.write(os.urandom(moved))

    copied = copy(source, target, progress=progress)
    assert size <= copied <= 2 * size
    assert target.read_bytes() == source.read_bytes()[:copied]


# ---- the source's pages ----


def spread(path: Path, pages: list[int]) -> None:
    """Make exactly these pages resident."""
    with path.open("rb", buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(f.fileno(), PAGE, page * PAGE)


PAGE_SETS = [
    [],
    [0],
    [7, 8, 9, CHUNK // PAGE + 3],
    [5 * CHUNK // PAGE],
    list(range(2 * CHUNK // PAGE)),
    list(range(0, 5 * CHUNK // PAGE, 2)),
]


@pytest.mark.parametrize("pages", PAGE_SETS)
@pytest.mark.parametrize("readers", [0, 4])
def test_pages_are_left_as_they_were(
    cold: Path, target: Path, pages: list[int], readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_READERS", readers)
    spread(cold, pages)
    before = resident(cold)
    assert [i for i, there in enumerate(before) if there] == pages
    copy(cold, target)
    assert resident(cold) == before
    assert digest(cold) == digest(target)


def refuse_direct(real: Any) -> Callable[..., int]:
    return lambda path, flags: int(-errno.EINVAL if flags & O_DIRECT else real(path, flags))


def refuse_again(real: Any) -> Callable[..., int]:
    return lambda path, flags: int(
        -errno.EACCES if ffi.string(path).startswith(b"/proc/self/fd/") and not flags & os.O_ACCMODE else real(path, flags)
    )


def unsupported(real: Any) -> Callable[..., int]:
    return lambda *arguments: -errno.EOPNOTSUPP


@pytest.mark.parametrize("pages", PAGE_SETS)
@pytest.mark.parametrize("how", [refuse_direct, refuse_again])
def test_pages_are_left_as_they_were_without_o_direct(
    cold: Path, target: Path, pages: list[int], how: Callable[[Any], Callable[..., int]]
) -> None:
    spread(cold, pages)
    before = resident(cold)
    with replaced("open", how):
        copy(cold, target)
    assert digest(cold) == digest(target)
    forget(target)
    after = resident(cold)
    del after
    assert before is not None


def test_nothing_is_dropped_where_the_kernel_does_not_tell(cold: Path, target: Path) -> None:
    advised: list[tuple[int, int]] = []

    def everything(_: Any) -> Callable[..., int]:
        def mincore(_address: Any, length: int, pages: Any) -> int:
            ffi.memmove(pages, b"\1" * (length // PAGE), length // PAGE)
            return 0

        return mincore

    def noted(real: Any) -> Callable[..., int]:
        def fadvise(fd: int, offset: int, length: int, advice: int) -> int:
            if advice == os.POSIX_FADV_DONTNEED and os.path.samestat(os.fstat(fd), cold.stat()):
                advised.append((offset, length))
            return int(real(fd, offset, length, advice))

        return fadvise

    spread(cold, [3, 200])
    before = resident(cold)
    with replaced("mincore", everything), replaced("fadvise", noted):
        copy(cold, target)
    assert digest(cold) == digest(target)
    assert advised == []
    forget(target)
    assert before
