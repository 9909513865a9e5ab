"""pacedio.open and wrap against the builtin: the same calls on both, and the same results, exceptions and bytes."""

from __future__ import annotations

import array
import builtins
import bz2
import contextlib
import csv
import errno
import functools
import gc
import gzip
import io
import itertools
import json
import lzma
import mmap
import os
import pickle
import pty
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import descriptors

import pacedio
from pacedio import Pacing

KIB = 1024
MIB = 1024 * KIB
PATTERN = bytes(range(256)) * 4 * KIB  # 1 MiB
SMALL = Pacing(window="4KiB", limit="8KiB")

Open = Callable[..., Any]
quick: Open = functools.partial(pacedio.open, sync=False)  # what a test of bytes need not wait for


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Relative names, so that the messages of two directories are the same; and no descriptor stays open."""
    monkeypatch.chdir(tmp_path)
    before = len(descriptors())
    yield tmp_path
    assert len(descriptors()) == before


def tree() -> dict[bytes, object]:
    """What lies in the current directory."""
    found: dict[bytes, object] = {}
    for name in sorted(os.listdir(b".")):
        if os.path.isfile(name):
            with builtins.open(name, "rb") as f:
                found[name] = f.read()
        else:
            found[name] = os.stat(name).st_mode
    return found


def outcome(do: Callable[[Open], object], open: Open) -> object:
    """What a call returns or raises, as the caller sees it."""
    try:
        return do(open)
    except Exception as error:
        if isinstance(error, OSError):
            # io's own buffers and truncate leave the name out; ours says it.
            return type(error), error.errno, error.strerror
        if isinstance(error, ValueError):
            # io's C and Python halves word one thing differently.
            return type(error), str(error).lower().removesuffix(" and at most one plus")
        return type(error)


def compare(do: Callable[[Open], object], prepare: Callable[[], object] = lambda: None) -> object:
    """Do the same with the builtin and with ours, each in a new directory, and return what both gave."""
    results = []
    above = Path.cwd()
    for open in (builtins.open, quick):
        directory = Path(tempfile.mkdtemp(dir=above))
        os.chdir(directory)
        try:
            prepare()
            results.append((outcome(do, open), tree()))
        finally:
            os.chdir(above)
            shutil.rmtree(directory)
    assert results[1] == results[0]
    return results[0][0]


def put(data: bytes, name: str | bytes = "file") -> Callable[[], object]:
    def do() -> None:
        with builtins.open(name, "wb") as f:
            f.write(data)

    return do


def attributes(f: Any) -> tuple[object, ...]:
    return f.name, f.mode, f.closed, f.readable(), f.writable(), f.seekable(), f.isatty(), f.fileno() >= 0


# ---- modes and arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_every_short_mode(there: bool) -> None:
    modes = [
        "".join(letters)
        for length in range(4)
        for letters in itertools.product("rwxabt+?", repeat=length)
        if length < 3 or len(set(letters)) == 3
    ]
    modes += ["wb+", "w+b", "bw+", "rbt+", "rwb+", "wbb+"]

    def try_mode(mode: str, open: Open) -> object:
        with open("file", mode, **{} if "b" in mode else {"encoding": "utf-8"}) as f:
            seen: list[object] = [attributes(f), f.tell()]
            data: Any = b"new" if "b" in mode else "new"
            if f.writable():
                seen.append(f.write(data))
            if f.readable():
                f.seek(1)
                seen.append(f.read())
            seen.append(f.tell())
            return seen

    for mode in modes:
        compare(functools.partial(try_mode, mode), put(b"older") if there else lambda: None)


ARGUMENTS: list[dict[str, Any]] = [
    {"mode": "wb", "encoding": "utf-8"},
    {"mode": "wb", "errors": "strict"},
    {"mode": "wb", "newline": "\n"},
    {"mode": "rb", "encoding": "utf-8"},
    {"mode": "w", "encoding": "no such encoding"},
    {"mode": "w", "encoding": "utf-8", "newline": "x"},
    {"mode": "w", "encoding": "utf-8", "newline": 3},
    {"mode": "w", "encoding": "utf-8", "errors": "no such handler"},
    {"mode": "w", "encoding": 3},
    {"mode": "w", "encoding": "utf-8", "errors": 3},
    {"mode": "wb", "closefd": False},
    {"mode": "w", "encoding": "utf-8", "closefd": False},
    {"mode": 3},
    {"mode": b"wb"},
    {"mode": None},
    {"mode": "wb", "buffering": "1"},
    {"mode": "wb", "buffering": 1.5},
    {"mode": "wb", "buffering": None},
    {"mode": "wb", "buffering": 2**31},
    {"mode": "rb", "buffering": 2**31},
    {"mode": "wb", "buffering": -(2**31) - 1},
    {"mode": "wb", "buffering": 2**70},
    {"mode": "wb", "buffering": -5},
    {"mode": "wb", "buffering": 0},
    {"mode": "wb", "buffering": True},
    {"mode": "rb", "buffering": 0},
    {"mode": "w+b", "buffering": 0},
    {"mode": "wb", "buffering": 1},
    {"mode": "rb", "buffering": 1},
    {"mode": "wb", "buffering": 2},
    {"mode": "wb", "buffering": 4096},
    {"mode": "w", "encoding": "utf-8", "buffering": 1},
    {"mode": "w", "encoding": "utf-8", "buffering": 2},
    {"mode": "x", "encoding": "utf-8"},
    {"mode": "xb"},
]


@pytest.mark.filterwarnings("ignore:line buffering:RuntimeWarning")
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments(arguments: dict[str, Any], there: bool) -> None:
    def do(open: Open) -> object:
        with open("file", **arguments) as f:
            if f.writable():
                data: Any = b"written" if "b" in arguments["mode"] else "written"
                return f.write(data), f.write(data)
            return f.read()

    # What the builtin does to the file before it finds out about a bad argument is nobody's wish.
    if "encoding" in arguments or "newline" in arguments or isinstance(arguments.get("buffering"), int):
        results = []
        for number, open in enumerate((builtins.open, quick)):
            directory = Path(str(number))
            directory.mkdir()
            with contextlib.chdir(directory) if sys.version_info >= (3, 11) else _chdir(directory):
                if there:
                    put(b"older")()
                results.append(outcome(do, open))
        assert results[0] == results[1]
    else:
        compare(do, put(b"older") if there else lambda: None)


@contextlib.contextmanager
def _chdir(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("mode", ["wt", "w+"])
def test_text_is_never_unbuffered_and_the_file_stays(mode: str) -> None:
    put(b"older")()
    with pytest.raises(ValueError, match="can't have unbuffered text I/O"):
        pacedio.open("file", mode, 0, encoding="utf-8")
    assert tree() == {b"file": b"older"}


def test_an_index_is_a_buffering() -> None:
    class Index:
        def __index__(self) -> int:
            return 512

    def do(open: Open) -> object:
        with open("file", "wb", Index()) as f:
            return f.write(b"written")

    assert compare(do) == 7


def test_own_arguments_are_keyword_only_and_checked() -> None:
    with pytest.raises(TypeError):
        pacedio.open("file", "wb", -1, None, None, None, True, None, pacedio.BALANCED)  # type: ignore[misc]
    with pytest.raises(TypeError, match="pacing must be a Pacing, not str"):
        pacedio.open("file", "wb", pacing="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="atomic=True needs mode 'w' or 'x', not 'ab'"):
        pacedio.open("file", "ab", atomic=True)
    assert tree() == {}


def test_line_buffering_is_no_mode_of_binary_files() -> None:
    for mode in ("wb", "rb"):
        put(b"older")()
        with pytest.warns(RuntimeWarning, match="line buffering") as caught, pacedio.open("file", mode, 1):
            pass
        assert caught[0].filename == __file__


# ---- names and descriptors ---------------------------------------------------------------------------------------

NAMES: list[Any] = [
    *("missing/file", "directory", "directory/", ".", "", "/", "file/x", "new\nline", "\udcff\udcfe", " ", "-"),
    *(b"bytes", b"\xff\xfe", b"new\nline", b"directory", b""),
    *("null\0", b"null\0", "x" * 255, "x" * 256, "\N{SNOWMAN}" * 85, "\N{SNOWMAN}" * 86),
    *(None, 1.5, [], object, -1, 10**6, 2**40, bytearray(b"x"), memoryview(b"x")),
    *(Path("path"), Path("missing/path")),
]


@pytest.mark.parametrize("mode", ["wb", "rb", "xb", "r+b", "a+b", "w"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_names(name: Any, mode: str) -> None:
    def prepare() -> None:
        os.mkdir("directory")
        put(b"plain")()

    def do(open: Open) -> object:
        with open(name, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as f:
            return f.name, repr(f.raw.name if "b" in mode else f.buffer.raw.name)

    compare(do, prepare)


def test_an_error_names_the_file_as_given() -> None:
    for name in ("missing/file", b"missing/\xff", Path("missing/path")):
        with pytest.raises(FileNotFoundError) as caught:
            pacedio.open(name, "wb")
        assert caught.value.filename == os.fspath(name)  # type: ignore[type-var,arg-type]


def test_a_path_that_is_bytes() -> None:
    class BytesPath:
        def __fspath__(self) -> bytes:
            return b"p\xff"

    def do(open: Open) -> object:
        with open(BytesPath(), "wb") as f:
            f.write(b"written")
            return f.name

    assert compare(do) == b"p\xff"


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "xb", "r+b", "w"])
def test_permission_denied(mode: str, here: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")

    def prepare() -> None:
        put(b"root's")()
        os.chmod("file", 0o600)
        os.chmod(".", 0o755)

    def do(open: Open) -> object:
        seen = []
        os.seteuid(65534)
        try:
            for name in ("file", "new"):
                seen.append(outcome(lambda o, name=name: o(name, mode).close(), open))  # type: ignore[misc]
        finally:
            os.seteuid(0)
        return seen

    assert (PermissionError, errno.EACCES, os.strerror(errno.EACCES)) in compare(do, prepare)  # type: ignore[operator]


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b", "w+b"])
@pytest.mark.parametrize("closefd", [True, False])
def test_descriptors(mode: str, closefd: bool) -> None:
    def do(open: Open) -> object:
        fd = os.open("file", os.O_RDWR)
        os.lseek(fd, 3, os.SEEK_SET)
        f = open(fd, mode, closefd=closefd)
        seen = [f.name == fd, f.mode, f.tell(), f.write(b"NEW"), f.tell()]
        f.close()
        try:
            os.lseek(fd, 0, os.SEEK_CUR)
        except OSError as error:
            assert closefd
            seen.append(error.errno)
        else:
            os.close(fd)
        return seen

    compare(do, put(b"0123456789"))


def test_a_descriptor_of_another_access() -> None:
    def do(open: Open) -> object:
        fd = os.open("file", os.O_RDONLY)
        f = open(fd, "wb")
        f.write(b"x")
        try:
            f.close()
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    assert compare(do, put(b"older")) == (OSError, errno.EBADF, os.strerror(errno.EBADF))


def test_opener() -> None:
    def opened(path: str, flags: int) -> int:
        return os.open(f"{path}.{flags & os.O_ACCMODE}.{bool(flags & os.O_CREAT)}", flags, 0o600)

    def do(open: Open) -> object:
        with open("file", "wb", opener=opened) as f:
            f.write(b"written")
            return f.name, os.get_inheritable(f.fileno())

    assert compare(do) == ("file", False)


@pytest.mark.parametrize("result", [-1, "x", None], ids=str)
def test_bad_opener(result: object) -> None:
    compare(lambda o: o("file", "wb", opener=lambda path, flags: result))


# ---- binary files ------------------------------------------------------------------------------------------------


def buffers() -> list[Any]:
    mapped = mmap.mmap(-1, 5000)
    mapped[:] = PATTERN[:5000]
    return [
        b"",
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview")[3:],
        memoryview(array.array("Q", range(1000))),
        memoryview(bytes(24)).cast("B", (2, 3, 4)),
        array.array("Q", range(1000)),
        array.array("d", [1.5] * 100_000),
        mapped,
        pickle.PickleBuffer(b"pickled"),
        PATTERN,
        bytearray(PATTERN),
        memoryview(PATTERN)[1:],
    ]


@pytest.mark.parametrize("buffering", [-1, 0, 100])
@pytest.mark.parametrize("number", range(len(buffers())))
def test_contiguous_buffers(number: int, buffering: int) -> None:
    def do(open: Open) -> object:
        with open("file", "wb", buffering) as f:
            return f.write(buffers()[number]), f.write(b"end")

    length = memoryview(buffers()[number]).nbytes
    assert compare(do) == (length, 3)


@pytest.mark.parametrize(
    "data",
    [memoryview(b"0123456789")[::2], memoryview(PATTERN)[::-1], memoryview(array.array("I", range(90)))[::3]],
    ids=["small", "large", "array"],
)
@pytest.mark.parametrize("buffering", [-1, 0])
def test_other_buffers_are_refused_before_a_byte_lands(data: memoryview, buffering: int) -> None:
    with pacedio.open("file", "wb", buffering) as f:
        with pytest.raises(BufferError):
            f.write(data)
        assert f.tell() == 0
        f.flush()
        assert os.path.getsize("file") == 0
        with pytest.raises(BufferError):
            f.writelines([b"first", data])
    assert tree() == {b"file": b"first"}


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("data", ["text", None, 5, 1.5, [b"x"], object()], ids=lambda data: type(data).__name__)
def test_what_is_no_buffer(data: object, buffering: int) -> None:
    def do(open: Open) -> object:
        with open("file", "wb", buffering) as f:
            return f.write(data)

    assert compare(do) is TypeError


def test_bytes_to_text() -> None:
    def do(open: Open) -> object:
        with open("file", "w", encoding="utf-8") as f:
            return f.write(b"bytes")

    compare(do)


CLOSED: list[Callable[[Any], object]] = [
    lambda f: f.write(b"x"),
    lambda f: f.writelines([b"x"]),
    lambda f: f.read(),
    lambda f: f.read(1),
    lambda f: f.read1(),
    lambda f: f.peek(),
    lambda f: f.readinto(bytearray(1)),
    lambda f: f.readinto1(bytearray(1)),
    lambda f: f.readline(),
    lambda f: f.readlines(),
    next,
    list,
    lambda f: f.seek(0),
    lambda f: f.tell(),
    lambda f: f.truncate(),
    lambda f: f.truncate(3),
    lambda f: f.flush(),
    lambda f: f.fileno(),
    lambda f: f.isatty(),
    lambda f: f.readable(),
    lambda f: f.writable(),
    lambda f: f.seekable(),
    lambda f: f.close(),
    lambda f: f.closed,
    lambda f: f.__enter__(),
    lambda f: f.__exit__(None, None, None),
    lambda f: f.name,
    lambda f: f.mode,
]


def called(use: Callable[[Any], object], f: Any) -> object:
    """The result, or the kind of exception: io's C and Python halves word them differently."""
    try:
        return use(f)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("mode", ["wb", "w+b", "r+b", "ab", "w", "w+", "rb"])
def test_closed_files(mode: str) -> None:
    def do(open: Open) -> object:
        f = open("file", mode, **({} if "b" in mode else {"encoding": "utf-8"}))
        f.close()
        return [called(use, f) for use in CLOSED]

    compare(do, put(b"older"))


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_detached_files(mode: str) -> None:
    def do(open: Open) -> object:
        f = open("file", mode, **({} if "b" in mode else {"encoding": "utf-8"}))
        f.write(b"written" if "b" in mode else "written")
        below = f.detach()
        seen = [isinstance(below, io.RawIOBase), below.closed, tree()]
        for use in CLOSED:
            called(use, f)  # whatever it says, the file below stays as it is
        seen.append(below.closed)
        below.close()
        return seen

    compare(do)
    f = pacedio.open("other", "wb")
    raw = f.detach()
    for use in (lambda: f.write(b"x"), f.flush, f.tell, f.fileno, f.detach, lambda: f.seek(0)):
        with pytest.raises(ValueError, match="detached"):
            use()
    assert raw.write(b"raw") == 3
    raw.close()
    assert tree()[b"other"] == b"raw"


UNSUPPORTED = CLOSED[2:12]


def test_a_writer_cannot_read() -> None:
    def do(open: Open) -> object:
        with open("file", "wb") as f:
            return [called(use, f) for use in UNSUPPORTED]

    assert io.UnsupportedOperation in compare(do)  # type: ignore[operator]


def test_what_cannot_seek() -> None:
    def do(open: Open) -> object:
        reading, writing = os.pipe()
        with open(writing, "wb") as f, builtins.open(reading, "rb") as r:
            uses: list[Callable[[Any], object]] = [
                *(lambda f: f.seekable(), lambda f: f.seek(1), lambda f: f.tell(), lambda f: f.truncate(1)),
                lambda f: f.write(b"written"),
            ]
            seen = [called(use, f) for use in uses]
            f.close()
            return seen, r.read()

    _, data = compare(do)  # type: ignore[misc]
    assert data == b"written"


def test_a_pipe_that_nobody_reads() -> None:
    def do(open: Open) -> object:
        reading, writing = os.pipe()
        os.close(reading)
        f = open(writing, "wb")
        f.write(b"written")
        try:
            f.flush()
        finally:
            with contextlib.suppress(OSError):
                f.close()

    assert compare(do) == (BrokenPipeError, errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_pipe_that_is_full_and_does_not_block() -> None:
    def do(open: Open) -> object:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with open(writing, "wb", 1000) as f, builtins.open(reading, "rb", 0) as r:
            with pytest.raises(BlockingIOError) as caught:
                f.writelines([bytes(90_000)] * 100)
            seen = [caught.value.characters_written, len(r.read(1 << 20))]
            f.close()
            return [*seen, r.read()]

    compare(do)


def test_a_terminal() -> None:
    def do(open: Open) -> object:
        master, slave = pty.openpty()
        try:
            with open(slave, "w", encoding="utf-8") as f:
                f.write("line\n")
                seen = os.read(master, 100)  # was line-buffered
                return f.isatty(), f.line_buffering, seen
        finally:
            os.close(master)

    compare(do)


def test_dev_null_and_dev_full() -> None:
    with pacedio.open("/dev/null", "wb") as f:
        f.write(PATTERN * 8)
    assert f.stats.engine == "none"
    assert f.stats.bytes == 8 * MIB
    f = pacedio.open("/dev/full", "wb")
    f.write(b"x")
    with pytest.raises(OSError, match="No space left") as caught:
        f.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
    assert f.closed


@pytest.mark.parametrize("mode", ["wb", "ab", "xb", "w+b", "a+b", "r+b"])
@pytest.mark.parametrize("buffering", [-1, 0, 64])
def test_seek_and_truncate(mode: str, buffering: int) -> None:
    def do(open: Open) -> object:
        with open("file", mode, buffering) as f:
            return [
                *(f.tell(), f.write(b"0123456789"), f.tell(), f.seek(2), f.write(b"AB"), f.seek(0, 2), f.tell()),
                *(f.seek(-3, 2), f.write(b"C"), f.seek(2, 1), f.truncate(), f.seek(1), f.truncate(8), f.tell()),
                *(f.seek(20), f.write(b"after a hole"), f.truncate(25), f.tell(), f.seek(0, os.SEEK_CUR)),
                *(called(lambda f: f.seek(-1), f), called(lambda f: f.seek("x"), f)),
                *(called(lambda f: f.truncate(-1), f), called(lambda f: f.truncate("x"), f)),
                *(called(lambda f: f.truncate(2**70), f), f.tell()),
                *([called(lambda f: f.seek(0, 9), f), called(lambda f: f.seek(2**70), f)] if buffering else []),
                called(lambda f: f.seek(0, os.SEEK_DATA), f),
            ]

    compare(do, (lambda: None) if "x" in mode else put(b"what was there before"))


class Chunks(list[Any]):
    """An iterable that says how far it was read when it raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise KeyError("end")


def test_writelines() -> None:
    def do(open: Open) -> object:
        with open("file", "wb") as f:
            seen = [f.writelines([b"a", bytearray(b"b"), memoryview(b"c")]), f.writelines(iter([])), f.writelines(())]
            with pytest.raises(KeyError):
                f.writelines(Chunks([b"d", b"e"]))
            for bad in ("text", 5, None, [1], ["text"]):
                seen.append(called(lambda f, bad=bad: f.writelines(bad), f))  # type: ignore[misc]
            return seen

    compare(do)
    with pacedio.open("file", "wb") as f:
        f.writelines([PATTERN] * 3)
    assert tree() == {b"file": PATTERN * 3}


# ---- reading and writing in turn ---------------------------------------------------------------------------------

OFFSETS = st.integers(0, 300)
DATA = st.binary(max_size=200) | st.integers(0, 255).map(lambda b: bytes([b]) * 1000)
OPERATIONS = st.lists(
    st.tuples(st.just("write"), DATA)
    | st.tuples(st.just("seek"), OFFSETS)
    | st.tuples(st.just("seek"), st.integers(-50, 50), st.sampled_from([1, 2]))
    | st.tuples(st.sampled_from(["read", "readline", "readlines", "read1"]), st.integers(-1, 300))
    | st.tuples(st.just("readinto"), st.integers(0, 300).map(bytearray))
    | st.tuples(st.just("truncate"), st.none() | OFFSETS)
    | st.tuples(st.sampled_from(["tell", "flush", "truncate", "read", "readline", "peek"])),
    max_size=30,
)


def perform(f: Any, operations: list[Any]) -> list[object]:
    seen: list[object] = []
    for name, *arguments in operations:
        use = getattr(f, name)
        copies = [bytearray(a) if isinstance(a, bytearray) else a for a in arguments]
        try:
            seen.append((name, use(*copies), copies))
        except (OSError, ValueError) as error:
            seen.append((name, type(error), getattr(error, "errno", None)))
    return seen


@pytest.mark.parametrize("mode", ["w+b", "r+b", "a+b", "wb", "ab"])
@pytest.mark.parametrize("buffering", [-1, 16])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_sequence_of_calls(mode: str, buffering: int, operations: list[Any]) -> None:
    if "+" not in mode:
        operations = [op for op in operations if op[0] in ("write", "seek", "truncate", "tell", "flush")]
    results = []
    # The same buffer below, so that even peek and read1 return the same.
    for open, size in ((builtins.open, 128 * KIB), (functools.partial(quick, pacing=SMALL), -1)):
        put(PATTERN[:500])()
        with open("file", mode, size if buffering == -1 else buffering) as f:
            seen = perform(f, operations)
        results.append((seen, tree()))
    assert results[0] == results[1]


TEXT_OPERATIONS = st.lists(
    st.tuples(st.just("write"), st.text(st.sampled_from("ab\r\n\x85\N{SNOWMAN}\N{PILE OF POO}"), max_size=50))
    | st.tuples(st.just("seek"), st.just(0), st.sampled_from([0, 2]))
    | st.tuples(st.just("read"), st.integers(-1, 50))
    | st.tuples(st.sampled_from(["tell", "flush", "read", "readline", "readlines", "truncate"])),
    max_size=20,
)


@pytest.mark.parametrize("mode", ["w+", "a+", "w", "a", "r+"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=TEXT_OPERATIONS, newline=st.sampled_from([None, "", "\n", "\r", "\r\n"]))
def test_any_sequence_of_calls_to_text(mode: str, encoding: str, operations: list[Any], newline: str | None) -> None:
    if "+" not in mode:
        operations = [op for op in operations if not op[0].startswith("read")]
    results = []
    for open in (builtins.open, quick):
        put("\N{DIGIT ONE}\r\n2\n3\r".encode(encoding))()
        errors = "replace"
        with open("file", mode, 512, encoding=encoding, errors=errors, newline=newline) as f:
            seen = [f.encoding, f.errors, f.mode, f.newlines, f.line_buffering, *perform(f, operations)]
        results.append((seen, tree()))
    assert results[0] == results[1]


def test_iteration() -> None:
    def do(open: Open) -> object:
        with open("file", "r+b") as f:
            seen: list[object] = [next(f), f.readline()]
            f.write(b"four\n")
            seen += [list(f), list(f)]
            f.seek(0)
            return [*seen, *f]

    compare(do, put(b"1\n2\n3..\n4...\n5\n"))


def test_large_writes_in_windows() -> None:
    data = PATTERN * 5 + b"tail"
    for buffering in (-1, 0):
        with pacedio.open("file", "wb", buffering, pacing=SMALL) as f:
            assert f.write(data) == len(data)
            assert f.write(memoryview(data)) == len(data)
            assert f.tell() == 2 * len(data)
        assert Path("file").read_bytes() == data * 2


# ---- text --------------------------------------------------------------------------------------------------------


def test_text_attributes() -> None:
    with pacedio.open("file", "w", encoding="ascii", errors="backslashreplace", newline="\r\n") as f:
        assert isinstance(f, io.TextIOWrapper)
        assert isinstance(f.buffer, pacedio.PacedWriter)
        assert (f.encoding, f.errors, f.mode, f.name) == ("ascii", "backslashreplace", "w", "file")
        f.write("\N{SNOWMAN}\n")
        assert f.stats.bytes == 0
        f.sync()
        assert f.stats.bytes == 8
    assert tree() == {b"file": b"\\u2603\r\n"}


def test_text_that_cannot_be_encoded() -> None:
    def do(open: Open) -> object:
        with open("file", "w", encoding="ascii") as f:
            f.write("good")
            seen = called(lambda f: f.write("\N{SNOWMAN}"), f)
            f.write("good")
            return seen

    assert compare(do) is UnicodeEncodeError


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_one_byte_order_mark(encoding: str) -> None:
    def do(open: Open) -> object:
        for mode in ("w", "a", "a", "r+"):
            with open("file", mode, encoding=encoding) as f:
                f.seek(0, 2)
                f.write(mode)
        with builtins.open("file", encoding=encoding) as f:
            return f.read()

    assert compare(do) == "waar+"


def test_line_buffered_text() -> None:
    with pacedio.open("file", "w", 1, encoding="utf-8") as f:
        f.write("half ")
        assert tree() == {b"file": b""}
        f.write("line\nrest")
        assert tree() == {b"file": b"half line\nrest"}


def test_reconfigure() -> None:
    def do(open: Open) -> object:
        with open("file", "w", encoding="utf-8") as f:
            f.write("a\n")
            f.reconfigure(encoding="utf-16-le", newline="\r\n", write_through=True)
            f.write("b\n")
            return tree()

    compare(do)


def test_text_over_a_closed_binary_file() -> None:
    def do(open: Open) -> object:
        f = open("file", "w", encoding="utf-8")
        f.buffer.close()
        return f.closed, called(lambda f: f.write("x"), f), called(lambda f: f.close(), f), f.closed

    compare(do)


def test_encoding_warning_names_the_caller() -> None:
    script = "import pacedio\npacedio.open('file', 'w', sync=False).close()\nopen('file', 'w').close()\n"
    Path("script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "script.py"], stderr=subprocess.PIPE, text=True, check=True
    )
    warned = [line for line in done.stderr.splitlines() if "EncodingWarning" in line]
    assert [line.split(":")[1] for line in warned] == ["2", "3"]
    assert all("script.py" in line for line in warned)


# ---- what is left when nobody closes -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wb", "w+b", "w", "ab", "rb"])
def test_garbage_warns_writes_and_closes(mode: str) -> None:
    def do(open: Open) -> object:
        f = open("file", mode, **({} if "b" in mode else {"encoding": "utf-8"}))
        fd = f.fileno()
        if f.writable():
            f.write(b"written" if "b" in mode else "written")
        gone = weakref.ref(f)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del f
            gc.collect()
        assert {w.category for w in caught} == {ResourceWarning}
        caught.clear()  # a warning of io's holds the file
        assert gone() is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    compare(do, put(b"older"))


def test_garbage_in_a_cycle() -> None:
    for mode in ("wb", "w"):
        f: Any = pacedio.open("file", mode, **({} if "b" in mode else {"encoding": "utf-8"}))
        f.write(b"written" if "b" in mode else "written")
        fd = f.fileno()
        (f if "b" in mode else f.buffer).itself = f
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            f = None
            gc.collect()  # whether the bytes arrive depends, as with the builtin, on what is collected first
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_method_outlives_its_file() -> None:
    write = pacedio.open("file", "wb").write
    gc.collect()
    write(b"written")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del write
        gc.collect()
    assert {w.category for w in caught} == {ResourceWarning}
    assert tree() == {b"file": b"written"}


def test_many_files_leave_nothing() -> None:
    def round_trip(number: int) -> None:
        with pacedio.open("file", "wb", sync=False, atomic=number % 8 == 0) as f:
            f.write(b"x")
        with pacedio.open("file", "r+", encoding="utf-8", sync=False) as f:
            f.write("y")
        with builtins.open("file", "ab") as outer, pacedio.wrap(outer, sync=False) as f:
            f.write(b"z")
        with contextlib.suppress(FileExistsError):
            pacedio.open("file", "xb")

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    for number in range(500):
        round_trip(number)
    before, opened = resident(), descriptors()
    for number in range(2500):  # 10,000 files
        round_trip(number)
    assert descriptors() == opened
    # One pio_writer left by every tenth file would already be 3 MiB.
    assert resident() - before < 2 * MIB


def test_constructors_that_fail_leave_nothing() -> None:
    put(b"older")()
    before = len(descriptors())
    for atomic in (False, True):
        with pytest.raises(LookupError):
            pacedio.open("file", "w", encoding="no such encoding", atomic=atomic)
        if sys.maxsize > 2**32:
            with pytest.raises((MemoryError, OverflowError)):
                pacedio.open("new", "wb", 2**62, atomic=atomic)
    gc.collect()
    assert len(descriptors()) == before
    assert set(tree()) == {b"file"}


# ---- attributes --------------------------------------------------------------------------------------------------


def test_kinds() -> None:
    with pacedio.open("file", "wb") as f:
        assert type(f) is pacedio.PacedWriter
        assert isinstance(f, io.BufferedIOBase)
        # numpy.save and others take these as leave to go around write() through the descriptor.
        assert not isinstance(f, (io.FileIO, io.BufferedWriter, io.BufferedRandom))
        assert isinstance(f.raw, io.FileIO)
        assert f.raw.fileno() == f.fileno()
        assert repr(f) == "<pacedio.writer.PacedWriter name='file'>"
    with pacedio.open("file", "r+b") as f:
        assert type(f) is pacedio.PacedRandom
        assert isinstance(f, pacedio.PacedWriter)
    with pacedio.open("file", "w", encoding="utf-8") as f:
        assert type(f) is pacedio.PacedTextWriter
        assert repr(f).endswith("name='file' mode='w' encoding='utf-8'>")


def test_pickle_and_copy_refuse() -> None:
    import copy

    for mode in ("wb", "w+b"):
        with pacedio.open("file", mode) as f:
            for use in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot pickle"):
                    use(f)


def test_a_subclass_may_override_write() -> None:
    class Counting(pacedio.PacedWriter):
        seen = 0

        def write(self, data: Any, /) -> int:
            self.seen += 1
            return super().write(data)

    with pacedio.open("file", "wb") as f:
        raw = f.detach()
    counting = Counting(raw, pacedio.BALANCED)
    counting.write(b"one")
    counting.writelines([b"two", b"three"])
    counting.close()
    assert counting.seen == 3
    assert tree() == {b"file": b"onetwothree"}


def test_close_twice_and_with_after_close() -> None:
    f = pacedio.open("file", "wb")
    with f:
        f.close()
        f.close()
    assert f.closed
    with pytest.raises(ValueError, match="closed"), f:
        pass


def test_the_unbuffered_file_may_be_closed_first() -> None:
    def do(open: Open) -> object:
        f = open("file", "wb")
        f.write(b"lost")
        f.raw.close()
        return called(lambda f: f.write(b"x"), f), called(lambda f: f.close(), f), f.closed

    compare(do)


def test_the_unbuffered_file_after_close() -> None:
    def do(open: Open) -> object:
        f = open("file", "wb")
        f.write(b"written")
        f.close()
        return [
            called(use, f.raw)
            for use in (lambda r: r.write(b"x"), lambda r: r.truncate(0), lambda r: r.fileno(), lambda r: r.tell())
        ]

    compare(do)


def test_unbuffered_bytes_arrive_at_once() -> None:
    with pacedio.open("file", "wb", 0) as f:
        f.write(b"at once")
        assert tree() == {b"file": b"at once"}
        f.write(PATTERN)
        assert tree() == {b"file": b"at once" + PATTERN}


# ---- wrap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wb", "r+b", "ab", "w+b", "xb"])
@pytest.mark.parametrize("buffering", [-1, 0])
def test_wrap(mode: str, buffering: int) -> None:
    if "x" not in mode:
        put(b"what was there before")()
    with builtins.open("file", mode, buffering) as plain:
        plain.write(b"first ")
        at = plain.tell()
        with pacedio.wrap(plain) as f:
            assert isinstance(f, pacedio.PacedRandom if "+" in mode else pacedio.PacedWriter)
            assert (f.name, f.fileno(), f.tell()) == ("file", plain.fileno(), at)
            f.write(b"second ")
        assert f.closed
        assert not plain.closed
        assert f.stats.bytes == 7
        assert plain.tell() == at + 7
        plain.write(b"third")
    before = {"wb": b"", "w+b": b"", "xb": b"", "r+b": b"", "ab": b"what was there before"}[mode]
    after = b"e" if mode == "r+b" else b""
    expected = before + b"first second third"
    if mode == "r+b":
        expected += b"what was there before"[len(expected) :]
    assert tree() == {b"file": expected}
    assert after in expected


def test_wrap_after_reading() -> None:
    put(b"0123456789")()
    with builtins.open("file", "r+b") as plain:
        assert plain.read(2) == b"01"  # and reads ahead
        with pacedio.wrap(plain) as f:
            assert f.tell() == 2
            assert f.read(1) == b"2"
            f.write(b"X")
        assert plain.tell() == 4
        assert plain.read() == b"456789"
    assert tree() == {b"file": b"012X456789"}


def test_wrap_temporary_files() -> None:
    with tempfile.NamedTemporaryFile(dir=".") as named, pacedio.wrap(named) as f:
        f.write(b"written")
        f.flush()
        assert Path(named.name).read_bytes() == b"written"
        assert f.name == named.name
    with tempfile.TemporaryFile(dir=".") as unnamed:
        with pacedio.wrap(unnamed) as f:
            f.write(PATTERN)
        unnamed.seek(0)
        assert unnamed.read() == PATTERN
    assert tree() == {}


def test_wrap_keeps_the_file_open() -> None:
    f = pacedio.wrap(builtins.open("file", "wb"))  # noqa: SIM115
    gc.collect()
    f.write(b"written")
    f.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del f
        gc.collect()
    assert {w.category for w in caught} == {ResourceWarning}  # of the caller's file, which was left open
    assert tree() == {b"file": b"written"}


def test_wrap_a_pipe() -> None:
    script = "import sys, pacedio\nwith pacedio.wrap(sys.stdout.buffer) as f: f.write(bytes(300000))\nprint('end')"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert done.stdout == bytes(300_000) + b"end\n"


def test_wrap_a_paced_file() -> None:
    with pacedio.open("file", "wb") as outer:
        outer.write(b"first ")
        with pacedio.wrap(outer, SMALL) as f:
            f.write(b"second ")
        outer.write(b"third")
    assert tree() == {b"file": b"first second third"}


def test_wrap_does_not_close_a_file_that_fails() -> None:
    with builtins.open("/dev/full", "wb", buffering=0) as plain:
        f = pacedio.wrap(plain)
        f.write(b"x")
        with pytest.raises(OSError, match="No space left"):
            f.close()
        assert f.closed
        assert not plain.closed


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_wrap_refuses_what_changes_the_bytes(module: Any) -> None:
    """To write past it through its descriptor would leave a file that nobody can read."""
    with module.open("packed", "wb") as packed:
        packed.write(b"inside")
        with pytest.raises(TypeError, match=r"gzip\.open\(pacedio\.open\(path, 'wb'\)\)"):
            pacedio.wrap(packed)
    with module.open("packed", "rb") as packed:
        assert packed.read() == b"inside"


def test_wrap_refuses() -> None:
    put(b"older")()
    with builtins.open("file", "rb") as plain, pytest.raises(ValueError, match="not open for writing: 'file'"):
        pacedio.wrap(plain)
    with builtins.open("file", "r+", encoding="utf-8") as text, pytest.raises(TypeError, match=r"wrap its \.buffer"):
        pacedio.wrap(text)  # type: ignore[arg-type]
    with builtins.open("file", "ab") as plain:
        pass
    with pytest.raises(ValueError, match="closed"):
        pacedio.wrap(plain)
    for other in (io.BytesIO(), "file", 1):
        with pytest.raises(TypeError, match=f"not {type(other).__name__};"):
            pacedio.wrap(other)  # type: ignore[arg-type]
    with builtins.open("file", "ab") as plain, pytest.raises(TypeError, match="pacing must be a Pacing, not int"):
        pacedio.wrap(plain, 5)  # type: ignore[arg-type]
    assert tree() == {b"file": b"older"}


# ---- in use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zipfile(kind: int) -> None:
    with pacedio.open("file.zip", "wb", pacing=SMALL) as f, zipfile.ZipFile(f, "w", kind) as z:
        z.writestr("one", PATTERN)
        with z.open("two", "w") as member:
            shutil.copyfileobj(io.BytesIO(PATTERN), member)
    with pacedio.open("file.zip", "r+b") as f, zipfile.ZipFile(f, "a") as z:
        z.writestr("three", b"3")
    with zipfile.ZipFile("file.zip") as z:
        assert z.testzip() is None
        assert [z.read(name) for name in z.namelist()] == [PATTERN, PATTERN, b"3"]
        assert all(not info.flag_bits & 8 for info in z.infolist())  # headers were patched, not streamed


def add(t: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    t.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w|"])
def test_tarfile(mode: str) -> None:
    with pacedio.open("file.tar", "wb") as f, tarfile.open(fileobj=f, mode=mode) as t:  # type: ignore[call-overload]
        add(t, "one", PATTERN)
    if mode == "w":
        with pacedio.open("file.tar", "r+b") as f, tarfile.open(fileobj=f, mode="a") as t:
            add(t, "two", b"2")
    with tarfile.open("file.tar") as t:
        assert [t.extractfile(m).read() for m in t] == [PATTERN, b"2"][: 2 if mode == "w" else 1]  # type: ignore[union-attr]


def test_gzip() -> None:
    with pacedio.open("file.gz", "wb") as f, gzip.GzipFile(fileobj=f, mode="wb") as g:
        g.write(PATTERN)
        assert g.name == "file.gz"
    with gzip.open("file.gz") as g:
        assert g.read() == PATTERN


def test_other_producers() -> None:
    with pacedio.open("pickle", "wb") as f:
        pickle.dump([PATTERN, bytearray(PATTERN), {"a": 1}], f, protocol=5)
    with builtins.open("pickle", "rb") as f:
        assert pickle.load(f)[0] == PATTERN
    with pacedio.open("json", "w", encoding="utf-8") as f:
        json.dump({"\N{SNOWMAN}": [1, 2]}, f, ensure_ascii=False)
    assert json.loads(Path("json").read_text("utf-8")) == {"\N{SNOWMAN}": [1, 2]}
    with pacedio.open("csv", "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([["a", "b\nc"], [1, 2]])
        print("printed", file=f)
    assert Path("csv").read_bytes() == b'a,"b\nc"\r\n1,2\r\nprinted\n'
    with pacedio.open("copy", "wb") as f, builtins.open("pickle", "rb") as source:
        shutil.copyfileobj(source, f)
    assert Path("copy").read_bytes() == Path("pickle").read_bytes()
    with pacedio.open("array", "wb") as f:
        array.array("Q", range(100_000)).tofile(f)
    assert Path("array").read_bytes() == array.array("Q", range(100_000)).tobytes()
    with pacedio.open("child", "wb") as f:
        subprocess.run(["echo", "from a child"], stdout=f, check=True)
    assert Path("child").read_bytes() == b"from a child\n"
    with pacedio.open("stream", "w", encoding="utf-8") as f, contextlib.redirect_stdout(f):
        print("redirected")
    assert Path("stream").read_bytes() == b"redirected\n"


def test_a_child_that_shares_the_descriptor_is_followed() -> None:
    """Another process moved the position, and the file grew: nothing that it wrote is overwritten."""
    with pacedio.open("file", "ab", pacing=SMALL) as f:
        f.write(bytes(10_000))
        f.flush()
        subprocess.run(["printf", "child"], stdout=f, check=True)
        f.write(b"parent")
    assert tree() == {b"file": bytes(10_000) + b"childparent"}
