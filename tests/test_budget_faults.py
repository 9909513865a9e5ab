"""What must not hold up or bring down those who share a budget: writers that join late, garbage in the shared file, a
disk that fails for one of them, a forked child. Nothing here depends on how long anything takes.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import FileSystem, Machine

import pacedio
from pacedio import Pacing
from pacedio._native import ffi, lib

KIB = 1024
MIB = 1024 * KIB
PIECE = 64 * KIB
HANGING = 20  # seconds; nothing takes so long unless it hangs
SHARED = Path(f"/dev/shm/pacedio-{os.geteuid()}")
ALONE = Pacing(share="process")


def in_a_thread(do: Callable[[], None]) -> None:
    """Fails where it hangs, and where it fails."""
    done: list[bool] = []

    def run() -> None:
        do()
        done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANGING)
    assert done


def test_windows_started_before_joining_hold_nobody_up(ext4: FileSystem) -> None:
    """More of them than any limit, each in a writer that is idle from then on."""
    pacing = Pacing(window=PIECE, share="process")
    writers = []

    def write() -> None:
        with pacedio.open(ext4.directory / "first", "wb", 0, pacing=ALONE) as f:
            for _ in range(32):
                f.write(bytes(MIB))  # the limit is known, and larger than what a small file may be
        for number in range(100):
            writers.append(pacedio.open(ext4.directory / f"file {number}", "wb", 0, pacing=pacing))
            for _ in range(3):
                writers[-1].write(bytes(PIECE))

    in_a_thread(write)
    for writer in writers:
        writer.close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a /dev/shm to write in")
@pytest.mark.parametrize("garbage", [b"\x01", b"\x7f", b"\x80", b"\xff"], ids=bytes.hex)
@pytest.mark.parametrize("polite", [False, True])
def test_garbage_in_the_shared_file_holds_nobody_up(machine: Machine, garbage: bytes, polite: bool) -> None:
    script = (
        "import sys, pacedio\n"
        "with pacedio.open(sys.argv[1], 'wb', 0, pacing=pacedio.Pacing(polite=len(sys.argv) > 2)) as f:\n"
        "    for _ in range(64):\n"
        "        f.write(bytes(65536))\n"
        "assert f.stats.share == 'host'\n"
    )
    with machine.mounted("ext4", 64 * MIB) as made:
        device = made.directory.stat().st_dev
        command = [sys.executable, "-c", script, str(made.directory / "file"), *(["polite"] if polite else [])]
        subprocess.run(command, check=True, timeout=HANGING)
        (file,) = SHARED.glob(f"*-{os.major(device)}:{os.minor(device)}")
        with file.open("r+b") as f:
            f.write(garbage * file.stat().st_size)
        try:
            subprocess.run(command, check=True, timeout=HANGING)
        finally:
            file.unlink()


def test_an_error_is_heard_by_its_writer_only(machine: Machine) -> None:
    """And nothing is accepted after it, whoever it was that met it."""
    with machine.failing_disk() as failing:
        good = [pacedio.open(failing.directory / f"good {n}", "wb", 0, pacing=ALONE) for n in range(2)]
        for writer in good:
            writer.write(os.urandom(4 * MIB))
            os.fsync(writer.fileno())  # there is room for these blocks from now on
        stop = threading.Event()
        errors: list[OSError] = []

        def write_again(writer: pacedio.PacedWriter) -> None:
            try:
                while not stop.is_set():
                    writer.seek(0)
                    for _ in range(4 * MIB // PIECE):
                        writer.write(os.urandom(PIECE))
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=write_again, args=(writer,)) for writer in good]
        for thread in threads:
            thread.start()
        bad = pacedio.open(failing.directory / "bad", "wb", 0, pacing=ALONE)
        accepted_after = 0
        heard = None
        try:
            for _ in range(64 * MIB // PIECE):
                bad.write(os.urandom(PIECE))
                accepted_after += bad.stats.error is not None
        except pacedio.WritebackError as error:
            heard = error
        stop.set()
        for thread in threads:
            thread.join()
        for writer in good:
            writer.close()
        with contextlib.suppress(pacedio.WritebackError):
            bad.close()
        assert heard is not None
        assert not errors
        assert accepted_after == 0


FORKS = """
import os, sys
from pacedio._native import ffi, lib
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
writer = lib.pio_writer_new(fd, ffi.new("pio_options *", {"drop_cache": 1}))
data = bytes(1 << 20)
def write():
    left = 8 << 20
    while left:
        left -= lib.pio_write(writer, data, min(left, len(data)))
write()
child = os.fork()
if child == 0:
    write()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_childs_copy_of_a_writer_writes_on(ext4: FileSystem) -> None:
    """Below Python, which gives a child a writer of its own."""
    path = ext4.directory / "file"
    subprocess.run([sys.executable, "-c", FORKS, str(path)], check=True, timeout=HANGING)
    assert path.stat().st_size == 16 * MIB


def finishes(work: Callable[[], object]) -> bool:
    """In a thread that a hang leaves behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANGING)
    return not thread.is_alive()


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The budget is that of one small window: whoever keeps any of it is in everybody's way."""
    monkeypatch.setattr("pacedio.writer.limit_cap", lambda: 64 * KIB)
    try:
        yield
    finally:
        lib.pio_set_cap(0)


@contextlib.contextmanager
def replaced(name: str, function: Callable[..., int]) -> Iterator[None]:
    """An entry of the system call table."""
    table = lib.pio_sys_table
    real = getattr(table, name)
    callback: Any = ffi.callback(ffi.typeof(real), function)
    setattr(table, name, callback)
    try:
        yield
    finally:
        setattr(table, name, real)


def write(file_system: FileSystem, size: int = 2 * MIB, share: str = "process") -> None:
    with pacedio.open(file_system.directory / "other", "wb", sync=False, pacing=Pacing(share=share)) as f:
        f.write(bytes(size))


@pytest.mark.parametrize("window", [64 * KIB, 256 * KIB])
def test_nobody_sleeps_while_there_is_something_to_wait_for(
    mounts: Any, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Whoever is first in line finds nothing to wait for while others hold it, and is to hear when they let go."""
    real = lib.pio_sys_table.futex_wait
    results: collections.Counter[int] = collections.Counter()

    def futex_wait(word: Any, value: int, ns: int) -> int:
        result = int(real(word, value, ns))
        results[result] += 1
        return result

    monkeypatch.setattr("pacedio.writer.limit_cap", lambda: 512 * KIB)
    pacing = Pacing(window=window, share="process")
    data = bytes(MIB)

    def work(path: Path) -> None:
        with pacedio.open(path, "wb", 0, pacing=pacing, sync=False) as f:
            for _ in range(16):
                f.write(data)

    try:
        with mounts.directory("btrfs") as made, replaced("futex_wait", futex_wait):
            threads = [threading.Thread(target=work, args=(made.directory / str(i),)) for i in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        lib.pio_set_cap(0)
    windows = 16 * 16 * MIB // window
    assert results[-errno.ETIMEDOUT] < windows / 20
    # Nor does anybody wake for nothing: a change of the word before its sleep is a wake.
    assert sum(results.values()) < 4 * windows


@pytest.mark.usefixtures("one_window")
def test_who_sleeps_for_its_rate_holds_nobody_up(ext4: FileSystem) -> None:
    real = lib.pio_sys_table.sleep
    finished: list[bool] = []
    written = 0

    def sleep(ns: int) -> int:
        if not finished and written % (64 * KIB) != 0:  # a part of a window is written, and room granted for the rest
            finished.append(finishes(lambda: write(ext4)))
        return int(real(ns))

    path = ext4.directory / "slow"
    with (
        pacedio.open(path, "wb", sync=False, pacing=Pacing(rate="10MB/s", share="process")) as f,
        replaced("sleep", sleep),
    ):
        while not finished:  # the first burst does not sleep
            f.write(bytes(20 * KIB))
            f.flush()
            written += 20 * KIB
    assert finished == [True]


@pytest.mark.usefixtures("one_window")
def test_who_syncs_holds_nobody_up(ext4: FileSystem) -> None:
    """All windows are complete by the time that the data are synced, which may take long for other reasons."""
    real = lib.pio_sys_table.fdatasync
    finished: list[bool] = []

    def fdatasync(fd: int) -> int:
        if not finished:
            finished.append(finishes(lambda: write(ext4)))
        return int(real(fd))

    with pacedio.open(ext4.directory / "synced", "wb", pacing=Pacing(share="process")) as f:
        f.write(bytes(1000 * KIB))
        with replaced("fdatasync", fdatasync):
            f.sync()
    assert finished == [True]
