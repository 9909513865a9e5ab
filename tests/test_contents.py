"""Copying from a descriptor to a paced file: bytes, holes, the source's pages, failures."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from machine import FileSystem, descriptors

from pacedio import _contents, files
from pacedio._native import ffi, lib
from pacedio.copying import copy_contents
from pacedio.exceptions import SourceError
from pacedio.pacing import Pacing
from pacedio.writer import PacedWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = mmap.PAGESIZE
CHUNK = 512 * 1024
MIB = 1 << 20
SYS = lib.pio_sys_table

SIGNATURES = {
    "read": "int64_t(int, void *, size_t)",
    "pread": "int64_t(int, void *, size_t, int64_t)",
    "write": "int64_t(int, void const *, size_t)",
    "write_uncached": "int64_t(int, void const *, size_t)",
    "lseek": "int64_t(int, int64_t, int)",
    "status": "int(int, pio_status *)",
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


def paced(target: Path | int, mode: str = "wb") -> PacedWriter:
    f = files.open(target, mode, sync=False)
    assert isinstance(f, PacedWriter)
    return f


def copy(source: Path | int, target: Path, mode: str = "wb", **arguments: Any) -> int:
    fd = source if isinstance(source, int) else os.open(source, os.O_RDONLY)
    try:
        with paced(target, mode) as f:
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


def data_in(path: Path) -> int:
    """The bytes of a file that are not in holes."""
    total = 0
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        hole = 0
        while hole < size:
            try:
                data = os.lseek(f.fileno(), hole, os.SEEK_DATA)
            except OSError as e:
                if e.errno != errno.ENXIO:  # only a hole is left
                    raise
                break
            hole = os.lseek(f.fileno(), data, os.SEEK_HOLE)
            total += hole - data
    return total


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


@pytest.fixture(params=[0, 1, 4])
def readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_contents, "_READERS", request.param)
    return int(request.param)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


# ---- bytes ----


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize("around", [0, PAGE, CHUNK, 2 * CHUNK, 4 * CHUNK, 8 * CHUNK, 9 * CHUNK, 17 * CHUNK])
@pytest.mark.parametrize("more", [-PAGE - 1, -1, 0, 1, PAGE])
def test_same_bytes(source: Path, target: Path, around: int, more: int) -> None:
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
    monkeypatch.setattr(_contents, "_READERS", readers)
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
    assert data_in(target) <= data_in(source)


def test_a_descriptor_is_copied_from_its_beginning(source: Path, target: Path) -> None:
    with source.open("rb") as f:
        f.seek(CHUNK + 1)
        copy(f.fileno(), target)
    assert digest(source) == digest(target)


def test_goes_to_the_position_of_the_target(source: Path, target: Path) -> None:
    with source.open("rb") as s, paced(target) as f:
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
    assert data_in(target) <= data_in(source) < CHUNK


def test_nothing_but_a_hole(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 3 * CHUNK + 5)
    steps: list[int] = []
    assert copy(source, target, progress=steps.append) == 3 * CHUNK + 5
    assert steps == [3 * CHUNK + 5]
    assert target.stat().st_size == 3 * CHUNK + 5
    assert data_in(target) == 0


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
    assert data_in(target) <= data_in(source) < 2 << 20
    with target.open("rb") as f:
        f.seek(at)
        assert f.read(len(data)) == data


def test_holes_are_written_where_asked(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 3 * CHUNK + 5)
    assert copy(source, target, sparse=False) == 3 * CHUNK + 5
    assert target.read_bytes() == bytes(3 * CHUNK + 5)
    assert data_in(target) >= 3 * CHUNK


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
    with source.open("rb") as s, paced(write_end) as sink:
        assert copy_contents(s.fileno(), sink) == 2 * CHUNK
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


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize("more", [1, PAGE, CHUNK, 5 * CHUNK + 3])
@pytest.mark.parametrize("said", [1, PAGE + 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.usefixtures("readers")
def test_a_source_that_holds_more_than_it_says(tmp_path: Path, target: Path, said: int, more: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(said + more))
    fd = os.open(source, os.O_RDONLY)

    def make(real: Any) -> Callable[..., int]:
        def status(descriptor: int, out: Any) -> int:
            code = int(real(descriptor, out))
            if descriptor == fd:
                out.size = said
            return code

        return status

    with replaced("status", make):
        assert copy(fd, target) == said + more
    os.close(fd)
    assert digest(source) == digest(target)


def test_a_source_that_shrinks(tmp_path: Path, target: Path) -> None:
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


def test_a_source_that_grows_is_followed(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_contents, "_READERS", 0)  # or the whole would have been read before it grows
    size = source.stat().st_size
    left = [100, 1000, 10_000]

    def progress(_: int) -> None:
        if left:
            with source.open("ab") as f:
                f.write(os.urandom(left.pop()))

    copied = copy(source, target, progress=progress)
    assert copied == size + 11_100
    assert digest(source) == digest(target)


@pytest.mark.usefixtures("readers")
def test_a_source_that_grows_as_fast_as_it_is_copied(tmp_path: Path, target: Path) -> None:
    """As `cat file >> file` would."""
    source = tmp_path / "grows"
    source.write_bytes(os.urandom(20 * CHUNK))
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


def assert_as_before(after: list[int], before: list[int]) -> None:
    """None more is resident, and none less; but the kernel may reclaim a clean page at any time, and does take single
    ones."""
    assert [page for page, there in enumerate(after) if there > before[page]] == []
    assert sum(after) >= sum(before) * 0.99


PAGE_SETS = [
    [],
    [0],
    [7, 8, 9, CHUNK // PAGE + 3],
    [5 * CHUNK // PAGE],
    list(range(2 * CHUNK // PAGE)),
    list(range(0, 5 * CHUNK // PAGE, 2)),
]


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize("pages", PAGE_SETS)
def test_pages_are_left_as_they_were(cold: Path, target: Path, pages: list[int]) -> None:
    spread(cold, pages)
    before = resident(cold)
    assert [i for i, there in enumerate(before) if there] == pages
    copy(cold, target)
    assert_as_before(resident(cold), before)
    assert digest(cold) == digest(target)


def refuse_direct(real: Any) -> Callable[..., int]:
    return lambda path, flags: int(-errno.EINVAL if flags & os.O_DIRECT else real(path, flags))


def refuse_again(real: Any) -> Callable[..., int]:
    def open_(path: Any, flags: int) -> int:
        again = ffi.string(path).startswith(b"/proc/self/fd/") and flags & os.O_ACCMODE == os.O_RDONLY
        return -errno.EACCES if again else int(real(path, flags))

    return open_


@pytest.mark.parametrize("pages", PAGE_SETS)
@pytest.mark.parametrize("how", [refuse_direct, refuse_again])
def test_pages_are_left_as_they_were_without_o_direct(
    cold: Path, target: Path, pages: list[int], how: Callable[[Any], Callable[..., int]]
) -> None:
    spread(cold, pages)
    before = resident(cold)
    with replaced("open", how):
        copy(cold, target)
    assert_as_before(resident(cold), before)
    assert digest(cold) == digest(target)


def test_pages_that_the_kernel_reads_ahead_all_the_same(ext4: FileSystem) -> None:
    # Page faults leave marks in what they read ahead, and reading a marked page through the cache reads on from there,
    # into folios as large as four pieces.
    source = ext4.directory / "source"
    with source.open("w+b") as f:
        f.truncate(34 * MIB)
        with mmap.mmap(f.fileno(), 0) as mapped:
            for begin, count in ((12880896, 4096), (28017664, 389989)):
                mapped[begin : begin + count] = bytes(count)
            time.sleep(0.05)  # until what was read ahead so far is there
            before = resident(source)
            copy(source, ext4.directory / "target", sparse=False)
            assert_as_before(resident(source), before)


def test_nothing_is_dropped_where_the_kernel_does_not_tell(cold: Path, target: Path) -> None:
    """As of a file that others own, of which mincore reports every page as resident."""
    advised: list[int] = []

    def everything(_: Any) -> Callable[..., int]:
        def mincore(_address: Any, length: int, pages: Any) -> int:
            ffi.memmove(pages, b"\1" * (length // PAGE), length // PAGE)
            return 0

        return mincore

    def noted(real: Any) -> Callable[..., int]:
        def fadvise(fd: int, offset: int, length: int, advice: int) -> int:
            if advice == os.POSIX_FADV_DONTNEED and os.path.samestat(os.fstat(fd), cold.stat()):
                advised.append(offset)
            return int(real(fd, offset, length, advice))

        return fadvise

    spread(cold, [3, 200])
    before = resident(cold)
    with replaced("mincore", everything), replaced("fadvise", noted):
        copy(cold, target)
    assert advised == []
    assert_as_before(resident(cold), before)  # O_DIRECT brought none in
    assert digest(cold) == digest(target)


def test_on_every_file_system(file_system: FileSystem) -> None:
    source, target = file_system.directory / "source", file_system.directory / "target"
    with source.open("wb") as f:
        f.write(os.urandom(6 * CHUNK + 1))
        f.seek(20 * CHUNK)
        f.write(os.urandom(PAGE + 1))
        f.truncate(30 * CHUNK)
    forget(source)
    spread(source, [5])
    before = resident(source)
    copy(source, target)
    assert_as_before(resident(source), before)
    assert digest(source) == digest(target)
    # xfs allocates ahead of a file that grows, and what it did stays, zeroed.
    assert data_in(target) <= data_in(source) + 4 * CHUNK


# ---- failures ----


def failing_from(offset: int, code: int) -> Callable[[Any], Callable[..., int]]:
    """Reads at or after this offset fail."""

    def make(real: Any) -> Callable[..., int]:
        return lambda fd, buffer, n, at: int(-code if at + n > offset else real(fd, buffer, n, at))

    return make


@pytest.mark.usefixtures("readers")
def test_a_source_that_fails(cold: Path, target: Path) -> None:
    before = threads(), descriptors()
    with replaced("pread", failing_from(3 * CHUNK, errno.EIO)), pytest.raises(SourceError) as caught:
        copy(cold, target, source_name=cold)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == cold
    assert str(cold) in str(caught.value)
    assert (threads(), descriptors()) == before
    assert target.read_bytes() == cold.read_bytes()[: 3 * CHUNK]


def test_a_pipe_that_fails(target: Path) -> None:
    read_end, write_end = os.pipe()

    def make(real: Any) -> Callable[..., int]:
        return lambda *arguments: -errno.EIO

    try:
        with replaced("read", make), pytest.raises(SourceError) as caught:
            copy(read_end, target)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert caught.value.errno == errno.EIO


def test_a_descriptor_that_is_no_source(target: Path, tmp_path: Path) -> None:
    with paced(target) as f:
        with pytest.raises(SourceError) as caught:
            copy_contents(-1, f, source_name="nothing")
        assert caught.value.errno == errno.EBADF
        assert caught.value.filename == "nothing"
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(SourceError) as caught:
            copy(fd, target)
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EISDIR


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_PATH])
def test_a_descriptor_that_is_not_open_for_reading(source: Path, target: Path, flags: int) -> None:
    """What /proc/self/fd would let us open again was still not given to us to read."""
    fd = os.open(source, flags)
    try:
        with pytest.raises(SourceError) as caught:
            copy(fd, target)
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EBADF


def test_short_and_interrupted_reads_go_on(cold: Path, target: Path) -> None:
    lock, calls = threading.Lock(), 0

    def make(real: Any) -> Callable[..., int]:
        def pread(fd: int, buffer: Any, n: int, at: int) -> int:
            nonlocal calls
            with lock:
                calls += 1
                if calls % 3 == 0:
                    return -errno.EINTR
            return int(real(fd, buffer, max(n // 3, 1), at))

        return pread

    with replaced("pread", make):
        assert copy(cold, target) == cold.stat().st_size
    assert digest(cold) == digest(target)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_o_direct_that_opens_and_does_not_read(cold: Path, target: Path, code: int) -> None:
    refused: list[int] = []

    def make(real: Any) -> Callable[..., int]:
        def pread(fd: int, buffer: Any, n: int, at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(at)
                return -code
            return int(real(fd, buffer, n, at))

        return pread

    before = resident(cold)
    with replaced("pread", make):
        copy(cold, target)
    assert refused
    assert_as_before(resident(cold), before)
    assert digest(cold) == digest(target)


@pytest.mark.usefixtures("readers")
def test_a_target_that_takes_nothing(source: Path, target: Path) -> None:
    def make(_: Any) -> Callable[..., int]:
        return lambda fd, buffer, n: 0

    with replaced("write", make), replaced("write_uncached", make), pytest.raises(OSError, match="No space left"):
        copy(source, target)


@pytest.mark.usefixtures("readers")
def test_a_target_that_fails(source: Path, target: Path) -> None:
    before = threads(), descriptors()

    def make(real: Any) -> Callable[..., int]:
        def write(fd: int, buffer: Any, n: int) -> int:
            return int(-errno.ENOSPC if target.stat().st_size >= 2 * CHUNK else real(fd, buffer, n))

        return write

    with replaced("write", make), replaced("write_uncached", make), pytest.raises(OSError) as caught:  # noqa: PT011
        copy(source, target, source_name=source)
    assert not isinstance(caught.value, SourceError)
    assert caught.value.errno == errno.ENOSPC
    assert os.fspath(caught.value.filename) == os.fspath(target)
    assert (threads(), descriptors()) == before


def test_what_progress_raises_ends_the_copy(source: Path, target: Path) -> None:
    before = threads(), descriptors()

    def progress(_: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        copy(source, target, progress=progress)
    assert (threads(), descriptors()) == before


def test_a_signal_ends_a_copy_that_waits_for_a_pipe(target: Path) -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    read_end, write_end = os.pipe()
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Alarm):
            copy(read_end, target)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        os.close(read_end)
        os.close(write_end)


def test_a_signal_that_raises_nothing_changes_nothing(source: Path, target: Path) -> None:
    hits: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while len(hits) < 3:
            copy(source, target)
            assert digest(source) == digest(target)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_forked_child_cannot_go_on_with_the_copy(tmp_path: Path, target: Path) -> None:
    """The readers are not there to wait for, neither for their pieces nor for their end."""
    source = tmp_path / "large"
    source.write_bytes(os.urandom(40 * CHUNK))
    parent = os.getpid()
    children: list[int] = []

    def progress(_: int) -> None:
        if not children:
            children.append(os.fork())

    try:
        copied = copy(source, target, progress=progress)
    except OSError as e:
        if os.getpid() == parent:
            raise
        os._exit(0 if e.errno == errno.ECHILD else 1)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(children[0], os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(children[0], signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert copied == 40 * CHUNK
    assert digest(source) == digest(target)


def test_a_small_file_needs_no_thread(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "small"
    source.write_bytes(os.urandom(CHUNK))
    before, seen = threads(), []
    copy(source, target, progress=lambda _: seen.append(threads()))
    assert set(seen) == {before}


def test_a_signal_after_a_copy_leaves_nothing_out(tmp_path: Path) -> None:
    """The copied bytes are not taken for those of the write that the handler's exception ended."""
    (tmp_path / "source").write_bytes(bytes(300_000))

    def raises(*_: object) -> None:
        raise RuntimeError("from the handler")

    before = signal.signal(signal.SIGALRM, raises)
    try:
        with (
            open(tmp_path / "source", "rb") as source,
            files.open(tmp_path / "target", "wb", pacing=Pacing(rate="1MB/s")) as f,
        ):
            copy_contents(source.fileno(), f)
            f.write(b"x" * 100_000)
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(RuntimeError, match="from the handler"):
                f.flush()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "target").read_bytes() == bytes(300_000) + b"x" * 100_000


def test_a_forked_child_that_copies_syncs_at_close(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(300_000))
    with open(tmp_path / "source", "rb") as source, files.open(tmp_path / "target", "wb") as f:
        child = os.fork()
        if child == 0:
            try:
                copy_contents(source.fileno(), f)
                f.close()
                os._exit(0 if f.stats.sync_seconds > 0 else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
