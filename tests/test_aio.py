"""pacedio.aio on asyncio and trio: order, cancellation, errors, and an event loop that never waits for a disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from machine import Machine, descriptors

import pacedio
from pacedio import Pacing, aio

KIB = 1024
MIB = 1024 * KIB

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) <= before + 3  # what an event loop keeps is closed with it, after this


# ---- the interface ----


async def test_it_has_all_that_anyios_file_has(tmp_path: Path) -> None:
    theirs = await anyio.open_file(tmp_path / "file", "wb")
    async with await aio.open_file(tmp_path / "file", "wb") as ours:
        assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(ours))
    await theirs.aclose()


async def test_binary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with await aio.open_file(path, "w+b", pacing=Pacing(limit="2MiB")) as f:
        assert await f.write(b"0123456789" * 100_000) == 1_000_000
        await f.writelines([b"a\n", b"b\n"])
        await f.flush()
        await f.sync()
        assert f.stats.bytes == 1_000_004
        assert await f.tell() == 1_000_004
        assert await f.seek(-4, os.SEEK_END) == 1_000_000
        assert await f.read(2) == b"a\n"
        buffer = bytearray(1)
        assert await f.readinto(buffer) == 1
        assert buffer == b"b"
        assert await f.truncate(10) == 10
        assert f.name == str(path)
        assert f.wrapped.fileno() == f.fileno()
    assert f.closed
    assert f.stats.error is None
    assert path.read_bytes() == b"0123456789"


async def test_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with await aio.open_file(path, "w", encoding="utf-8", atomic=True) as f:
        assert await f.write("ä\nb\n") == 4
        assert not path.exists()
    async with await aio.open_file(path, encoding="utf-8") as g:
        assert [line async for line in g] == ["ä\n", "b\n"]
        await g.seek(0)
        assert await g.readlines() == ["ä\n", "b\n"]
        with pytest.raises(AttributeError):
            _ = g.stats


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
    with pytest.raises(FileNotFoundError):
        await aio.open_file(tmp_path / "none", "rb")
    with pytest.raises(TypeError, match="limiter"):
        aio.AsyncFile(f.wrapped, limiter=3)  # type: ignore[arg-type]


async def test_wrapping(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as plain:
        async with aio.wrap_file(plain) as f:
            await f.write(b"x" * MIB)
        assert not plain.closed
        assert f.stats.bytes == MIB
    async with aio.wrap_file(pacedio.open(path, "ab")) as g:
        await g.write(b"y")
    async with aio.wrap_file(open(path, "rb")) as h:
        assert (await h.read())[-2:] == b"xy"
    with open(path, "w", encoding="utf-8") as text, pytest.raises(TypeError, match="binary"):
        aio.wrap_file(text)


async def test_copies(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below" / "file").write_bytes(os.urandom(3 * MIB))
    (source / "link").symlink_to("below/file")
    os.utime(source / "below" / "file", ns=(1, 2))
    target = tmp_path / "target"
    assert await aio.copytree(source, target, symlinks=True) == target
    assert (target / "below" / "file").read_bytes() == (source / "below" / "file").read_bytes()
    assert (target / "below" / "file").stat().st_mtime_ns == 2
    assert os.readlink(target / "link") == "below/file"
    assert await aio.copyfile(source / "below" / "file", tmp_path / "one") == tmp_path / "one"
    assert (tmp_path / "one").read_bytes() == (source / "below" / "file").read_bytes()


# ---- order and threads ----


async def test_writes_of_one_file_stay_in_order(tmp_path: Path) -> None:
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


async def test_no_call_on_the_file_runs_in_the_event_loops_thread(tmp_path: Path) -> None:
    """Seen by the interpreter itself, which tells of every call into the built library."""
    seen: list[str] = []

    def profile(_: Any, event: str, what: Any) -> None:
        if event == "c_call" and getattr(what, "__name__", "").startswith(("pio_", "flush", "close")):
            seen.append(what.__name__)

    sys.setprofile(profile)
    try:
        async with await aio.open_file(tmp_path / "file", "wb") as f:
            for _ in range(4):
                await f.write(bytes(MIB))
            await f.sync()
            _ = f.stats
    finally:
        sys.setprofile(None)
    assert [name for name in seen if name.startswith("pio_")] == []


async def test_the_event_loop_goes_on_while_a_slow_disk_is_written(machine: Machine) -> None:
    """A single gap may be a busy machine's pause; but were it the disk's, half of all ticks would be as late as a
    window takes.
    """
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await anyio.sleep(0.001)
            gaps.append(time.monotonic() - began - 0.001)

    with machine.slow_disk() as slow:
        async with anyio.create_task_group() as tasks, await aio.open_file(slow.directory / "file", "wb") as f:
            tasks.start_soon(tick)
            for _ in range(64):
                await f.write(bytes(MIB))
            assert f.stats.stall_seconds > 0.1
            tasks.cancel_scope.cancel()
    late = sorted(gaps)[len(gaps) * 9 // 10]
    assert late < 0.005


# ---- errors ----


async def test_an_error_of_the_disk_is_raised_and_raised_again(machine: Machine) -> None:
    with machine.failing_disk() as failing:
        f = await aio.open_file(failing.directory / "file", "wb")
        with pytest.raises(pacedio.WritebackError) as first:  # noqa: PT012
            for _ in range(64):
                await f.write(bytes(MIB))
            await f.sync()
        assert f.stats.error is not None
        with pytest.raises(OSError, match=os.strerror(first.value.errno or 0)):
            await f.aclose()
        assert f.closed


async def test_a_full_file_system(machine: Machine) -> None:
    with machine.mounted("ext4", 32 * MIB) as full:
        with pytest.raises(OSError, match="No space left") as error:  # noqa: PT012
            async with await aio.open_file(full.directory / "file", "wb") as f:
                for _ in range(64):
                    await f.write(bytes(MIB))
        assert error.value.errno == errno.ENOSPC


# ---- cancellation ----


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


async def test_an_exception_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(KeyError):  # noqa: PT012
        async with await aio.open_file(path, "wb", atomic=True) as f:
            await f.write(b"x")
            raise KeyError
    assert f.closed
    assert not path.exists()


async def test_closing_is_shielded(tmp_path: Path) -> None:
    f = await aio.open_file(tmp_path / "file", "wb")
    await f.write(b"x" * MIB)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await f.aclose()
    assert f.closed
    assert (tmp_path / "file").stat().st_size == MIB
    await f.aclose()


async def test_cancelling_at_any_moment_leaves_a_prefix(tmp_path: Path, machine: Machine) -> None:
    choose = random.Random(1)
    with machine.mounted("ext4") as disk:
        before = len(descriptors())
        for number in range(60):
            path = disk.directory / str(number)
            f: aio.AsyncFile[bytes] | None = None
            with anyio.move_on_after(choose.random() * 0.02):
                async with await aio.open_file(path, "wb", 0, sync=choose.random() < 0.3) as f:
                    for i in range(1000):
                        await f.write(b"%08d" % i * (KIB * choose.choice([1, 16])))
            if f is not None:
                assert f.closed
                content = path.read_bytes()
                numbers = [int(content[at : at + 8]) for at in range(0, len(content), 8 * KIB)]
                assert numbers == sorted(numbers)
                assert sorted(set(numbers)) == list(range(len(set(numbers))))
        assert len(descriptors()) == before


async def test_a_cancelled_copy_ends_soon(machine: Machine) -> None:
    with machine.slow_disk() as slow:
        (slow.directory / "source").write_bytes(bytes([1]) * (200 * MIB))
        os.sync()
        with anyio.move_on_after(0.3) as scope:
            await aio.copyfile(slow.directory / "source", slow.directory / "target")
        assert scope.cancelled_caught
        assert (slow.directory / "target").stat().st_size < 150 * MIB


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_asyncios_own_cancellation_waits_for_the_call_as_well(tmp_path: Path) -> None:
    """Its timeouts cancel the task, which no scope of anyio's holds off."""
    path = tmp_path / "file"
    began, go_on = threading.Event(), threading.Event()

    class Slow(pacedio.PacedWriter):
        def write(self, data: Any, /) -> int:
            began.set()
            assert go_on.wait(20)
            return super().write(data)

    opened = pacedio.open(path, "wb", 0)
    opened.__class__ = Slow
    opened.__dict__.pop("write", None)
    f = aio.AsyncFile(opened)
    task = asyncio.ensure_future(f.write(b"x" * MIB))
    while not began.is_set():
        await asyncio.sleep(0.001)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    closing = asyncio.ensure_future(f.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert f.closed
    assert path.stat().st_size == MIB


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_asyncios_own_cancellation_of_an_open_leaks_nothing(tmp_path: Path) -> None:
    before = len(descriptors())
    for number in range(200):
        task = asyncio.ensure_future(aio.open_file(tmp_path / str(number), "wb", atomic=True))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        if number % 3 == 0:
            await asyncio.sleep(0.0005)
        task.cancel()
        try:
            await (await task).discard()
        except asyncio.CancelledError:
            pass
    assert len(descriptors()) <= before
    assert os.listdir(tmp_path) == []
