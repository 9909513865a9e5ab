"""Allocation ahead: files written side by side have about as few pieces as plain writers leave, nothing stays allocated
beyond a file's end whatever becomes of it, and files that do not want it are left alone."""

from __future__ import annotations

import array
import builtins
import contextlib
import errno
import fcntl
import itertools
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounts
from kernel import BTRFS, COMPRESSED, DELALLOC, EXT4, OVERLAYFS, TMPFS, XFS, Kernel, always, at, simulated
from machine import KINDS, MIB, FileSystem, Machine, system_calls

import pacedio
from pacedio import Pacing
from pacedio._native import ffi
from pacedio.copying import copy_contents

KIB = 1 << 10
GIB = 1 << 30
HELPED = ("ext4", "xfs", "btrfs")
OFF = Pacing(preallocate="off")
FIXED = Pacing(limit="2MiB")  # where calls are counted, the device is to have no say
STEP = 128 * MIB  # what is allocated ahead first, where there is room
FS_IOC_FIEMAP = 0xC020660B
FS_IOC_SETFLAGS = 0x40086602
ENCODED = 0x8  # FIEMAP_EXTENT_ENCODED: compressed, for one
CHUNK = os.urandom(MIB)


def fiemap(path: Path) -> list[tuple[int, int, int, int]]:
    """The extents of a file, also of those beyond its end: offset, where on the device, length, flags."""
    found: list[tuple[int, int, int, int]] = []
    with builtins.open(path, "rb") as f:
        os.fsync(f.fileno())
        start = 0
        while True:
            room = array.array("B", bytes(32 + 512 * 56))
            struct.pack_into("=QQLLLL", room, 0, start, (1 << 63) - start, 0, 0, 512, 0)
            fcntl.ioctl(f, FS_IOC_FIEMAP, room)
            count = struct.unpack_from("=QQLLLL", room)[3]
            for i in range(count):
                logical, physical, length, _, _, flags = struct.unpack_from("=QQQQQL", room, 32 + 56 * i)
                found.append((logical, physical, length, flags))
            if not count or found[-1][3] & 1:  # FIEMAP_EXTENT_LAST
                return found
            start = found[-1][0] + found[-1][2]


def pieces(path: Path) -> int:
    """As filefrag(8) counts: what lies together on the device is one."""
    extents = fiemap(path)
    apart = [b for a, b in itertools.pairwise(extents) if (a[0] + a[2], a[1] + a[2]) != (b[0], b[1])]
    return bool(extents) + len(apart)


def allocated_beyond(path: Path) -> int:
    """How far blocks lie beyond the last page of the file."""
    end = -(-path.stat().st_size // 4096) * 4096
    return max([0, *(logical + length - end for logical, _, length, _ in fiemap(path))])


def holds_only_its_own(path: Path) -> bool:
    """No block beyond the end, and no more than the data and what says where they are."""
    status = path.stat()
    return allocated_beyond(path) == 0 and status.st_blocks * 512 <= status.st_size + 64 * KIB


def opens(path: Path, mode: str = "wb", pacing: Pacing | None = None, **how: Any) -> Any:
    return pacedio.open(path, mode, pacing=pacing, **how)


@pytest.fixture(params=HELPED)
def helped(request: pytest.FixtureRequest, mounts: Mounts) -> Iterator[FileSystem]:
    with mounts.directory(request.param) as made:
        yield made


@pytest.fixture
def path(helped: FileSystem) -> Path:
    return helped.directory / "file"


# ---- pieces ----


def side_by_side(paths: list[Path], size: int, how: Callable[[Path], Any]) -> int:
    """Threads write a file each at once; all their pieces."""
    gate = threading.Barrier(len(paths))
    broken: list[BaseException] = []

    def write(path: Path) -> None:
        try:
            gate.wait()
            with how(path) as f:
                for _ in range(size // MIB):
                    f.write(CHUNK)
                f.flush()
                os.fsync(f.fileno())
        except BaseException as e:
            gate.abort()
            broken.append(e)

    threads = [threading.Thread(target=write, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken
    return sum(map(pieces, paths))


@pytest.mark.parametrize("kind", HELPED)
def test_files_written_side_by_side(machine: Machine, kind: str) -> None:
    found = {}
    ways: dict[str, Callable[[Path], Any]] = {
        "plain": lambda path: path.open("wb"),
        "off": lambda path: opens(path, pacing=OFF),
        "auto": opens,
    }
    for name, how in ways.items():
        # A disk of the usual size (sparse): of a small one, a 64th is not worth much.
        with machine.mounted(kind, 32 * GIB) as made:
            paths = [made.directory / str(i) for i in range(8)]
            found[name] = side_by_side(paths, 48 * MIB, how)
            assert all(map(holds_only_its_own, paths))
    assert found["auto"] <= 2 * found["plain"]
    assert found["auto"] < found["off"]  # or the test shows nothing


def test_it_is_allocated_and_released(path: Path) -> None:
    with opens(path, sync=False) as f:
        f.write(CHUNK)
        f.flush()
        assert allocated_beyond(path) >= 6 * MIB  # a 64th of what is free here
    assert holds_only_its_own(path)
    assert path.read_bytes() == CHUNK


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in HELPED])
def test_elsewhere_nothing_is(mounts: Mounts, kind: str) -> None:
    with mounts.directory(kind) as made:
        paths = {}
        for name, pacing in (("off", OFF), ("auto", Pacing())):
            path = paths[name] = made.directory / name
            with opens(path, pacing=pacing) as f:
                for _ in range(3):
                    f.write(CHUNK)
                f.sync()
                during = path.stat().st_blocks
            assert during * 512 <= 3 * MIB + 64 * KIB
            assert path.read_bytes() == 3 * CHUNK


def test_the_expected_size_is_allocated_at_once(path: Path) -> None:
    expected = 40 * MIB + 5  # more than a 64th of what is free
    with opens(path, pacing=Pacing(preallocate=expected), sync=False) as f:
        f.write(CHUNK)
        f.flush()
        assert expected - MIB - 4096 <= allocated_beyond(path) <= expected - MIB + 64 * KIB
        f.write(CHUNK * 10)
    assert holds_only_its_own(path)
    assert path.read_bytes() == 11 * CHUNK


def test_a_file_may_outgrow_the_expected_size(path: Path) -> None:
    with opens(path, pacing=Pacing(preallocate="5MiB")) as f:
        for _ in range(9):
            f.write(CHUNK)
    assert holds_only_its_own(path)
    assert path.read_bytes() == 9 * CHUNK


def test_more_than_there_is_is_not_allocated(path: Path) -> None:
    with opens(path, pacing=Pacing(preallocate="100GiB"), sync=False) as f:
        f.write(CHUNK)
        f.flush()
        assert allocated_beyond(path) < 16 * MIB
    assert holds_only_its_own(path)


# ---- what becomes of the rest ----


@pytest.mark.parametrize("sync", [True, False])
def test_after_discard(path: Path, sync: bool) -> None:
    f = opens(path, sync=sync)
    f.write(CHUNK + CHUNK)
    f.discard()
    assert path.stat().st_size >= MIB
    assert holds_only_its_own(path)


def test_after_an_exception(path: Path) -> None:
    with contextlib.suppress(KeyError), opens(path) as f:
        f.write(CHUNK + CHUNK)
        raise KeyError
    assert holds_only_its_own(path)


def test_after_garbage_collection(path: Path) -> None:
    f = opens(path)
    f.write(CHUNK + CHUNK)
    with pytest.warns(ResourceWarning):
        del f
    assert path.stat().st_size == 2 * MIB
    assert holds_only_its_own(path)


def test_an_atomic_file(path: Path) -> None:
    path.write_bytes(b"old")
    with opens(path, atomic=True) as f:
        f.write(CHUNK + CHUNK)
    assert path.stat().st_size == 2 * MIB
    assert holds_only_its_own(path)


def test_after_a_write_that_failed(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    f = opens(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB + 5, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            f.write(CHUNK * 5)
        assert path.stat().st_size == 3 * MIB + 5
        assert holds_only_its_own(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with pytest.raises(OSError, match="File too large"):
            f.close()
    assert holds_only_its_own(path)


def test_on_a_disk_that_failed(machine: Machine) -> None:
    with machine.failing_disk(size=2 * GIB) as made:
        path = made.directory / "file"
        f = opens(path)
        with contextlib.suppress(OSError):
            for _ in range(64):
                f.write(CHUNK)
            f.sync()
        assert f.stats.error is not None
        held = path.stat().st_blocks * 512 - path.stat().st_size
        assert held <= 64 * KIB
        with pytest.raises(OSError):  # noqa: PT011
            f.close()


def test_truncate(path: Path) -> None:
    with opens(path, "w+b", sync=False) as f:
        f.write(CHUNK * 3)
        f.truncate(MIB + 7)
        assert allocated_beyond(path) == 0
        f.seek(0, os.SEEK_END)
        f.write(CHUNK * 3)
        f.flush()
        assert allocated_beyond(path) > MIB
        f.truncate()  # where it ends
        assert allocated_beyond(path) == 0
        f.write(CHUNK)
    assert path.read_bytes() == (CHUNK * 3)[: MIB + 7] + CHUNK * 4
    assert holds_only_its_own(path)


def check_blocks(path: Path, how: Callable[[Any], None]) -> None:
    """It holds what the same without allocation ahead does. (XFS leaves blocks of its own guess in holes.)"""
    with opens(path) as f:
        how(f)
    without = path.with_name("without")
    with opens(without, pacing=OFF) as f:
        how(f)
    assert path.stat().st_size == without.stat().st_size
    assert path.stat().st_blocks * 512 <= without.stat().st_blocks * 512 + 64 * KIB
    assert allocated_beyond(path) <= allocated_beyond(without)
    assert subprocess.run(["cmp", path, without], check=False).returncode == 0


def test_truncate_to_more_leaves_a_hole(path: Path) -> None:
    def write(f: Any) -> None:
        f.write(CHUNK)
        f.truncate(100 * MIB)
        f.seek(200 * MIB)
        f.write(CHUNK)

    check_blocks(path, write)


def test_a_hole_that_truncates_made_stays_one(path: Path) -> None:
    """The position stays where it was, and what was written before it is gone."""

    def write(f: Any) -> None:
        f.write(CHUNK * 10)
        f.truncate(0)
        f.truncate(f.tell())
        f.write(CHUNK * 2)

    check_blocks(path, write)
    assert path.stat().st_blocks * 512 < 10 * MIB


def test_seeks_beyond_the_end_leave_holes(path: Path) -> None:
    def write(f: Any) -> None:
        for at_ in range(0, 300 * MIB, 30 * MIB):
            f.seek(at_)
            f.write(CHUNK)

    check_blocks(path, write)
    with builtins.open(path, "rb") as g:
        for at_ in range(0, 271 * MIB, MIB):
            assert g.read(MIB) == (bytes(MIB) if at_ % (30 * MIB) else CHUNK)


def test_inside_a_file_nothing_is_allocated(path: Path) -> None:
    path.write_bytes(CHUNK * 8)
    before = path.stat().st_blocks
    with opens(path, "r+b", sync=False) as f:
        f.seek(MIB)
        f.write(CHUNK * 4)
        f.flush()
        assert allocated_beyond(path) == 0
    assert path.stat().st_blocks <= before + 128


def test_a_hole_that_is_written_into_stays_one_elsewhere(path: Path) -> None:
    with builtins.open(path, "wb") as f:
        f.truncate(64 * MIB)
    with opens(path, "r+b") as f:
        f.seek(8 * MIB)
        f.write(CHUNK * 4)
    assert path.stat().st_blocks * 512 <= 4 * MIB + 64 * KIB


def test_appending_through_a_seek(path: Path) -> None:
    path.write_bytes(CHUNK)
    with opens(path, "r+b", sync=False) as f:
        f.seek(0, os.SEEK_END)
        f.write(CHUNK * 2)
        f.flush()
        assert allocated_beyond(path) > MIB
    assert holds_only_its_own(path)


@pytest.mark.parametrize("pacing", [Pacing(), Pacing(preallocate=20 * MIB), Pacing(engine="datasync")])
def test_not_with_o_append(path: Path, pacing: Pacing) -> None:
    path.write_bytes(CHUNK)
    beyond = allocated_beyond(path)
    with opens(path, "ab", pacing=pacing, sync=False) as f:
        f.write(CHUNK * 2)
        f.flush()
        # XFS guesses by itself, and keeps it for a while.
        assert allocated_beyond(path) <= beyond + 4 * MIB
    assert allocated_beyond(path) <= beyond + 4 * MIB


@pytest.mark.parametrize("pacing", [OFF, Pacing(engine="none"), Pacing(engine="none", preallocate=20 * MIB)])
def test_not_when_it_is_off(ext4: FileSystem, pacing: Pacing) -> None:
    path = ext4.directory / "file"
    with opens(path, pacing=pacing, sync=False) as f:
        f.write(CHUNK * 2)
        f.flush()
        assert allocated_beyond(path) == 0


def test_blocks_that_were_there_before_stay(path: Path) -> None:
    with builtins.open(path, "wb") as f:
        f.write(CHUNK)
        f.flush()
        subprocess.run(["fallocate", "--keep-size", "--length", "20MiB", path], check=True)
    assert allocated_beyond(path) == 19 * MIB
    with opens(path, "r+b") as f:
        f.seek(0, os.SEEK_END)
        f.write(CHUNK * 3)
    assert path.read_bytes() == CHUNK * 4
    assert allocated_beyond(path) == 16 * MIB


def test_what_somebody_else_appended_stays(path: Path) -> None:
    with opens(path) as f:
        f.write(CHUNK)
        f.flush()
        with builtins.open(path, "ab") as other:
            other.write(b"theirs")
    assert path.read_bytes() == CHUNK + b"theirs"
    with opens(path) as f:
        f.write(CHUNK)
        f.flush()
        with builtins.open(path, "ab") as other:
            other.write(b"theirs")
        f.write(CHUNK * 30)
    assert path.read_bytes() == CHUNK * 31


def test_times_set_before_close_but_after_sync_are_the_callers(path: Path) -> None:
    """close has nothing left to release after a release, and so leaves the time alone."""
    with opens(path, sync=False) as f:
        f.write(CHUNK)
        f.flush()
        f._raw.release()
        os.utime(f.fileno(), ns=(10**18, 10**18))
    assert path.stat().st_mtime_ns == 10**18


# ---- compression ----


def is_compressed(path: Path) -> bool:
    extents = fiemap(path)
    return bool(extents) and all(flags & ENCODED for *_, flags in extents)


def compressible(path: Path, **how: Any) -> None:
    with opens(path, **how) as f:
        for _ in range(8):
            f.write(bytes(range(256)) * 4096)


@pytest.mark.parametrize("preallocate", ["auto", "8MiB"])
def test_a_compressed_btrfs_stays_compressed(mounts: Mounts, preallocate: str) -> None:
    with mounts.directory("btrfs-compressed") as made:
        compressible(made.directory / "file", pacing=Pacing(preallocate=preallocate))
        assert is_compressed(made.directory / "file")


def test_a_file_with_the_flag_stays_compressed(mounts: Mounts) -> None:
    with mounts.directory("btrfs") as made:
        path = made.directory / "file"
        with builtins.open(path, "wb") as f:
            fcntl.ioctl(f, FS_IOC_SETFLAGS, struct.pack("l", COMPRESSED))
        compressible(path, mode="r+b")
        assert is_compressed(path)
        plain = made.directory / "plain"
        compressible(plain)
        assert not is_compressed(plain)


# ---- copies ----


def copied(source: Path, target: Path, pacing: Pacing | None = None) -> int:
    """Copies, and how much was allocated beyond the end when a quarter had been written."""
    most = 0
    done = 0

    def progress(moved: int) -> None:
        nonlocal most, done
        done += moved
        if not most and done >= source.stat().st_size // 4:
            most = allocated_beyond(target)

    with builtins.open(source, "rb") as s, opens(target, pacing=pacing) as f:
        copy_contents(s.fileno(), f, progress=progress)
        if pacing is None:
            assert holds_only_its_own(target)  # before the file's times are set
    return most


def test_a_copy_is_allocated_at_once(path: Path) -> None:
    source = path.with_name("source")
    source.write_bytes(CHUNK * 40 + b"odd")
    assert copied(source, path) >= 28 * MIB
    assert path.read_bytes() == source.read_bytes()
    assert copied(source, path, OFF) <= 16 * MIB  # XFS guesses by itself
    assert path.read_bytes() == source.read_bytes()


def test_holes_stay_holes(path: Path) -> None:
    source = path.with_name("source")
    with builtins.open(source, "wb") as f:
        for at_, size in ((0, 5 * MIB), (50 * MIB, 9 * MIB + 4096), (100 * MIB, 300 * KIB), (150 * MIB, 3 * MIB)):
            f.seek(at_)
            f.write((CHUNK * 10)[:size])
        f.truncate(200 * MIB)
    copied(source, path)
    data = 5 * MIB + 9 * MIB + 4096 + 300 * KIB + 3 * MIB
    assert path.stat().st_blocks * 512 <= data + 64 * KIB
    assert path.stat().st_size == 200 * MIB
    done = subprocess.run(["cmp", source, path], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""
    assert len(fiemap(path)) >= 4


@pytest.mark.parametrize("kind", HELPED)
def test_extents_of_sparse_copies_side_by_side(machine: Machine, kind: str) -> None:
    """Each of the source's extents is one piece, also where another copy runs beside."""
    with machine.mounted(kind, 8 * GIB) as made:
        source = made.directory / "source"
        with builtins.open(source, "wb") as f:
            for i in range(3):
                f.seek(i * 40 * MIB)
                f.write(CHUNK * 24)
        paths = [made.directory / str(i) for i in range(4)]
        threads = [threading.Thread(target=copied, args=(source, path)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(map(pieces, paths)) <= 2 * 3 * 4
        for path in paths:
            assert path.stat().st_blocks * 512 <= 72 * MIB + 64 * KIB


def test_pacedcp_preserves_the_time(path: Path) -> None:
    source = path.with_name("source")
    source.write_bytes(CHUNK * 3)
    os.utime(source, ns=(10**18 + 5, 10**18 + 7))
    command = [sys.executable, "-m", "pacedio.cli.pacedcp", "-p", source, path]
    subprocess.run(command, check=True)
    assert path.stat().st_mtime_ns == 10**18 + 7
    assert holds_only_its_own(path)


# ---- a full file system ----


@pytest.mark.parametrize("kind", HELPED)
def test_a_file_system_is_filled_to_the_last_block(machine: Machine, kind: str) -> None:
    """By two writers, as by plain ones: what one has allocated ahead is no loss to the other."""
    sizes = {}
    ways: dict[str, Callable[[Path], Any]] = {"plain": lambda path: path.open("wb", 0), "auto": opens}
    for name, how in ways.items():
        with machine.mounted(kind, 384 * MIB) as made:
            paths = [made.directory / "a", made.directory / "b"]
            files = [how(path) for path in paths]
            full = [False, False]
            while not all(full):
                for i, f in enumerate(files):
                    if full[i]:
                        continue
                    full[i] = True
                    with contextlib.suppress(OSError):
                        full[i] = f.write(CHUNK[: 128 * KIB]) < 128 * KIB
                        f.flush()
            for f in files:
                with contextlib.suppress(OSError):
                    f.close()
            sizes[name] = sum(path.stat().st_size for path in paths)
            assert all(allocated_beyond(path) == 0 for path in paths)
    # File systems keep a little back for what says where the blocks are, more or less of it by luck.
    assert sizes["auto"] >= sizes["plain"] - 2 * MIB


# ---- what it costs ----


SMALL = """
import os, sys, pacedio
directory = sys.argv[1]
open(os.path.join(directory, "begin"), "w").close()
for i in range(10):
    with pacedio.open(os.path.join(directory, str(i)), "wb") as f:
        f.write(bytes(100_000))
"""


def test_small_files_pay_nothing(ext4: FileSystem, tmp_path: Path) -> None:
    calls = system_calls(SMALL, ext4.directory, log=tmp_path / "log")
    assert len([call for call in calls if call.startswith("fdatasync(")]) == 10
    ours = ("fallocate(", "ftruncate(", "fstatfs(", "statx(")
    assert [call for call in calls if call.startswith(ours) or "FS_IOC" in call or "mountinfo" in call] == []


# ---- what can fail, and is never an error of the data ----


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with simulated() as made:
        yield made


def write(path: Path, size: int = 4 * MIB, mode: str = "wb", pacing: Pacing | None = None) -> Any:
    with opens(path, mode, pacing or FIXED) as f:
        for at_ in range(0, size, 100_000):
            f.write(CHUNK[: min(100_000, size - at_)])
    assert f.stats.error is None
    return f


def test_one_step_and_its_release(kernel: Kernel, tmp_path: Path) -> None:
    write(tmp_path / "file")
    assert kernel.allocated == [(0, STEP)]
    assert kernel.blocks_until == 4 * MIB
    assert kernel.count("ftruncate") == 1
    assert kernel.calls.index("fallocate") < kernel.calls.index("sync_file_range")
    last = len(kernel.calls) - 1 - kernel.calls[::-1].index("fdatasync")
    assert kernel.calls.index("ftruncate") < last


def test_a_file_below_a_window(kernel: Kernel, tmp_path: Path) -> None:
    write(tmp_path / "file", 512 * KIB - 1)
    assert kernel.count("fallocate", "next_extent", "available", "ftruncate", "status", "file_system") == 0


def test_steps_grow_with_the_file_and_join(kernel: Kernel, tmp_path: Path) -> None:
    with opens(tmp_path / "file", pacing=Pacing(window="64MiB", limit="128MiB")) as f:
        for _ in range(9):
            f.write(bytes(64 * MIB))
    assert kernel.allocated == [(0, STEP), (STEP, 2 * STEP), (2 * STEP, 4 * STEP), (4 * STEP, 8 * STEP)]
    assert kernel.blocks_until == 9 * 64 * MIB


@pytest.mark.parametrize(("room", "ahead"), [(64 * MIB - 1, 0), (640 * MIB, 10 * MIB), (0, 0)])
def test_less_where_space_is_short(kernel: Kernel, tmp_path: Path, room: int, ahead: int) -> None:
    kernel.room = room
    write(tmp_path / "file", 3 * MIB)
    asked = [to - off for off, to in kernel.allocated]
    assert asked == ([] if not ahead else [asked[0]])
    assert sum(asked) <= ahead + MIB  # what was written is not counted
    assert kernel.count("available") == 1  # it is not asked for each window again


def test_space_that_comes_back_is_used(kernel: Kernel, tmp_path: Path) -> None:
    kernel.room = MIB
    with opens(tmp_path / "file") as f:
        f.write(bytes(4 * MIB))
        kernel.room = 1 << 40
        f.write(bytes(20 * MIB))
    assert len(kernel.allocated) == 1


NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EFBIG, errno.EIO, errno.EINTR)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@pytest.mark.parametrize("code", NOT_HERE + NO_ROOM, ids=errno.errorcode.get)
def test_fallocate_that_fails_is_tried_once(kernel: Kernel, tmp_path: Path, code: int) -> None:
    kernel.faults["fallocate"] = always(code)
    kernel.blocks_until = STEP  # some of it may have been allocated all the same
    write(tmp_path / "file")
    assert kernel.count("fallocate") == 1
    assert kernel.blocks_until < STEP
    assert (tmp_path / "file").stat().st_size == 4 * MIB


@pytest.mark.parametrize("call", ["next_extent", "available", "file_system"])
def test_what_cannot_be_asked(kernel: Kernel, tmp_path: Path, call: str) -> None:
    kernel.faults[call] = always(errno.EOPNOTSUPP)
    write(tmp_path / "file")
    assert kernel.allocated == []
    assert max(kernel.count("next_extent"), kernel.count("available")) <= 1


@pytest.mark.parametrize("magic", [EXT4, XFS, BTRFS, TMPFS, OVERLAYFS, 0x6969])
def test_types(kernel: Kernel, tmp_path: Path, magic: int) -> None:
    kernel.magic = magic
    write(tmp_path / "file")
    assert bool(kernel.allocated) == (magic in (EXT4, XFS, BTRFS))


@pytest.mark.parametrize(
    ("fault", "flags"), [(None, COMPRESSED), ("inode_flags", 0), ("mount_id", 0), ("open", 0), ("read", 0)]
)
def test_btrfs_that_may_compress(kernel: Kernel, tmp_path: Path, fault: str | None, flags: int) -> None:
    kernel.magic = BTRFS
    kernel.inode = flags
    if fault:
        kernel.faults[fault] = always(errno.EACCES)
    write(tmp_path / "file")
    assert kernel.allocated == []


MOUNTS = "\n".join(
    [
        "25 1 254:0 / / rw,relatime - ext4 /dev/vda rw,compress=not-mine",
        "1{0} 25 0:30 / /mnt/a rw - btrfs /dev/vdb rw,compress=zstd:3,space_cache",
        "{0} 25 0:31 / {1} rw,relatime shared:3 - btrfs /dev/vdc rw,{2}space_cache=v2,subvolid=5,subvol=/",
        "99 25 0:32 / /mnt/c rw - btrfs /dev/vdd rw,compress-force=lzo",
        "",
    ]
)


@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize("option", ["", "compress=zstd:3,", "compress-force=lzo,", "nodatasum,", "comp,compr,"])
def test_the_mount_is_found(kernel: Kernel, tmp_path: Path, option: str, piece: int) -> None:
    text = MOUNTS.format(31, "/mnt/" + "long/" * 900, option).encode()
    given = tmp_path / "mountinfo"
    given.write_bytes(text)
    kernel.magic = BTRFS

    def opened(name: Any, flags: int) -> int:
        assert ffi.string(name) == b"/proc/self/mountinfo"
        return os.open(given, flags | os.O_CLOEXEC)

    kernel.replace("open", opened)
    kernel.replace("mount_id", lambda fd: 31)
    kernel.replace("read", lambda fd, buf, n: kernel.real["read"](fd, buf, min(n, piece)))
    write(tmp_path / "file")
    assert bool(kernel.allocated) == ("compress" not in option)


def test_a_mount_that_is_not_listed(kernel: Kernel, tmp_path: Path) -> None:
    kernel.magic = BTRFS
    kernel.replace("mount_id", lambda fd: 1 << 40)
    write(tmp_path / "file")
    assert kernel.allocated == []


@pytest.mark.parametrize(("flags", "alone"), [(0, True), (0x800, True), (DELALLOC, False), (DELALLOC | 2, False)])
def test_somebody_elses_blocks(kernel: Kernel, tmp_path: Path, flags: int, alone: bool) -> None:
    kernel.extent = (8 * MIB, MIB, flags)
    write(tmp_path / "file")
    assert (kernel.allocated == []) == alone
    assert kernel.count("ftruncate") == (0 if alone else 1)


@pytest.mark.parametrize("code", NO_ROOM, ids=errno.errorcode.get)
@pytest.mark.parametrize("engine", ["range", "uncached"])
def test_a_write_without_space_is_tried_again_without_the_rest(
    kernel: Kernel, tmp_path: Path, code: int, engine: str
) -> None:
    name = "write_uncached" if engine == "uncached" else "write"
    kernel.faults[name] = at(8, code=code)
    with opens(tmp_path / "file", pacing=Pacing(engine=engine), buffering=0) as f:
        for _ in range(20):
            assert f.write(CHUNK[: 256 * KIB]) == 256 * KIB
    assert kernel.count("ftruncate") == 2  # then, and at close
    assert f.stats.error is None
    assert (tmp_path / "file").read_bytes() == CHUNK[: 256 * KIB] * 20


def test_a_write_without_space_and_nothing_to_give_back(kernel: Kernel, tmp_path: Path) -> None:
    kernel.faults["write"] = at(2, code=errno.ENOSPC)
    f = opens(tmp_path / "file", pacing=FIXED.replace(preallocate="off"), buffering=0)
    f.write(CHUNK[: 512 * KIB])
    with pytest.raises(OSError, match="No space"):
        f.write(CHUNK)
    assert kernel.count("write") == 2
    with pytest.raises(OSError, match="No space"):
        f.close()


def test_it_is_tried_again_once_only(kernel: Kernel, tmp_path: Path) -> None:
    kernel.faults["write"] = lambda number: -errno.ENOSPC if number >= 3 else None
    f = opens(tmp_path / "file", pacing=FIXED, buffering=0)
    f.write(CHUNK)
    with pytest.raises(OSError, match="No space"):
        f.write(CHUNK)
    assert kernel.count("write") == 4
    assert kernel.count("ftruncate") == 1
    with pytest.raises(OSError, match="No space"):
        f.close()
    assert kernel.count("ftruncate") == 1


def test_the_release_is_repeated_after_a_signal(kernel: Kernel, tmp_path: Path) -> None:
    kernel.faults["ftruncate"] = at(1, code=errno.EINTR)
    write(tmp_path / "file")
    assert kernel.count("ftruncate") == 2
    assert kernel.blocks_until == 4 * MIB


def test_a_release_that_fails_is_no_error(kernel: Kernel, tmp_path: Path) -> None:
    kernel.faults["ftruncate"] = always(errno.EIO)
    write(tmp_path / "file")
    assert kernel.count("ftruncate") == 1


def test_a_writer_that_leaves_holes_is_left_alone(kernel: Kernel, tmp_path: Path) -> None:
    with opens(tmp_path / "file") as f:
        for i in range(5):
            f.seek(i * 8 * MIB)
            f.write(CHUNK)
    assert kernel.count("fallocate") == 1
    assert kernel.count("ftruncate") == 1
