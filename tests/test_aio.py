"""pacedio.aio on asyncio and trio: order, cancellation, errors, and an event loop that never waits for a disk.

Where a call is to be under way for as long as the test likes, it writes to a pipe that is full, or opens a FIFO that
nobody reads.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import io
import os
import random
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from machine import Machine, descriptors

import pacedio
from pacedio import Pacing, aio, copying

KIB = 1024
MIB = 1024 * KIB

pytestmark = pytest.mark.anyio
only_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) <= before + 3  # what an event loop keeps is closed with it, after this


class Pipe:
    """Holds up who writes more than 64 KiB to it, until `drain` begins to read it, and then all of it."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.received = b""
        self._thread = threading.Thread(target=self._read)

    def drain(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        with open(self.reading, "rb") as f:
            self.received = f.read()

    def end(self) -> bytes:
        """What came up to the end, which comes when the descriptor for writing is closed."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.received


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.001)


async def write_64_mib(f: aio.AsyncFile[bytes]) -> None:
    for _ in range(64):
        await f.write(bytes(MIB))


def is_held_up(pipe: Pipe) -> bool:
    """Whether the pipe is full."""
    return not select.select([], [pipe.writing], [], 0)[1]


# ---- the interface ----


async def test_it_has_all_that_anyios_file_has(tmp_path: Path) -> None:
    async with await anyio.open_file(tmp_path / "file", "wb") as theirs:
        names = {name for name in dir(theirs) if not name.startswith("_")}
    assert names <= set(dir(aio.AsyncFile))
    for name in names:
        method = getattr(anyio.AsyncFile, name)
        if inspect.iscoroutinefunction(method):
            ours = getattr(aio.AsyncFile, name)
            assert inspect.iscoroutinefunction(ours)
            assert list(inspect.signature(ours).parameters)[: len(inspect.signature(method).parameters)] == list(
                inspect.signature(method).parameters
            )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(aio.open_file, pacedio.open), (aio.copyfile, copying.copyfile), (aio.copytree, copying.copytree)],
)
def test_the_arguments_are_those_of_the_functions_that_block(ours: Any, theirs: Any) -> None:
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert arguments(ours) == [*arguments(theirs), ("limiter", inspect.Parameter.KEYWORD_ONLY, None)]


async def test_binary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with await aio.open_file(path, "w+b", pacing=Pacing(limit="2MiB")) as f:
        assert await f.write(b"0123456789" * 100_000) == 1_000_000
        await f.writelines([b"a\n", b"b\n"])
        await f.flush()
        assert f.stats.bytes == 1_000_004
        await f.sync()
        assert f.stats.sync_seconds > 0
        assert await f.tell() == 1_000_004
        assert await f.seek(-4, os.SEEK_END) == 1_000_000
        assert await f.read(2) == b"a\n"
        assert (await f.peek(1))[:1] == b"b"
        buffer = bytearray(1)
        assert await f.readinto(buffer) == 1
        assert buffer == b"b"
        assert await f.truncate(10) == 10
        assert f.name == str(path)
        assert f.wrapped.fileno() == f.fileno()
    assert f.closed
    assert f.stats.error is None
    assert f.stats.limit == 2 * MIB
    assert path.read_bytes() == b"0123456789"


async def test_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with await aio.open_file(path, "w", encoding="utf-8", atomic=True) as f:
        assert await f.write("ä\nb\n") == 4
        await f.sync()
        assert f.stats.bytes == 5
        assert not path.exists()
    async with await aio.open_file(path, encoding="utf-8") as g:
        assert [line async for line in g] == ["ä\n", "b\n"]
        await g.seek(0)
        assert await g.readlines() == ["ä\n", "b\n"]
        with pytest.raises(AttributeError, match="stats"):
            _ = g.stats
        with pytest.raises(AttributeError, match="sync"):
            await g.sync()


async def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\nbc\nd")
    async with await aio.open_file(path, "rb") as f:
        assert await f.read1(1) == b"a"
        assert await f.readline() == b"\n"
        assert [line async for line in f] == [b"bc\n", b"d"]
        buffer = bytearray(4)
        await f.seek(0)
        assert await f.readinto1(buffer) == 4
        with pytest.raises(io.UnsupportedOperation):
            await f.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        await f.read()


async def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        await aio.open_file(tmp_path / "none" / "file", "wb")
    assert error.value.filename == str(tmp_path / "none" / "file")
    with pytest.raises(TypeError, match=r"limiter must be an anyio\.CapacityLimiter or None, not int"):
        await aio.open_file(tmp_path / "file", "wb", limiter=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="limiter"):
        await aio.copyfile(tmp_path / "file", tmp_path / "copy", limiter=3)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
    async with await aio.open_file(tmp_path / "file", "w") as f:
        with pytest.raises(AttributeError, match=r"would block the event loop: await aclose\(\)"):
            f.close()
        for name in ("detach", "reconfigure"):
            with pytest.raises(AttributeError, match=f"call wrapped.{name} in a thread"):
                getattr(f, name)
        with pytest.raises(TypeError):
            await f.write(b"x")  # type: ignore[misc]


async def test_wrapping(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as plain:
        plain.write(b"before")
        async with aio.wrap_file(plain) as f:
            await f.write(b"x" * MIB)
        assert not plain.closed
        assert f.stats.bytes == MIB
        assert plain.tell() == MIB + 6
    async with aio.wrap_file(pacedio.open(path, "ab")) as g:
        await g.write(b"y")
    async with aio.wrap_file(open(path, "rb")) as h:
        assert (await h.read())[-2:] == b"xy"
    async with aio.wrap_file(pacedio.open(path, encoding="ascii")) as i:
        assert (await i.read()).startswith("beforex")
    with open(path, "w", encoding="utf-8") as text, pytest.raises(TypeError, match="binary"):
        aio.wrap_file(text)
    with pytest.raises(TypeError, match="not str"):
        aio.wrap_file(str(path))  # type: ignore[arg-type]
    with pacedio.open(path, "wb") as paced, pytest.raises(ValueError, match=r"pacing is to be given to pacedio\.open"):
        aio.wrap_file(paced, pacing=pacedio.POLITE)


async def test_copies(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below" / "file").write_bytes(os.urandom(3 * MIB))
    (source / "link").symlink_to("below/file")
    os.utime(source / "below" / "file", ns=(1, 2))
    target = tmp_path / "target"
    assert await aio.copytree(source, target, True) == target
    assert (target / "below" / "file").read_bytes() == (source / "below" / "file").read_bytes()
    assert (target / "below" / "file").stat().st_mtime_ns == 2
    assert os.readlink(target / "link") == "below/file"
    assert await aio.copyfile(source / "below" / "file", tmp_path / "one") == tmp_path / "one"
    assert (tmp_path / "one").read_bytes() == (source / "below" / "file").read_bytes()

    await aio.copytree(source, tmp_path / "plain", copy_function=copying.copyfile)
    assert (tmp_path / "plain" / "below" / "file").stat().st_mtime_ns > 2
    copied: list[tuple[str, str]] = []
    await aio.copytree(source, tmp_path / "own", copy_function=lambda *paths: copied.append(paths))
    assert sorted(os.path.basename(source) for source, _ in copied) == ["file", "link"]

    with pytest.raises(copying.SameFileError):
        await aio.copyfile(tmp_path / "one", tmp_path / "one")
    with pytest.raises(FileExistsError):
        await aio.copytree(source, target)


# ---- order and threads ----


async def test_calls_on_one_file_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with await aio.open_file(path, "wb", 0) as f, anyio.create_task_group() as tasks:
        for number in range(500):
            tasks.start_soon(f.write, b"%04d\n" % number)
            await anyio.lowlevel.checkpoint()
    assert path.read_bytes() == b"".join(b"%04d\n" % number for number in range(500))


async def test_a_thousand_files_need_no_thousand_threads(tmp_path: Path) -> None:
    most = 0

    async def write(f: aio.AsyncFile[bytes]) -> None:
        nonlocal most
        await f.write(b"x" * 1000)
        most = max(most, threading.active_count())
        await f.aclose()

    before = threading.active_count()
    files = [await aio.open_file(tmp_path / str(i), "wb", sync=False) for i in range(1000)]
    assert threading.active_count() - before <= 8
    async with anyio.create_task_group() as tasks:
        for f in files:
            tasks.start_soon(write, f)
    assert most - before <= 40
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 1_000_000


async def test_a_limiter_limits(tmp_path: Path) -> None:
    limiter = anyio.CapacityLimiter(1)
    async with await aio.open_file(tmp_path / "file", "wb", limiter=limiter) as f:
        assert f.limiter is limiter
        limiter.acquire_on_behalf_of_nowait(limiter)
        with anyio.move_on_after(0.05) as scope:
            await f.write(b"x")
        limiter.release_on_behalf_of(limiter)
        assert scope.cancelled_caught  # it never got a thread, so nothing was written
        await f.write(b"y")
    assert (tmp_path / "file").read_bytes() == b"y"
    assert limiter.borrowed_tokens == 0


async def test_stats_do_not_wait_for_the_call_under_way() -> None:
    pipe = Pipe()
    async with await aio.open_file(pipe.writing, "wb", 0) as f, anyio.create_task_group() as tasks:
        await f.write(b"x")
        tasks.start_soon(f.write, bytes(MIB))
        await until(lambda: is_held_up(pipe))
        late = threading.Timer(5, pipe.drain)
        late.start()
        assert f.stats.bytes == 1
        assert late.is_alive()
        late.cancel()
        pipe.drain()
    assert pipe.end() == b"x" + bytes(MIB)
    assert f.stats.bytes == MIB + 1


class Seen:
    """Whatever of ours or of io's runs in this thread, as the interpreter tells."""

    _ours = os.path.dirname(pacedio.__file__)
    _calls = frozenset({"open", "close", "read", "write", "fsync", "fdatasync", "ftruncate", "link", "rename", "lseek"})

    def __init__(self) -> None:
        self.calls: set[str] = set()

    def __enter__(self) -> set[str]:
        sys.setprofile(self._tell)
        return self.calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _tell(self, frame: Any, event: str, what: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(self._ours) and code.co_filename != aio.__file__:
                self.calls.add(code.co_name)
        elif event == "c_call":
            name, owner = what.__name__, getattr(what, "__self__", None)
            if isinstance(owner, io.IOBase) or name.startswith("pio_") or (owner is posix and name in self._calls):
                self.calls.add(name)


posix: Any = sys.modules["posix"]


async def test_nothing_of_a_file_runs_in_the_event_loops_thread(tmp_path: Path) -> None:
    with Seen() as blocking, pacedio.open(tmp_path / "file", "wb") as g:
        g.write(bytes(MIB))
    assert {"open", "write", "pio_write", "pio_sync", "close"} <= blocking  # which would be seen

    with Seen() as seen:
        for atomic in (False, True):
            async with await aio.open_file(tmp_path / "file", "w+b", atomic=atomic) as f:
                for _ in range(4):
                    await f.write(bytes(MIB))
                await f.writelines([b"x\n"])
                await f.flush()
                await f.sync()
                await f.seek(0)
                await f.read(10)
                await f.peek()
                await f.tell()
                await f.truncate(3 * MIB)
                assert f.stats.bytes == 4 * MIB + 2
        async with await aio.open_file(tmp_path / "file", "rb") as r:
            assert len([line async for line in r]) == 1
        async with await aio.open_file(tmp_path / "text", "w") as t:
            await t.write("x")
        await (await aio.open_file(tmp_path / "text", "w")).discard()
        await aio.copyfile(tmp_path / "file", tmp_path / "copy")
        (tmp_path / "tree").mkdir()
        await aio.copytree(tmp_path / "tree", tmp_path / "trees")
    # A new file's statistics are those of no call yet.
    assert seen <= {"mkdir", "stats", "raw_stats", "__init__", "__setattr__", "<genexpr>"}


async def test_the_event_loop_goes_on_while_a_slow_disk_is_written(machine: Machine) -> None:
    """A single gap may be a busy machine's. But what the disk would hold up, it would hold up in every attempt."""

    async def longest_gap(work: Callable[[], Any]) -> float:
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            before = time.monotonic()
            while True:
                await anyio.sleep(0.001)
                longest = max(longest, (now := time.monotonic()) - before)
                before = now

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await work()
            tasks.cancel_scope.cancel()
        return longest

    with machine.slow_disk() as slow:

        async def write() -> None:
            async with await aio.open_file(slow.directory / "file", "wb") as f:
                for _ in range(16):
                    await f.write(block)  # 20 ms each
                assert f.stats.stall_seconds > 0.1

        block = bytes(4 * MIB)
        tried = []
        for _ in range(8):
            quiet = await longest_gap(lambda: anyio.sleep(0.3))
            busy = await longest_gap(write)
            if busy < quiet + 0.005:
                break
            tried.append((quiet, busy))
        else:
            pytest.fail(f"longest gaps, without and with writing: {tried}")


# ---- errors ----


async def test_an_error_of_the_disk_is_raised_and_raised_again(machine: Machine) -> None:
    with machine.failing_disk() as failing:
        f = await aio.open_file(failing.directory / "file", "wb")
        with pytest.raises(pacedio.WritebackError) as first:
            await write_64_mib(f)
        assert first.value.filename == str(failing.directory / "file")
        assert f.stats.error is not None
        for call in (f.sync, f.flush, f.aclose):
            with pytest.raises(pacedio.WritebackError, match=os.strerror(first.value.errno or 0)):
                await call()
        assert f.closed
        await f.aclose()


async def test_an_error_of_the_disk_that_only_a_sync_finds(machine: Machine) -> None:
    with machine.failing_disk() as failing:
        f = await aio.open_file(failing.directory / "file", "wb", pacing=Pacing(limit="512MiB", window="256MiB"))
        await write_64_mib(f)
        with pytest.raises(pacedio.WritebackError):
            await f.sync()
        with pytest.raises(pacedio.WritebackError):
            await f.aclose()
        assert f.closed


async def test_a_full_file_system(machine: Machine) -> None:
    with machine.mounted("ext4", 32 * MIB) as full:
        with pytest.raises(OSError, match="No space left") as error:
            async with await aio.open_file(full.directory / "file", "wb") as f:
                await write_64_mib(f)
        assert error.value.errno == errno.ENOSPC
        assert error.value.filename == str(full.directory / "file")
        assert f.closed


async def test_an_exception_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(KeyError):  # noqa: PT012
        async with await aio.open_file(path, "wb", atomic=True) as f:
            await f.write(b"x")
            raise KeyError
    assert f.closed
    assert not path.exists()


async def test_no_error_of_the_close_hides_what_left_the_block(machine: Machine) -> None:
    with machine.failing_disk() as failing:
        with pytest.raises(KeyError):  # noqa: PT012
            async with await aio.open_file(failing.directory / "file", "wb") as f:
                with pytest.raises(pacedio.WritebackError):
                    await write_64_mib(f)
                raise KeyError
        assert f.closed
        with anyio.CancelScope() as scope:
            async with await aio.open_file(failing.directory / "other", "wb") as g:
                with pytest.raises(pacedio.WritebackError):
                    await write_64_mib(g)
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert g.closed
        assert g.stats.error is not None


# ---- cancellation ----


async def test_a_call_that_has_begun_is_completed() -> None:
    pipe, data = Pipe(), os.urandom(MIB)
    written = None
    async with await aio.open_file(pipe.writing, "wb", 0) as f, anyio.create_task_group() as tasks:

        async def write() -> None:
            nonlocal written
            with scope:
                written = await f.write(data)
                await anyio.lowlevel.checkpoint()

        scope = anyio.CancelScope()
        tasks.start_soon(write)
        await until(lambda: is_held_up(pipe))
        scope.cancel()
        await anyio.sleep(0.02)
        assert written is None
        pipe.drain()
    assert written == MIB
    assert scope.cancelled_caught
    assert pipe.end() == data


async def test_a_call_that_has_not_begun_never_will() -> None:
    pipe, data = Pipe(), os.urandom(MIB)
    async with await aio.open_file(pipe.writing, "wb", 0) as f, anyio.create_task_group() as tasks:
        tasks.start_soon(f.write, data)
        await until(lambda: is_held_up(pipe))
        with anyio.move_on_after(0.02) as scope:
            await f.write(b"never")
        assert scope.cancelled_caught
        pipe.drain()
    assert pipe.end() == data


async def test_closing_waits_for_the_call_under_way_whatever_is_cancelled() -> None:
    pipe, data = Pipe(), os.urandom(MIB)
    f = await aio.open_file(pipe.writing, "wb", 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(f.write, data)
        await until(lambda: is_held_up(pipe))
        threading.Timer(0.1, pipe.drain).start()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await f.aclose()
    assert f.closed
    assert pipe.end() == data


async def test_closing_comes_after_what_was_called_before() -> None:
    pipe, data = Pipe(), os.urandom(MIB)
    f = await aio.open_file(pipe.writing, "wb", 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(f.write, data)
        await until(lambda: is_held_up(pipe))
        for call in (partial(f.write, b"after"), f.aclose):
            tasks.start_soon(call)
            await anyio.sleep(0.02)
        pipe.drain()
    assert pipe.end() == data + b"after"


async def test_closing_waits_for_a_thread_whatever_is_cancelled(tmp_path: Path) -> None:
    limiter = anyio.CapacityLimiter(1)
    f = await aio.open_file(tmp_path / "file", "wb", limiter=limiter)
    await f.write(b"x" * MIB)
    limiter.acquire_on_behalf_of_nowait(limiter)
    async with anyio.create_task_group() as tasks:

        async def release() -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            assert not f.closed
            limiter.release_on_behalf_of(limiter)

        tasks.start_soon(release)
        tasks.cancel_scope.cancel()
        await f.aclose()
    assert f.closed
    assert (tmp_path / "file").stat().st_size == MIB
    await f.aclose()


async def test_a_cancelled_atomic_file_is_not_committed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with anyio.CancelScope() as scope:
        async with await aio.open_file(path, "wb", atomic=True) as f:
            await f.write(bytes(MIB))
            scope.cancel()
            await f.write(b"more")
    assert scope.cancelled_caught
    assert f.closed
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


async def test_discarding(tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with await aio.open_file(tmp_path / "file", "wb", atomic=True) as f:
            await f.write(bytes(MIB))
            scope.cancel()
            await f.discard()
            assert f.closed
    assert os.listdir(tmp_path) == []


class Fifo:
    """Whose opening for writing is under way once it `has_begun`, and ends when it is opened for reading."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._began = threading.Event()
        self.has_begun = self._began.is_set

    def open(self, path: str, flags: int) -> int:
        self._began.set()
        return os.open(path, flags)


async def test_a_cancelled_open_leaks_nothing(tmp_path: Path) -> None:
    fifo = Fifo(tmp_path / "fifo")
    f: aio.AsyncFile[bytes] | None = None
    scope = anyio.CancelScope()

    async def write() -> None:
        nonlocal f
        with scope:
            async with await aio.open_file(tmp_path / "fifo", "wb", opener=fifo.open) as f:
                await f.write(b"never")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await until(fifo.has_begun)
        scope.cancel()
        await anyio.sleep(0.01)
        reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert scope.cancelled_caught
    assert f is not None
    assert f.closed
    assert os.read(reading, 1) == b""  # no descriptor for writing is left: it would be BlockingIOError
    os.close(reading)

    limiter = anyio.CapacityLimiter(1)
    limiter.acquire_on_behalf_of_nowait(limiter)
    with anyio.move_on_after(0.02) as scope:
        await aio.open_file(tmp_path / "file", "wb", limiter=limiter)
    assert scope.cancelled_caught
    assert os.listdir(tmp_path) == ["fifo"]


class Writing:
    """A file that is written until it is cancelled, and what is known of it then."""

    def __init__(self, path: Path, choose: random.Random) -> None:
        self.path = path
        self.atomic = choose.random() < 0.3
        self._sync = choose.random() < 0.3
        self._buffering = choose.choice([0, -1])
        self._sizes = [choose.choice([1, 16, 64]) * 8 * KIB for _ in range(choose.choice([20, 1000]))]
        self._file: aio.AsyncFile[bytes] | None = None
        self._written = 0
        self._complete = False

    async def __call__(self) -> None:
        async with await aio.open_file(
            self.path, "wb", self._buffering, sync=self._sync, atomic=self.atomic
        ) as self._file:
            for number, size in enumerate(self._sizes):
                await self._file.write(b"%08d" % number * (size // 8))
                self._written += 1
            self._complete = True

    def check(self) -> None:
        """The file is closed, and holds what was written and perhaps the write that was under way, whole."""
        if self._file is not None:
            assert self._file.closed
        if self.atomic and not self._complete:
            assert not self.path.exists()
        elif self._file is not None:
            content, at, number = self.path.read_bytes(), 0, 0
            while at < len(content):
                size = self._sizes[number]
                assert content[at : at + size] == b"%08d" % number * (size // 8)
                at, number = at + size, number + 1
            assert self._written <= number <= self._written + 1


async def test_cancelling_at_any_moment_leaves_a_prefix(machine: Machine) -> None:
    choose = random.Random(1)
    with machine.mounted("ext4") as disk:
        before = len(descriptors())
        for number in range(40):
            writing = [Writing(disk.directory / f"{number}-{i}", choose) for i in range(3)]
            with anyio.move_on_after(choose.random() * 0.02):
                async with anyio.create_task_group() as tasks:
                    for each in writing:
                        tasks.start_soon(each)
            for each in writing:
                each.check()
                each.path.unlink(missing_ok=True)
        assert len(descriptors()) == before
        assert [name for name in os.listdir(disk.directory) if name != "lost+found"] == []


async def test_a_cancelled_copy_ends_soon(machine: Machine) -> None:
    with machine.slow_disk() as slow:
        (slow.directory / "source").mkdir()
        for name in ("1", "2"):
            (slow.directory / "source" / name).write_bytes(bytes([1]) * (100 * MIB))
        os.sync()
        before = len(descriptors())
        with anyio.move_on_after(0.2) as scope:
            await aio.copyfile(slow.directory / "source" / "1", slow.directory / "target")
        assert scope.cancelled_caught
        assert (slow.directory / "target").stat().st_size < 90 * MIB
        with anyio.move_on_after(0.2) as scope:
            await aio.copytree(slow.directory / "source", slow.directory / "targets")
        assert scope.cancelled_caught
        assert sum(path.stat().st_size for path in (slow.directory / "targets").iterdir()) < 90 * MIB
        assert len(descriptors()) == before


async def test_a_cancelled_copy_ends_between_two_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for name in range(100):
        (tmp_path / "source" / str(name)).touch()
    copied = []

    def copy(source: str, _: str) -> None:
        copied.append(source)
        time.sleep(0.01)

    with anyio.move_on_after(0.05) as scope:
        await aio.copytree(tmp_path / "source", tmp_path / "target", copy_function=copy)
    assert scope.cancelled_caught
    assert 1 <= len(copied) < 100


async def test_a_copy_that_is_cancelled_before_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await aio.copyfile(tmp_path / "source", tmp_path / "target")
    assert scope.cancelled_caught
    assert os.listdir(tmp_path) == ["source"]


INTERRUPTED = """
    import asyncio, os, random, signal, sys, threading
    from functools import partial

    import anyio
    from pacedio import aio

    backend, directory = sys.argv[1:]
    choose = random.Random(1)
    files = []

    async def write(number):
        timer.start()
        for atomic in (False, True):
            async with await aio.open_file(f"{directory}/{number}-{atomic}", "wb", 0, atomic=atomic, sync=False) as f:
                files.append(f)
                for i in range(100000):
                    await f.write(b"%08d" % i * 1024)
                    if not atomic and number % 2 and i == 20:
                        break

    for number in range(30):
        timer = threading.Timer(choose.random() * 0.03, partial(os.kill, os.getpid(), signal.SIGINT))
        try:
            anyio.run(write, number, backend=backend)
        except (KeyboardInterrupt, asyncio.CancelledError):  # the latter with Python 3.10
            pass
        else:
            raise SystemExit("not interrupted")
        timer.join()
        assert all(f.closed for f in files)  # of whom garbage collection closed none: they are still there
    assert not [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
                and os.readlink(f"/proc/self/fd/{fd}").startswith(directory)]
    assert [name for name in os.listdir(directory) if not name.endswith("-False")] == []
    for name in os.listdir(directory):
        with open(f"{directory}/{name}", "rb") as f:
            content = f.read()
        assert content == b"".join(b"%08d" % i * 1024 for i in range(len(content) // 8192))
    print(len(files))
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupted_program_closes_its_files(tmp_path: Path, backend: str) -> None:
    """By the user, who is heard at any moment: SIGINT, and what each of the two makes of it."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(INTERRUPTED), backend, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 30


INTERRUPTED_CLOSE = """
    import asyncio, os, select, signal, sys, threading, time

    import anyio
    from pacedio import aio

    def end():
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        with open(reading, "rb") as f:
            seen.append(len(f.read()))

    async def write():
        with anyio.CancelScope(shield=True):
            await f.write(bytes(1 << 20))

    async def main():
        global f
        f = await aio.open_file(writing, "wb", 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            while select.select([], [writing], [], 0)[1]:
                await anyio.sleep(0.001)
            thread.start()
            try:
                await f.aclose()
            finally:
                assert f.closed
                seen.append("closed")

    seen = []
    reading, writing = os.pipe()
    thread = threading.Thread(target=end)
    try:
        anyio.run(main, backend=sys.argv[1])
    except* (KeyboardInterrupt, asyncio.CancelledError):
        seen.append("interrupted")
    thread.join()
    print(*seen)
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupted_close_is_completed(backend: str) -> None:
    script = textwrap.dedent(INTERRUPTED_CLOSE)
    if sys.version_info < (3, 11):
        script = script.replace("except* (KeyboardInterrupt, asyncio.CancelledError)", "except BaseException")
    command = [sys.executable, "-W", "error", "-c", script, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == [str(MIB), "closed", "interrupted"]


# ---- asyncio's own cancellation, which no scope of anyio's holds off ----


@only_asyncio
async def test_a_cancelled_task_waits_for_its_call() -> None:
    pipe, data, limiter = Pipe(), os.urandom(MIB), anyio.CapacityLimiter(1)
    f = await aio.open_file(pipe.writing, "wb", 0, limiter=limiter)
    task = asyncio.ensure_future(f.write(data))
    await until(lambda: is_held_up(pipe))
    threads = threading.active_count()
    for _ in range(20):
        task.cancel()
        await asyncio.sleep(0.001)
        assert not task.done()
    assert threading.active_count() == threads
    assert limiter.borrowed_tokens == 1
    later = asyncio.ensure_future(f.write(b"later"))
    await asyncio.sleep(0.01)
    pipe.drain()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await later == 5
    await f.aclose()
    assert pipe.end() == data + b"later"
    assert limiter.borrowed_tokens == 0


@only_asyncio
async def test_a_task_that_is_cancelled_when_it_gets_a_thread_lets_the_next_have_it(tmp_path: Path) -> None:
    limiter = anyio.CapacityLimiter(1)
    f = await aio.open_file(tmp_path / "f", "wb", 0, limiter=limiter)
    g = await aio.open_file(tmp_path / "g", "wb", 0, limiter=limiter)
    limiter.acquire_on_behalf_of_nowait(limiter)
    first = asyncio.ensure_future(f.write(b"x"))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(g.write(b"y"))
    await asyncio.sleep(0.01)
    limiter.release_on_behalf_of(limiter)
    first.cancel()
    assert await asyncio.wait_for(second, 10) == 1
    assert first.cancelled()
    await f.aclose()
    await g.aclose()
    assert limiter.borrowed_tokens == 0
    assert (tmp_path / "f").read_bytes() == b""


@only_asyncio
async def test_a_cancelled_task_within_a_cancelled_scope_does_not_spin() -> None:
    pipe, data = Pipe(), os.urandom(MIB)
    turns = 0

    async def write() -> None:
        with scope:
            await f.write(data)

    scope = anyio.CancelScope()
    async with await aio.open_file(pipe.writing, "wb", 0) as f:
        task = asyncio.ensure_future(write())
        await until(lambda: is_held_up(pipe))
        task.cancel()
        await asyncio.sleep(0.01)
        scope.cancel()
        before = time.process_time()
        await asyncio.sleep(0.3)
        turns = round((time.process_time() - before) * 1000)
        assert not task.done()
        pipe.drain()
        await asyncio.wait([task])
    assert pipe.end() == data
    assert turns < 100  # milliseconds of CPU time


@only_asyncio
@pytest.mark.parametrize("by", ["aclose", "async with"])
async def test_a_cancelled_task_closes_and_stays_cancelled(by: str) -> None:
    pipe, data = Pipe(), os.urandom(MIB)
    f = await aio.open_file(pipe.writing, "wb")
    writing = asyncio.ensure_future(f.write(data))
    await until(lambda: is_held_up(pipe))

    async def close() -> None:
        if by == "aclose":
            await f.aclose()
        else:
            async with f:
                pass

    closing = asyncio.ensure_future(close())
    for _ in range(3):
        await asyncio.sleep(0.01)
        closing.cancel()
    pipe.drain()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert f.closed
    assert await writing == MIB
    assert pipe.end() == data


@only_asyncio
async def test_a_task_that_is_cancelled_during_the_close_itself_stays_cancelled(machine: Machine) -> None:
    with machine.slow_disk() as slow, machine.failing_disk() as failing:
        f = await aio.open_file(slow.directory / "file", "wb")
        await f.write(bytes(20 * MIB))
        closing = asyncio.ensure_future(f.aclose())
        await asyncio.sleep(0.001)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert f.closed
        assert (slow.directory / "file").stat().st_size == 20 * MIB

        # An error of the data is never swallowed.
        f = await aio.open_file(failing.directory / "file", "wb", pacing=Pacing(limit="512MiB", window="256MiB"))
        await write_64_mib(f)
        closing = asyncio.ensure_future(f.aclose())
        await asyncio.sleep(0.001)
        closing.cancel()
        with pytest.raises(pacedio.WritebackError):
            await closing
        assert f.closed


@only_asyncio
async def test_a_cancelled_tasks_open_is_undone(tmp_path: Path) -> None:
    fifo = Fifo(tmp_path / "fifo")
    limiter = anyio.CapacityLimiter(1)  # which undoing it needs as well
    task = asyncio.ensure_future(aio.open_file(tmp_path / "fifo", "wb", opener=fifo.open, limiter=limiter))
    await until(fifo.has_begun)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.001)
    reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert limiter.borrowed_tokens == 0


@only_asyncio
async def test_a_cancelled_tasks_copy_ends_soon(machine: Machine) -> None:
    with machine.slow_disk() as slow:
        (slow.directory / "source").write_bytes(bytes([1]) * (200 * MIB))
        os.sync()
        before = len(descriptors())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aio.copyfile(slow.directory / "source", slow.directory / "target"), 0.2)
        assert len(descriptors()) == before  # so it has ended
        assert (slow.directory / "target").stat().st_size < 180 * MIB


@only_asyncio
async def test_cancelling_tasks_at_any_moment_leaves_prefixes(machine: Machine) -> None:
    choose = random.Random(2)
    with machine.mounted("ext4") as disk:
        before = len(descriptors())
        for number in range(60):
            writing = [Writing(disk.directory / f"{number}-{i}", choose) for i in range(3)]
            tasks = [asyncio.ensure_future(each()) for each in writing]
            for _ in range(choose.choice([0, 1, 2, 3, 5, 8, 13, 100])):
                await asyncio.sleep(0)
            await asyncio.sleep(choose.choice([0, 0.001, 0.005, 0.02]) * choose.random())
            for _ in range(choose.choice([1, 1, 3])):
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(0)
            for each, result in zip(writing, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                assert result is None or isinstance(result, asyncio.CancelledError)
                each.check()
                each.path.unlink(missing_ok=True)
        assert len(descriptors()) == before
        assert [name for name in os.listdir(disk.directory) if name != "lost+found"] == []


@only_asyncio
@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout needs Python 3.11")
async def test_asyncios_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):  # noqa: PT012
        async with asyncio.timeout(0.02), await aio.open_file(tmp_path / "file", "wb", atomic=True) as f:
            while True:
                await f.write(bytes(100 * KIB))
    assert f.closed
    assert os.listdir(tmp_path) == []
