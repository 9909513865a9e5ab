"""PacedReader against io.BufferedReader, and what it leaves in the page cache, as mincore(2) tells it to the test."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import gc
import io
import itertools
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import FileSystem

from pacedio import reader
from pacedio._native import ffi, lib
from pacedio.reader import PacedReader, RawReader

PAGE = os.sysconf("SC_PAGESIZE")
WINDOW = reader._WINDOW

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident(path: Path) -> set[int]:
    """The numbers of the resident pages."""
    size = path.stat().st_size
    vector = ctypes.create_string_buffer(-(-size // PAGE))
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(None, size, 1, 1, fd, 0)
    os.close(fd)
    assert libc.mincore(address, size, vector) == 0
    libc.munmap(address, size)
    return {number for number, byte in enumerate(vector.raw[: len(vector)]) if byte & 1}


def bring_in(path: Path, pages: set[int]) -> None:
    """Make exactly these pages resident."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(5):
            for page in pages:
                os.pread(fd, 1, page * PAGE)
            if resident(path) == pages:
                return
    finally:
        os.close(fd)
    assert resident(path) == pages


def leaves(path: Path, before: set[int], use: Callable[[], object], after: set[int] | None = None) -> None:
    """With the pages of `before` resident, `use` must leave these, or those of `after`, resident and no others.

    Pages also leave the cache without anybody's doing, by reclaim or when somebody writes to drop_caches. So a
    difference counts if it shows again.
    """
    found: set[int] = set()
    for _ in range(4):
        bring_in(path, before)
        use()
        found = resident(path)
        if found == (before if after is None else after):
            return
    assert found == (before if after is None else after)


def content(size: int) -> bytes:
    """Lines of many lengths, some longer than a buffer."""
    out = bytearray()
    number = 0
    while len(out) < size:
        number += 1
        out += b"%d" % number + b"x" * (50_000 if number % 500 == 0 else number % 90) + b"\n"
    return bytes(out[:size])


def made(directory: Path, size: int, name: str = "file") -> Path:
    path = directory / name
    path.write_bytes(content(size))
    return path


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short file has many."""
    monkeypatch.setattr(reader, "_WINDOW", 4 * PAGE)
    monkeypatch.setattr(reader, "_AHEAD", 12 * PAGE)


@contextlib.contextmanager
def system_call(name: str, kind: str, function: Callable[..., int]) -> Iterator[None]:
    """Let `function(original, *arguments)` stand in for an entry of the system call table."""
    original = getattr(lib.pio_sys_table, name)
    callback = ffi.callback(kind, lambda *arguments: function(original, *arguments))
    setattr(lib.pio_sys_table, name, callback)
    try:
        yield
    finally:
        setattr(lib.pio_sys_table, name, original)


READ = "int64_t(int, void *, size_t)"
FADVISE = "int(int, int64_t, int64_t, int)"
MMAP = "int(int, int64_t, size_t, void **)"
MINCORE = "int(void *, size_t, unsigned char *)"
CACHESTAT = "int(int, int64_t, int64_t, pio_pages *)"
STATUS = "int(int, pio_status *)"


# ---- as io has it -------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.just(-1))
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["read", "read1", "readline", "readinto", "readinto1", "readlines"]), SIZES),
    st.tuples(st.sampled_from(["peek", "tell", "next", "iterate"]), st.just(0)),
    st.tuples(st.just("start"), st.integers(0, 320_000)),
    st.tuples(st.just("relative"), st.integers(-70_000, 70_000)),
    st.tuples(st.just("end"), st.integers(-100_000, 10)),
)


def perform(file: Any, operation: str, number: int) -> Any:
    if operation in ("readinto", "readinto1"):
        buffer = bytearray(abs(number))
        count = getattr(file, operation)(buffer)
        return count, bytes(buffer[:count])
    if operation in ("read", "read1", "readline", "readlines"):
        return getattr(file, operation)(number)
    if operation == "peek":
        return file.peek(1)[:1]
    if operation == "tell":
        return file.tell()
    if operation == "next":
        return next(file, None)
    if operation == "iterate":
        return list(itertools.islice(file, 20))
    try:
        return file.seek(number, {"start": 0, "relative": 1, "end": 2}[operation])
    except OSError as error:
        return error.errno


@pytest.mark.usefixtures("small_windows")
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    operations=st.lists(OPERATIONS, max_size=30),
    buffering=st.sampled_from([2, 100, 4096, 20_000]),
    size=st.sampled_from([0, 1, PAGE, 12 * PAGE, 300_001]),
)
def test_any_sequence_of_calls_returns_what_io_returns(
    tmp_path: Path, operations: list[tuple[str, int]], buffering: int, size: int
) -> None:
    path = made(tmp_path, size, f"file-{size}")
    with open(path, "rb", buffering) as builtin, PacedReader(path, buffering) as ours:
        for operation, number in operations:
            # How much one system call gives is the same because the buffers are of the same size.
            assert perform(ours, operation, number) == perform(builtin, operation, number)
        assert ours.tell() == builtin.tell()


def test_attributes(tmp_path: Path) -> None:
    path = made(tmp_path, 100)
    with PacedReader(str(path)) as f:
        assert (f.name, f.mode, f.closed) == (str(path), "rb", False)
        assert (f.readable(), f.writable(), f.seekable(), f.isatty()) == (True, False, True, False)
        assert f.fileno() == f.raw.fileno()
        assert isinstance(f, io.BufferedIOBase)
        assert not isinstance(f, (io.BufferedReader, io.FileIO))
        assert repr(f) == f"<pacedio.reader.PacedReader name={str(path)!r}>"
        for call in (lambda: f.write(b"x"), lambda: f.truncate(0)):
            with pytest.raises(io.UnsupportedOperation):
                call()
    assert f.closed
    f.close()
    for method in ("read", "readline", "peek", "tell", "__iter__", "__enter__", "fileno", "readlines"):
        with pytest.raises(ValueError, match="closed"):
            getattr(f, method)()
    with pytest.raises(ValueError, match="closed"):
        f.raw.readinto(bytearray(1))
    with pytest.raises(ValueError, match="closed"):
        f.raw.readall()


def test_cannot_be_pickled_or_copied(tmp_path: Path) -> None:
    with PacedReader(made(tmp_path, 1)) as f:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot pickle 'PacedReader' object"):
                attempt(f)


def test_detach(tmp_path: Path) -> None:
    path = made(tmp_path, 100)
    f = PacedReader(path)
    assert f.read(10) == content(10)
    raw = f.detach()
    with pytest.raises(ValueError, match="detached"):
        f.read()
    with pytest.raises(ValueError, match="detached"):
        f.detach()
    assert repr(f) == "<pacedio.reader.PacedReader>"
    assert raw.seek(5) == 5
    assert raw.read() == content(100)[5:]
    raw.close()


def test_text_over_it_reads_and_goes_back_to_a_position(tmp_path: Path) -> None:
    path = made(tmp_path, 3 * WINDOW)
    with PacedReader(path) as f, io.TextIOWrapper(f, encoding="ascii") as text:
        assert text.readline() == "1x\n"
        position = text.tell()
        rest = text.read()
        text.seek(position)
        assert text.read() == rest
        assert "1x\n" + rest == content(3 * WINDOW).decode()


@pytest.mark.parametrize("buffering", [1, 7, 4096, 1 << 20])
def test_buffer_sizes(tmp_path: Path, buffering: int) -> None:
    with PacedReader(made(tmp_path, 1000), buffering) as f:
        assert f.read(1) == b"1"
        assert os.lseek(f.fileno(), 0, os.SEEK_CUR) == min(buffering, 1000)


def test_a_buffer_size_of_0_is_refused_and_closes_the_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="buffer size"):
        PacedReader(made(tmp_path, 1000), 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_subclass_may_override_methods(tmp_path: Path) -> None:
    class Upper(PacedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            return super().readline(size).upper()

    with Upper(made(tmp_path, 100)) as f:
        assert f.readline() == b"1X\n"
        assert next(f) == b"2XX\n"
        assert next(iter(f)) == b"3XXX\n"
        assert f.read(2) == b"4x"


def test_whoever_holds_an_iterator_or_a_method_keeps_the_file_open(tmp_path: Path) -> None:
    path = made(tmp_path, 100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert b"".join(line for line in PacedReader(path)) == content(100_000)
        read = PacedReader(path).read
        gc.collect()
        assert read() == content(100_000)
        del read


def test_a_file_that_was_not_closed_warns_and_leaves_nothing(ext4: FileSystem) -> None:
    path = made(ext4.directory, 4 * WINDOW)

    def use() -> None:
        f = PacedReader(path)
        f.read(WINDOW + 1)
        with pytest.warns(ResourceWarning, match="unclosed file"):
            del f

    leaves(path, {3}, use)


def test_a_descriptor_and_an_opener(tmp_path: Path) -> None:
    path = made(tmp_path, 1000)
    fd = os.open(path, os.O_RDONLY)
    with PacedReader(fd, closefd=False) as f:
        assert f.name == fd
        assert f.read() == content(1000)
    assert os.pread(fd, 1, 0) == b"1"
    os.close(fd)
    with PacedReader("other", opener=lambda name, flags: os.open(path, flags)) as f:
        assert f.name == "other"
        assert f.read() == content(1000)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        PacedReader(tmp_path / "missing")
    assert missing.value.filename == tmp_path / "missing"
    with pytest.raises(IsADirectoryError):
        PacedReader(tmp_path)


def test_the_raw_file(tmp_path: Path) -> None:
    path = made(tmp_path, 100_000)
    data = content(100_000)
    with RawReader(path) as f:
        assert f.read(10) == data[:10]
        assert f.readall() == data[10:]
        assert f.read(10) == b""
        assert f.readall() == b""
        f.seek(99_990)
        assert f.read() == data[99_990:]
        f.seek(200_000)
        assert f.readall() == b""
        f.seek(0)
        for buffer in (b"0123", "text", memoryview(bytearray(8))[::2]):
            with pytest.raises(TypeError, match="read-write bytes-like"):
                f.readinto(buffer)
        wide = memoryview(bytearray(16)).cast("Q")
        assert f.readinto(wide) == 16
        assert wide.tobytes() == data[:16]


# ---- the page cache as it was -------------------------------------------------------------------------------------

PAGES = 60


@pytest.mark.usefixtures("small_windows")
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.sets(st.integers(0, PAGES - 1)),
    size=st.sampled_from([PAGES * PAGE, PAGES * PAGE - 1, (PAGES - 1) * PAGE + 1]),
    operations=st.lists(OPERATIONS, max_size=12),
)
def test_after_any_sequence_of_calls_the_same_pages_are_resident(
    ext4: FileSystem, before: set[int], size: int, operations: list[tuple[str, int]]
) -> None:
    path = made(ext4.directory, size, f"file-{size}")

    def use() -> None:
        with PacedReader(path, 2000) as f:
            for operation, number in operations:
                perform(f, operation, number)

    leaves(path, before, use)


SPAN = 24 * WINDOW + 12345
ALL = set(range(-(-SPAN // PAGE)))


@pytest.mark.parametrize(
    "before", [set(), ALL, {page for page in ALL if page > max(ALL) // 2}, {0}], ids=["cold", "warm", "half", "first"]
)
@pytest.mark.parametrize("chunk", [3000, 100_000, -1])
def test_a_whole_file(ext4: FileSystem, before: set[int], chunk: int) -> None:
    path = made(ext4.directory, SPAN)

    def use() -> None:
        with PacedReader(path) as f:
            assert b"".join(iter(lambda: f.read(chunk), b"")) == content(SPAN)

    leaves(path, before, use)


def test_on_every_file_system(file_system: FileSystem) -> None:
    path = made(file_system.directory, SPAN)

    def use() -> None:
        with PacedReader(path) as f:
            assert f.read(WINDOW // 2 + 1) == content(SPAN)[: WINDOW // 2 + 1]
            f.seek(10 * WINDOW + 5)
            assert f.read() == content(SPAN)[10 * WINDOW + 5 :]

    leaves(path, ALL if file_system.kind == "tmpfs" else set(), use)


def test_never_more_than_what_is_read_ahead_is_resident(ext4: FileSystem) -> None:
    path = made(ext4.directory, SPAN)
    bring_in(path, set())
    most = 0
    with PacedReader(path) as f:
        while f.read(WINDOW // 2):
            most = max(most, len(resident(path)))
    assert WINDOW < most * PAGE <= reader._AHEAD + 2 * WINDOW


def test_a_small_read_brings_in_what_was_asked_for(ext4: FileSystem) -> None:
    path = made(ext4.directory, SPAN)
    bring_in(path, set())
    with PacedReader(path) as f:
        for window in (0, 17, 3, 9):
            f.seek(window * WINDOW)
            f.read(10)
            assert len(resident(path)) * PAGE <= reader._BUFFER
    assert resident(path) == set()


@pytest.mark.parametrize("consumed", [1, 40_000, 3 * WINDOW, 5 * WINDOW + 1])
def test_closed_early(ext4: FileSystem, consumed: int) -> None:
    path = made(ext4.directory, SPAN)
    before = set(range(200, 700, 3))

    def use() -> None:
        with PacedReader(path) as f:
            for _ in range(consumed // 4000 + 1):
                f.read(4000)

    leaves(path, before, use)


def test_what_the_kernel_does_not_tell_is_not_dropped(ext4: FileSystem) -> None:
    """Others' files: mincore calls every page resident, so reads are plain ones, with the kernel's own readahead."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    path = made(ext4.directory, SPAN)

    def use() -> None:
        fd = os.open(path, os.O_RDONLY)
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with PacedReader(fd) as f:
                    os._exit(0 if f.read() == content(SPAN) else 1)
            finally:
                os._exit(2)
        os.close(fd)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    leaves(path, set(), use, after=ALL)


def test_a_file_that_grows(ext4: FileSystem) -> None:
    path = made(ext4.directory, 1000)
    with open(path, "ab", 0) as writer, PacedReader(path) as f:
        assert f.read() == content(1000)
        assert f.read() == b""
        for _ in range(3):
            writer.write(b"y" * 2 * WINDOW)
            assert f.read() == b"y" * 2 * WINDOW
        os.truncate(path, 10)
        assert f.read() == b""
        f.seek(0)
        assert f.read() == content(10)


# ---- not a regular file -------------------------------------------------------------------------------------------


def test_a_pipe() -> None:
    out, into = os.pipe()
    with PacedReader(out) as f:
        assert not f.seekable()
        os.write(into, b"a line\nand")
        assert f.readline() == b"a line\n"
        assert f.read1(100) == b"and"
        os.write(into, b"x" * 60_000)
        os.close(into)
        assert f.read() == b"x" * 60_000
        assert f.read() == b""


def test_a_pipe_with_nothing_in_it_yet() -> None:
    out, into = os.pipe()
    os.set_blocking(out, False)
    with PacedReader(out) as f, open(into, "wb", 0) as pipe:
        assert f.read(10) is None
        assert f.read() is None
        assert f.raw.read(10) is None
        assert f.raw.readall() is None
        pipe.write(b"abc")
        assert f.read(10) == b"abc"


def test_files_in_proc_and_devices() -> None:
    with PacedReader("/proc/self/maps") as f:
        assert b"[stack]" in f.read()
    with PacedReader("/dev/zero") as f:
        assert f.read(100_000) == bytes(100_000)
    with PacedReader("/dev/null") as f:
        assert f.read() == b""


# ---- signals, threads, forks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_while_reading(raises: bool) -> None:
    out, into = os.pipe()

    def handler(number: int, frame: object) -> None:
        if raises:
            raise InterruptedError("handler")
        os.write(into, b"after")

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with PacedReader(out) as f, open(into, "wb", 0):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            if raises:
                with pytest.raises(InterruptedError, match="handler"):
                    f.read1(5)
            else:
                assert f.read1(5) == b"after"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def in_threads(work: Callable[[], object], count: int = 4) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_threads_share_a_reader(tmp_path: Path) -> None:
    records = b"".join(b"%07d\n" % number for number in range(200_000))
    path = tmp_path / "file"
    path.write_bytes(records)
    seen: list[bytes] = []
    with PacedReader(path) as f:
        in_threads(lambda: seen.extend(iter(lambda: f.read(8), b"")))
    assert sorted(seen) == records.splitlines(keepends=True)


def test_threads_get_whole_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([block]) * (3 * WINDOW) for block in range(20)))
    real = lib.pio_sys_table.read

    @ffi.callback("int64_t(int, void *, size_t)")
    def read(fd: int, buffer: Any, n: int) -> int:
        time.sleep(0.002)  # for another thread to come in between
        return int(real(fd, buffer, n))

    blocks: list[bytes] = []
    lib.pio_sys_table.read = read
    try:
        with RawReader(path) as f:
            in_threads(lambda: blocks.extend(iter(lambda: f.read(3 * WINDOW), b"")))
    finally:
        lib.pio_sys_table.read = real
    assert sorted(block[0] for block in blocks) == list(range(20))
    assert all(block == block[:1] * (3 * WINDOW) for block in blocks)


def test_threads_that_go_around_the_buffer(tmp_path: Path) -> None:
    """No order is promised, but every byte is read once."""
    path = made(tmp_path, SPAN)
    seen: list[bytes] = []
    with RawReader(path) as f:
        in_threads(lambda: seen.extend(iter(lambda: f.read(10_007), b"")))
    assert sorted(b"".join(seen)) == sorted(content(SPAN))


def test_a_child_reads_on_and_so_does_its_parent(tmp_path: Path) -> None:
    path = made(tmp_path, SPAN)
    with PacedReader(path) as f:
        start = f.read(WINDOW)
        child = os.fork()
        if child == 0:
            try:
                more = f.read(WINDOW)
                f.close()
                os._exit(0 if more == content(SPAN)[WINDOW : 2 * WINDOW] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        # The position is shared, as it is with any file; the parent goes on behind what the child read.
        position = os.lseek(f.fileno(), 0, os.SEEK_CUR)
        assert position >= 2 * WINDOW
        f.seek(WINDOW)
        assert start + f.read() == content(SPAN)


# ---- what the kernel may say --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_read_error(ext4: FileSystem, code: int) -> None:
    path = made(ext4.directory, 8 * WINDOW)
    bring_in(path, set())
    calls = 0

    def failing(original: Any, fd: int, buffer: Any, count: int) -> int:
        nonlocal calls
        calls += 1
        return int(original(fd, buffer, count)) if calls == 1 else -code

    with PacedReader(path) as f:
        with system_call("read", READ, failing):
            assert f.raw.read(3 * WINDOW) == content(WINDOW)  # what came before the error
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                f.read(3 * WINDOW)
            assert (caught.value.errno, caught.value.filename) == (code, path)
            with pytest.raises(OSError, match=os.strerror(code)):
                f.raw.readall()
        assert f.read() == content(8 * WINDOW)[WINDOW:]
    assert resident(path) == set()


def test_short_reads(tmp_path: Path) -> None:
    path = made(tmp_path, 3 * WINDOW + 77)

    def short(original: Any, fd: int, buffer: Any, count: int) -> int:
        return int(original(fd, buffer, min(count, 10_001)))

    with system_call("read", READ, short), PacedReader(path) as f:
        assert f.read(2 * WINDOW) == content(2 * WINDOW)
        assert f.read() == content(3 * WINDOW + 77)[2 * WINDOW :]


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("mmap", MMAP, errno.ENOMEM),
        ("mmap", MMAP, errno.ENODEV),
        ("mincore", MINCORE, errno.EAGAIN),
        ("mincore", MINCORE, errno.ENOSYS),
        ("cachestat", CACHESTAT, errno.EPERM),
        ("status", STATUS, errno.ENOSYS),
    ],
)
def test_where_residency_cannot_be_asked_nothing_is_dropped(ext4: FileSystem, name: str, kind: str, code: int) -> None:
    path = made(ext4.directory, SPAN)

    def use() -> None:
        with system_call(name, kind, lambda *_: -code), PacedReader(path) as f:
            assert b"".join(f) == content(SPAN)

    leaves(path, set(range(5)), use, after=ALL)


def test_residency_that_cannot_be_asked_any_more(ext4: FileSystem) -> None:
    """What was recorded is still dropped, and the rest read plainly."""
    path = made(ext4.directory, SPAN)
    bring_in(path, set())
    calls = 0

    def failing(original: Any, *arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return int(original(*arguments)) if calls < 10 else -errno.ENOMEM

    with system_call("mmap", MMAP, failing), PacedReader(path) as f:
        assert b"".join(iter(lambda: f.read(50_000), b"")) == content(SPAN)
    assert calls == 10
    # The first call found out whether mincore tells the truth; five of the eight windows then recorded are read ahead.
    after = resident(path)
    assert after & set(range(3 * WINDOW // PAGE)) == set()
    assert after >= set(range(4 * WINDOW // PAGE, len(ALL)))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_cachestat_mincore_has_to_say(ext4: FileSystem, code: int) -> None:
    path = made(ext4.directory, SPAN)
    before = set(range(100, 1000, 7))

    def use() -> None:
        with system_call("cachestat", CACHESTAT, lambda *_: -code), PacedReader(path) as f:
            assert b"".join(f) == content(SPAN)

    leaves(path, before, use)


def test_a_cachestat_that_counts_nothing_is_not_believed(ext4: FileSystem) -> None:
    """As on overlayfs."""
    path = made(ext4.directory, SPAN)

    def nothing(_: Any, fd: int, off: int, length: int, out: Any) -> int:
        out.cached = 0
        return 0

    def use() -> None:
        with system_call("cachestat", CACHESTAT, nothing), PacedReader(path) as f:
            assert f.read() == content(SPAN)

    leaves(path, ALL, use)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_advice_that_fails_is_never_fatal(ext4: FileSystem, code: int) -> None:
    path = made(ext4.directory, SPAN)

    def use() -> None:
        with system_call("fadvise", FADVISE, lambda *_: -code), PacedReader(path) as f:
            assert b"".join(iter(lambda: f.read(50_000), b"")) == content(SPAN)

    leaves(path, set(), use, after=ALL)


def test_a_warm_small_file_is_asked_for_once(ext4: FileSystem) -> None:
    """What most reads are: no mapping, no advice."""
    path = made(ext4.directory, 4096)
    calls = []

    def counted(name: str) -> Callable[..., int]:
        def call(original: Any, *arguments: Any) -> int:
            calls.append(name)
            return int(original(*arguments))

        return call

    with (
        system_call("mmap", MMAP, counted("mmap")),
        system_call("fadvise", FADVISE, counted("fadvise")),
        system_call("cachestat", CACHESTAT, counted("cachestat")),
        system_call("status", STATUS, counted("status")),
        PacedReader(path) as f,
    ):
        assert path.read_bytes() == content(4096)
        assert f.read() == content(4096)
    assert calls.count("cachestat") == 1
    assert calls.count("status") <= 2
    assert {"mmap", "fadvise"} & set(calls) == set()


def test_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, 10)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(reader, "_WINDOW", 1 << 60)
    with pytest.raises(MemoryError):
        PacedReader(path)
    assert len(os.listdir("/proc/self/fd")) == before
