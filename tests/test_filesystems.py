"""On real file systems: the bytes are right, the limit holds as another process sees it, the engine is the one that
works there."""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounts
from machine import (
    HAS_CACHESTAT,
    MIB,
    FileSystem,
    Machine,
    needs_cachestat,
    observed,
    remove_leftovers,
    system_calls,
)

import pacedio
from pacedio import Pacing
from pacedio.observe import cachestat, resident

KIB = 1 << 10
PAGE = mmap.PAGESIZE
SIZE = 96 * MIB
LIMIT = 2 * MIB
WINDOW = 512 * KIB  # of this limit, and the largest that an automatic one goes with
FIXED = Pacing(limit=LIMIT)

ENGINES = {
    "ext4": {"range", "uncached"},
    "xfs": {"range", "uncached"},
    "btrfs": {"range"},
    "btrfs-compressed": {"range"},
    "overlayfs": {"advise"},
    "tmpfs": {"none"},
    "fuse": {"datasync"},
}
LARGEST_FOLIO = 2 * MIB
AS_GOOD_AS_IT_GETS = {"ext4", "xfs", "btrfs", "btrfs-compressed"}


def most_allowed(kind: str, in_flight: int = LIMIT, window: int = WINDOW) -> int:
    """Bytes that the observer may see in flight at most if the writer has so many."""
    if kind == "tmpfs":
        return 0
    if kind == "overlayfs":
        return max(16 * MIB, in_flight + window)
    return in_flight + window


@functools.cache
def source() -> bytes:
    return random.Random(7).randbytes(SIZE)


def digest(path: Path) -> str:
    """Of what the disk holds: what the page cache holds of the file is dropped first."""
    with builtins.open(path, "rb") as f:
        os.fdatasync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        whole = hashlib.sha256()
        while piece := f.read(MIB):
            whole.update(piece)
    return whole.hexdigest()


# ---- what is done to a file: with the builtin's open, which says what is right, and with pacedio's ------------------

Opens = Callable[..., Any]


def big_writes(opens: Opens, path: Path) -> object:
    with opens(path, "wb") as f:
        whole = memoryview(source())
        for at in range(0, SIZE, 5 * MIB + 12345):
            assert f.write(whole[at : at + 5 * MIB + 12345]) == len(whole[at : at + 5 * MIB + 12345])
    return f


def one_write(opens: Opens, path: Path) -> object:
    with opens(path, "wb") as f:
        f.write(source())
    return f


def tiny_writes(opens: Opens, path: Path) -> object:
    with opens(path, "wb") as f:
        whole = source()
        for at in range(0, SIZE, 777):
            f.write(whole[at : at + 777])
    return f


def seek_back_and_patch(opens: Opens, path: Path) -> object:
    """As zipfile does: a header is written again once its content is known."""
    whole = source()
    with opens(path, "wb") as f:
        at = 0
        for member in range(40):
            header, size = f.tell(), (member * 7919) % 600 * KIB + member
            f.write(bytes(30))
            f.write(whole[at : at + size])
            end = f.tell()
            f.seek(header)
            f.write(f"{member:10}{size:20}".encode())
            f.seek(end)
            at += size
        f.seek(0)
        f.write(b"patched long after")
    return f


def scattered_writes(opens: Opens, path: Path) -> object:
    """More dirty ranges, and smaller ones, than a planner likes to keep apart."""
    chance = random.Random(11)
    whole = source()
    with opens(path, "wb") as f:
        f.truncate(64 * MIB)
        for _ in range(2000):
            at = chance.randrange(64 * MIB)
            f.seek(at)
            f.write(whole[at : at + chance.choice((1, 100, PAGE, 5000, 40_000))])
    return f


def overwrite(opens: Opens, path: Path) -> object:
    whole = source()
    with opens(path, "wb") as f:
        f.write(whole[: 20 * MIB])
    with opens(path, "r+b") as f:
        f.seek(3 * MIB + 5)
        f.write(whole[50 * MIB : 60 * MIB])
        f.seek(-7 * MIB, os.SEEK_END)
        f.write(whole[70 * MIB : 75 * MIB])
    return f


def truncate_and_go_on(opens: Opens, path: Path) -> object:
    whole = source()
    with opens(path, "w+b") as f:
        f.write(whole[: 20 * MIB])
        f.truncate(5 * MIB + 77)
        f.seek(0, os.SEEK_END)
        f.write(whole[30 * MIB : 45 * MIB])
        f.seek(9 * MIB)
        f.truncate()
        f.truncate(12 * MIB + 1)
        f.write(b"in the middle of what truncate added")
    return f


def append(opens: Opens, path: Path) -> object:
    whole = source()
    with opens(path, "wb") as f:
        f.write(whole[: 3 * MIB + 1])
    with opens(path, "ab") as f:
        f.write(whole[3 * MIB + 1 : 30 * MIB])
        f.seek(0)
        f.write(whole[30 * MIB : 33 * MIB])
    return f


def sparse_extension(opens: Opens, path: Path) -> object:
    whole = source()
    with opens(path, "wb") as f:
        for at in range(0, 400 * MIB, 50 * MIB):
            f.seek(at + 3)
            f.write(whole[: 3 * MIB])
        f.truncate(450 * MIB)
    return f


def read_and_write(opens: Opens, path: Path) -> object:
    whole = source()
    with opens(path, "w+b") as f:
        f.write(whole[: 16 * MIB])
        for at in range(0, 16 * MIB, MIB):
            f.seek(at + 4000)
            piece = f.read(10_000)
            assert piece == whole[at + 4000 : at + 14_000]
            f.write(piece.swapcase())
    return f


OPERATIONS = [
    big_writes,
    one_write,
    tiny_writes,
    seek_back_and_patch,
    scattered_writes,
    overwrite,
    truncate_and_go_on,
    append,
    sparse_extension,
    read_and_write,
]


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Opens, Path], object]], str]:
    """The digest of what an operation leaves behind when it is done with the builtin's open."""

    @functools.cache
    def of(operation: Callable[[Opens, Path], object]) -> str:
        path = tmp_path_factory.mktemp("right") / "file"
        operation(builtins.open, path)
        try:
            return digest(path)
        finally:
            path.unlink()

    return of


@pytest.mark.parametrize(
    "pacing", [Pacing(), FIXED, Pacing(window="64KiB", limit="256KiB")], ids=["default", "fixed", "small"]
)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
def test_bytes_are_right_and_the_limit_holds(
    file_system: FileSystem, operation: Callable[[Opens, Path], object], pacing: Pacing, right: Callable[..., str]
) -> None:
    path = file_system.directory / "file"
    with observed(file_system.pages(path)) if HAS_CACHESTAT else contextlib.nullcontext() as seen:
        opened: list[Any] = []

        def opens(*arguments: Any, **named: Any) -> Any:
            opened.append(pacedio.open(*arguments, pacing=pacing, **named))
            return opened[-1]

        f = operation(opens, path)
        if HAS_CACHESTAT:
            assert cachestat(file_system.pages(path)).dirty == 0, "close syncs"
    assert isinstance(f, pacedio.PacedWriter)
    assert digest(path) == right(operation)
    if seen is not None:
        assert seen["samples"] > 0
    if isinstance(pacing.limit, int) and isinstance(pacing.window, int):
        assert f.stats.most_in_flight <= pacing.limit
        if seen is not None:
            assert seen["most"] <= most_allowed(file_system.kind, pacing.limit, pacing.window)
    elif seen is not None:  # it moved, so the most is what the writers say
        writers = [each for each in opened if isinstance(each, pacedio.PacedWriter)]
        assert seen["most"] <= most_allowed(file_system.kind, max(each.stats.most_in_flight for each in writers))
    assert f.stats.in_flight == 0
    assert f.stats.error is None


@pytest.mark.parametrize("operation", [big_writes, tiny_writes], ids=lambda o: o.__name__)
def test_the_engine_is_the_one_that_works_there(
    file_system: FileSystem, operation: Callable[[Opens, Path], Any]
) -> None:
    stats = operation(pacedio.open, file_system.directory / "file").stats
    assert stats.engine in ENGINES[file_system.kind]
    assert (stats.reason is None) == (file_system.kind in AS_GOOD_AS_IT_GETS), stats.reason
    assert stats.bytes == SIZE
    if file_system.kind != "tmpfs":
        assert stats.windows >= SIZE // (1024 * KIB)  # the largest there are


def test_a_plain_writer_exceeds_the_limit_by_far(file_system: FileSystem) -> None:
    """What the observer would see if nothing were paced: else the tests above could not fail."""
    path = file_system.directory / "file"
    with observed(file_system.pages(path)) as seen:
        big_writes(builtins.open, path)
    if file_system.kind == "tmpfs":
        assert seen["most"] == 0
    else:
        assert seen["most"] > 48 * MIB


# ---- engines by name -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["uncached", "range", "advise", "datasync"])
def test_every_engine_holds_the_limit_on_ext4(ext4: FileSystem, engine: str, right: Callable[..., str]) -> None:
    path = ext4.directory / "file"
    with observed(path) as seen:
        f: Any = big_writes(functools.partial(pacedio.open, pacing=FIXED.replace(engine=engine)), path)
    assert f.stats.engine == engine
    assert seen["most"] <= most_allowed("ext4")
    assert digest(path) == right(big_writes)


def test_engine_none_paces_nothing_and_says_so(ext4: FileSystem, right: Callable[..., str]) -> None:
    path = ext4.directory / "file"
    with observed(path) as seen:
        f: Any = big_writes(functools.partial(pacedio.open, pacing=FIXED.replace(engine="none")), path)
    assert f.stats.engine == "none"
    assert f.stats.reason
    assert seen["most"] > 48 * MIB
    assert digest(path) == right(big_writes)


@pytest.mark.parametrize("engine", ["uncached", "range"])
def test_an_engine_that_does_nothing_on_overlayfs_is_left_though_it_was_named(
    overlayfs: FileSystem, engine: str, right: Callable[..., str]
) -> None:
    path = overlayfs.directory / "file"
    with observed(overlayfs.pages(path)) as seen:
        f: Any = big_writes(functools.partial(pacedio.open, pacing=FIXED.replace(engine=engine)), path)
    assert f.stats.engine == "advise"
    assert f.stats.reason
    assert seen["most"] <= most_allowed("overlayfs")
    assert digest(path) == right(big_writes)


@pytest.mark.parametrize("kind", ["btrfs", "btrfs-compressed"])
def test_uncached_moves_down_where_it_is_not_supported(mounts: Mounts, kind: str, right: Callable[..., str]) -> None:
    with mounts.directory(kind) as btrfs:
        path = btrfs.directory / "file"
        with observed(path) as seen:
            f: Any = big_writes(functools.partial(pacedio.open, pacing=FIXED.replace(engine="uncached")), path)
        assert f.stats.engine == "range"
        assert f.stats.reason
        assert seen["most"] <= most_allowed(kind)
        assert digest(path) == right(big_writes)


def test_compressible_data_on_compressed_btrfs(mounts: Mounts) -> None:
    with mounts.directory("btrfs-compressed") as btrfs:
        path = btrfs.directory / "file"
        whole = source()[: SIZE // 2].hex().encode()
        with observed(path) as seen, pacedio.open(path, "wb", pacing=FIXED) as f:
            f.write(whole)
        assert f.stats.engine == "range"
        assert seen["most"] <= most_allowed("btrfs-compressed")
        assert digest(path) == hashlib.sha256(whole).hexdigest()


# ---- the page cache ----------------------------------------------------------------------------------------------


def undisturbed(measure: Callable[[], Any]) -> Any:
    """What it returns, measured again if somebody told the kernel meanwhile to drop the whole page cache."""

    def drops() -> str:
        return next(line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("drop_pagecache"))

    while True:
        before = drops()
        result = measure()
        if drops() == before:
            return result


def resident_after(path: Path, pacing: Pacing) -> int:
    """Pages of a file of SIZE bytes that are resident when it was written and synced."""
    with pacedio.open(path, "w+b", pacing=pacing) as f:
        f.write(source())
        f.sync()
        return resident(f.fileno())  # FUSE forgets a file's pages when the file is opened again


def test_written_pages_are_dropped(file_system: FileSystem) -> None:
    pages = undisturbed(lambda: resident_after(file_system.directory / "file", Pacing()))
    if file_system.kind == "tmpfs":  # which is the page cache
        assert pages == SIZE // PAGE
    else:
        assert pages <= WINDOW // PAGE


def test_written_pages_are_kept_if_asked(file_system: FileSystem) -> None:
    pacing = FIXED.replace(drop_cache=False)
    path = file_system.directory / "file"
    with observed(file_system.pages(path)) as seen:
        pages = undisturbed(lambda: resident_after(path, pacing))
    # The kernel may reclaim a clean page at any time, and does take single ones here; dropping takes all.
    assert pages >= SIZE // PAGE * 0.99
    assert seen["most"] <= most_allowed(file_system.kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlayfs"])
def test_a_reader_leaves_the_page_cache_as_it_found_it(mounts: Mounts, kind: str) -> None:
    with mounts.directory(kind) as inside:
        path = inside.directory / "file"
        big_writes(pacedio.open, path)

        def resident_before_and_after() -> tuple[int, int]:
            with builtins.open(path, "rb", buffering=0) as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing read ahead
                for at in range(10 * MIB, 20 * MIB, MIB):
                    os.pread(f.fileno(), MIB, at)
            before = resident(path)
            with pacedio.open(path, "rb") as reader:
                assert hashlib.sha256(reader.read()).digest() == hashlib.sha256(source()).digest()
            return before, resident(path)

        before, after = undisturbed(resident_before_and_after)
        assert before == 10 * MIB // PAGE
        assert before <= after <= before + MIB // PAGE


def edit_in_the_middle(path: Path) -> object:
    with pacedio.open(path, "r+b") as f:
        f.seek(5 * MIB + 7)
        f.write(source()[: 10 * MIB])
    return f


def add_at_the_end(path: Path) -> object:
    with pacedio.open(path, "ab") as f:
        f.write(source()[: 10 * MIB])
    return f


@pytest.mark.parametrize("change", [edit_in_the_middle, add_at_the_end], ids=lambda change: change.__name__)
def test_a_cached_file_is_changed_without_long_stalls(file_system: FileSystem, change: Callable[[Path], Any]) -> None:
    """Its pages lie in large folios that begin before the window or end after it, and are not dropped with it."""
    path = file_system.directory / "file"
    path.write_bytes(source()[: 32 * MIB + 10_001])
    with builtins.open(path, "rb") as f:
        os.fdatasync(f.fileno())
    with observed(file_system.pages(path)) as seen:
        stats = change(path).stats
    assert stats.longest_stall_seconds < 0.5
    assert stats.sync_seconds < 0.5
    assert stats.engine in ENGINES[file_system.kind]
    # The kernel counts a folio whole as soon as a part of it is dirty, and twice if another part is under writeback;
    # only the blocks that were written go to the disk.
    most = stats.most_in_flight
    assert seen["most"] <= max(2 * (most + LARGEST_FOLIO), most_allowed(file_system.kind, most))


# ---- atomic files ------------------------------------------------------------------------------------------------


def test_an_atomic_file_replaces_the_old_one_and_leaves_no_litter(file_system: FileSystem) -> None:
    path = file_system.directory / "file"
    for content in (source()[: 10 * MIB], source()[10 * MIB : 30 * MIB]):
        with pacedio.open(path, "wb", atomic=True) as f:
            f.write(content)
        assert f.stats.engine in ENGINES[file_system.kind]
        assert os.listdir(file_system.directory) == ["file"]
        assert path.read_bytes() == content


def test_an_atomic_file_leaves_the_old_one_if_an_exception_comes(file_system: FileSystem) -> None:
    path = file_system.directory / "file"
    path.write_bytes(b"old")

    def write_and_give_up(f: Any) -> None:
        f.write(source()[: 10 * MIB])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), pacedio.open(path, "wb", atomic=True) as f:
        write_and_give_up(f)
    assert os.listdir(file_system.directory) == ["file"]
    assert path.read_bytes() == b"old"


# ---- a slow disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pacing", [Pacing(), FIXED], ids=["default", "fixed"])
def test_on_a_slow_disk_the_limit_holds_and_stalls_are_counted(machine: Machine, pacing: Pacing) -> None:
    with machine.slow_disk(delay=0.005, rate=40 * 10**6) as slow:
        path = slow.directory / "file"
        with observed(path) as seen, pacedio.open(path, "wb", pacing=pacing) as f:
            began = time.monotonic()
            f.write(source()[: 24 * MIB])
            f.sync()
            took = time.monotonic() - began
        assert f.stats.most_in_flight <= LIMIT  # ten times what this disk is busy with
        assert seen["most"] <= most_allowed("ext4", f.stats.most_in_flight)
        assert f.stats.engine in ENGINES["ext4"]
        assert f.stats.stalls > 10
        assert 0.5 * took < f.stats.stall_seconds < took
        assert f.stats.longest_stall_seconds < 0.5
        assert f.stats.sync_seconds < 0.3 * took


def test_an_exception_in_a_signal_handler_ends_a_stall_soon(machine: Machine) -> None:
    class Enough(Exception):
        pass

    def enough(*_: object) -> None:
        raise Enough

    with machine.slow_disk(delay=0.005, rate=20 * 10**6) as slow:
        before = signal.signal(signal.SIGALRM, enough)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            began = time.monotonic()
            with pytest.raises(Enough), pacedio.open(slow.directory / "file", "wb", sync=False) as f:
                f.write(source())  # takes 5 s
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < 1
        assert 0 < f.stats.bytes < SIZE // 4
        assert f.closed


# ---- verification ------------------------------------------------------------------------------------------------


@needs_cachestat
@pytest.mark.parametrize("kind", ["ext4", "overlayfs"])
def test_a_mount_is_verified_once(machine: Machine, kind: str) -> None:
    with machine.mounted(kind) as new:
        first: Any = big_writes(pacedio.open, new.directory / "first")
        second: Any = big_writes(pacedio.open, new.directory / "second")
    assert second.stats.engine == first.stats.engine
    assert second.stats.reason == first.stats.reason
    # cachestat sees no pages on overlayfs: that is the verification's result there.
    assert first.stats.verified_dirty_pages == 0 if kind == "overlayfs" else first.stats.verified_dirty_pages > 0
    assert second.stats.verified_dirty_pages is None


SMALL_FILES = """
import os, sys, pacedio
directory = sys.argv[1]
open(os.path.join(directory, "begin"), "w").close()
for i in range(10):
    with pacedio.open(os.path.join(directory, str(i)), "wb", sync=False) as f:
        f.write(bytes(4096))
"""


def test_a_file_that_fills_no_window_pays_for_no_engine(ext4: FileSystem, tmp_path: Path) -> None:
    calls = system_calls(SMALL_FILES, ext4.directory, log=tmp_path / "log")
    assert len([call for call in calls if call.startswith("write(") and ", 4096) = 4096" in call]) == 10
    # An older strace knows cachestat only by its number, 451.
    engine = ("cachestat(", "syscall_0x1c3(", "fstatfs(", "statx(", "sync_file_range(", "fadvise64(", "ioprio_")
    assert [call for call in calls if call.startswith(engine)] == []


# ---- the machine's own --------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from machine import Machine

with ExitStack() as stack:
    machine = stack.enter_context(Machine(Path(sys.argv[1])))
    stack.enter_context(machine.mounted("overlayfs"))
    stack.enter_context(machine.failing_disk())
    os.kill(os.getpid(), int(sys.argv[2]))
"""


def left_behind(below: Path) -> list[str]:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    loops = subprocess.run(["losetup", "-l", "-n", "-O", "BACK-FILE"], capture_output=True, text=True, check=True)
    paths = [*mounts, *loops.stdout.split(), *map(str, below.iterdir())]
    return [path for path in paths if path.startswith(f"{below}/")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_run_that_is_killed_leaves_nothing_behind_for_long(
    machine: Machine, tmp_path: Path, number: signal.Signals
) -> None:
    with machine.mounted("tmpfs"):  # skips without root
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(int(number))]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False)
        assert done.returncode == -number, done.stderr
        if number == signal.SIGKILL:
            assert len(left_behind(tmp_path)) > 5
            remove_leftovers()
        assert left_behind(tmp_path) == []
