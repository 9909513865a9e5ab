"""Threads, forks and signals: every byte once, whoever interrupts or inherits a writer."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import pacedio
from pacedio import Pacing

KIB = 1024
MIB = 1024 * KIB
SMALL = Pacing(window="4KiB", limit="8KiB")

# Python 3.12 and later warn of every fork beside threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


# ---- threads -----------------------------------------------------------------------------------------------------


def record(thread: int, number: int) -> bytes:
    return b"<%d:%d:%s>\n" % (thread, number, b"x" * (number * 7919 % 3000 if number % 50 else 200_000))


@pytest.mark.parametrize("buffering", [-1, 0, 100])
def test_threads_write_whole_records(tmp_path: Path, buffering: int) -> None:
    count, threads = 100, 8

    def produce(thread: int) -> None:
        for number in range(count):
            f.write(record(thread, number))
            if number % 37 == 0:
                f.flush()

    with pacedio.open(tmp_path / "file", "wb", buffering, pacing=SMALL) as f:
        running = [threading.Thread(target=produce, args=(thread,)) for thread in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    written = (tmp_path / "file").read_bytes().splitlines(keepends=True)
    expected = [record(thread, number) for thread in range(threads) for number in range(count)]
    assert Counter(written) == Counter(expected)
    for thread in range(threads):
        mine = [line for line in written if line.startswith(b"<%d:" % thread)]
        assert mine == expected[thread * count : (thread + 1) * count]


def test_several_writers_in_threads(tmp_path: Path) -> None:
    def produce(thread: int) -> None:
        with pacedio.open(tmp_path / str(thread), "wb", pacing=SMALL, atomic=thread % 2 == 0) as f:
            for number in range(100):
                f.write(record(thread, number))
        stats.append(f.stats)

    stats: list[pacedio.WriteStats] = []
    running = [threading.Thread(target=produce, args=(thread,)) for thread in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for number in range(8):
        assert (tmp_path / str(number)).read_bytes() == b"".join(record(number, i) for i in range(100))
    assert len(stats) == 8
    assert all(s.most_in_flight <= s.limit for s in stats)


def test_close_while_another_thread_writes(tmp_path: Path) -> None:
    """The descriptor's number may be somebody else's at once: nothing of the writer may reach it."""
    for _ in range(20):
        started = threading.Event()

        def produce(f: Any, started: threading.Event) -> None:
            def write_on() -> None:
                while True:
                    f.write(b"x" * 10_000)
                    started.set()

            with pytest.raises(ValueError, match="closed"):
                write_on()

        f = pacedio.open(tmp_path / "file", "wb", pacing=SMALL, sync=False)
        fd = f.fileno()
        thread = threading.Thread(target=produce, args=(f, started))
        thread.start()
        started.wait()
        f.close()
        with open(tmp_path / "other", "wb") as other:
            assert other.fileno() == fd
            thread.join()
        assert (tmp_path / "other").read_bytes() == b""
        assert (tmp_path / "file").stat().st_size % 10_000 == 0


# ---- forks --------------------------------------------------------------------------------------------------------


def in_child(do: Callable[[], object], *, leave: Callable[[], object] = lambda: os._exit(0)) -> None:
    """Do it in a forked child, and wait for it."""
    child = os.fork()
    if child == 0:
        try:
            do()
            leave()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


MODES = [("wb", b"parent, ", b"child, "), ("w", "parent, ", "child, "), ("w+b", b"parent, ", b"child, ")]


@pytest.mark.parametrize(("mode", "parents", "childs"), MODES)
@pytest.mark.parametrize("how", ["close", "collect", "flush", "discard", "leave"])
def test_a_child_does_not_write_what_it_inherited(
    tmp_path: Path, mode: str, parents: Any, childs: Any, how: str
) -> None:
    f: Any = pacedio.open(tmp_path / "file", mode, **({} if "b" in mode else {"encoding": "utf-8"}))
    f.write(parents)

    def do() -> None:
        nonlocal f
        if how == "close":
            f.close()
        elif how == "collect":
            import warnings

            warnings.simplefilter("ignore")
            f = None
            gc.collect()
        elif how == "flush":
            f.flush()
        elif how == "discard":
            f.discard()

    in_child(do)
    f.write(parents)
    f.close()
    assert (tmp_path / "file").read_bytes() == b"parent, parent, "


@pytest.mark.parametrize(("mode", "parents", "childs"), MODES)
def test_a_child_may_write_its_own(tmp_path: Path, mode: str, parents: Any, childs: Any) -> None:
    f: Any = pacedio.open(tmp_path / "file", mode, pacing=SMALL, **({} if "b" in mode else {"encoding": "utf-8"}))
    f.write(parents * 10_000)
    f.write(parents)
    f.flush()
    f.write(parents)

    def do() -> None:
        assert f.stats.bytes == 0
        f.write(childs * 10_000)
        f.close()
        assert f.stats.bytes == 70_000
        assert f.stats.most_in_flight <= SMALL.limit

    in_child(do)
    f.write(parents)
    f.close()
    whole = (tmp_path / "file").read_bytes()
    assert whole == b"parent, " * 10_001 + b"child, " * 10_000 + b"parent, " * 2
    assert f.stats.bytes == 8 * 10_003


SCRIPT = """
import os, sys, threading, time, warnings
import pacedio
warnings.simplefilter("ignore")
path, mode = sys.argv[1:]
f = pacedio.open(path, mode, **({} if "b" in mode else {"encoding": "utf-8"}))
data = b"once" if "b" in mode else "once"
"""


def run(script: str, *arguments: object, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("mode", ["wb", "w", "w+b"])
def test_a_child_that_ends_as_processes_end(tmp_path: Path, mode: str) -> None:
    script = SCRIPT + (
        "f.write(data)\n"
        "child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "f.write(data)\n"
        "f.close()\n"
    )
    done = run(script, tmp_path / "file", mode)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_bytes() == b"onceonce"


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_fork_while_another_thread_writes(tmp_path: Path, mode: str) -> None:
    """The thread, which holds the buffer's lock at times, does not exist in the child."""
    script = SCRIPT + (
        "data *= 250\n"  # 1000 bytes
        "stop = False\n"
        "rounds = 0\n"
        "def produce():\n"
        "    global rounds\n"
        "    while not stop:\n"
        "        f.write(data * 300)\n"
        "        f.write(data)\n"
        "        rounds += 1\n"
        "thread = threading.Thread(target=produce)\n"
        "thread.start()\n"
        "for number in range(20):\n"
        "    time.sleep(0.003)\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        if number % 2:\n"
        "            f.write(data)\n"
        "            f.close()\n"
        "        sys.exit(0)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    assert code == 0, code\n"
        "stop = True\n"
        "thread.join()\n"
        "f.close()\n"
        "print(rounds)\n"
    )
    done = run(script, tmp_path / "file", mode)
    assert (done.returncode, done.stderr) == (0, "")
    written = (tmp_path / "file").read_bytes()
    assert len(written) == int(done.stdout) * 301_000 + 10 * 1000
    assert written == b"once" * (len(written) // 4)


def work(arguments: tuple[int, str]) -> int:
    number, directory = arguments
    with pacedio.open(f"{directory}/{number}", "wb", pacing=SMALL) as f:
        f.write(record(number, number))
    return len(record(number, number))


def test_a_pool_of_forked_processes(tmp_path: Path) -> None:
    with pacedio.open(tmp_path / "parent", "wb") as f:
        f.write(b"unwritten when the pool forks")
        with multiprocessing.get_context("fork").Pool(4) as pool:
            sizes = pool.map(work, [(number, str(tmp_path)) for number in range(20)])
    assert (tmp_path / "parent").read_bytes() == b"unwritten when the pool forks"
    for number, size in enumerate(sizes):
        assert (tmp_path / str(number)).read_bytes() == record(number, number)
        assert size == len(record(number, number))


def test_a_child_of_a_child(tmp_path: Path) -> None:
    with pacedio.open(tmp_path / "file", "wb") as f:
        f.write(b"parent,")

        def child() -> None:
            f.write(b"child,")
            in_child(lambda: (f.write(b"grandchild,"), f.close()))
            f.close()

        in_child(child)
    assert (tmp_path / "file").read_bytes() == b"grandchild,child,parent,"


def test_a_failed_parent_has_no_failed_child() -> None:
    """What failed is the parent's; the child finds out for itself."""
    f = pacedio.open("/dev/full", "wb", sync=False)
    f.write(b"x")
    with pytest.raises(OSError, match="No space left"):
        f.flush()

    def do() -> None:
        assert f.stats.error is None
        assert f.tell() == 0
        f.close()

    in_child(do)
    with pytest.raises(OSError, match="No space left"):
        f.close()


# ---- signals ----------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """What the handler raises."""


@contextlib.contextmanager
def timer(handler: Callable[[], object], interval: float, signal_number: int = signal.SIGALRM) -> Iterator[None]:
    before = signal.signal(signal_number, lambda number, frame: handler())
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal_number, before)


def raise_interrupted() -> NoReturn:
    raise Interrupted


def test_a_handler_that_returns_is_not_noticed(tmp_path: Path) -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    data = os.urandom(3 * MIB)
    pacing = Pacing(window="64KiB", limit="128KiB", rate="40MB/s")
    with timer(count, 0.0005), pacedio.open(tmp_path / "file", "wb", pacing=pacing) as f:
        f.write(data)
        for at in range(0, len(data), 5000):
            f.write(data[at : at + 5000])
        f.sync()
    assert calls > 50
    assert (tmp_path / "file").read_bytes() == data * 2


def interrupt(step: Callable[[], None], until: Callable[[], bool], interval: float = 0.0003) -> int:
    """Repeat a step under a rain of signals whose handler raises; the step knows how far it came. After 300 exceptions
    it stops raining, since a slow disk might not let it come far between two.
    """
    interruptions = 0
    armed = False

    def handler(number: int, frame: object) -> None:
        nonlocal interruptions, armed
        if armed and interruptions < 300:
            armed = False
            interruptions += 1
            raise Interrupted

    def work() -> None:
        nonlocal armed
        armed = True
        while not until():
            armed = True
            step()
        armed = False

    before = signal.signal(signal.SIGALRM, handler)
    gc.disable()  # Hypothesis is called at each collection, and what a handler raises there would be lost
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        done = False
        while not done:
            try:
                work()
                done = True
            except Interrupted:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    return interruptions


@pytest.mark.parametrize("mode", ["wb", "w+b"])
@pytest.mark.parametrize("buffering", [-1, 64, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_interrupted_small_writes_arrive_once(tmp_path: Path, mode: str, buffering: int, seed: int) -> None:
    """A call that raised accepted all or nothing, and `tell` says which."""
    choose = random.Random(seed)
    data = choose.randbytes(300_000 if buffering == 64 else 3 * MIB)
    longest = min(3000, 64 if buffering == 64 else 3000)
    sizes = [choose.randrange(1, longest + 1) for _ in range(2000)]
    at = number = 0

    def step() -> None:
        nonlocal at, number
        at = f.tell()
        piece = data[at : at + sizes[number % len(sizes)]]
        number += 1
        f.write(piece)

    with pacedio.open(tmp_path / "file", mode, buffering, pacing=SMALL, sync=False) as f:
        interruptions = interrupt(step, lambda: f.tell() == len(data))
        assert f.stats.bytes <= len(data)
    assert interruptions > 3
    assert (tmp_path / "file").read_bytes() == data
    assert f.stats.bytes == len(data)


def test_interrupted_writes_without_tell(tmp_path: Path) -> None:
    """Counted records: no byte of an accepted one is lost or written twice, and none is torn."""
    sure: list[int] = []
    # A record of more than the buffer may be torn by an exception, so there is none of number 50, 100...
    numbers = iter([number for number in range(100_000) if number % 50])

    def step() -> None:
        number = next(numbers)
        f.write(record(0, number))
        sure.append(number)

    with pacedio.open(tmp_path / "file", "wb", pacing=SMALL, sync=False) as f:
        interruptions = interrupt(step, lambda: len(sure) > 3000)
    assert interruptions > 3
    lines = (tmp_path / "file").read_bytes().splitlines(keepends=True)
    found = [int(line.split(b":")[1]) for line in lines]
    assert [record(0, n) for n in found] == lines  # whole
    assert sorted(set(found)) == found  # once, in order
    assert set(sure) <= set(found)
    assert len(found) - len(sure) <= interruptions  # a handler may raise after the call, before it is counted


@pytest.mark.parametrize("mode", ["wb", "w+b"])
def test_interrupted_large_writes(tmp_path: Path, mode: str) -> None:
    """More than the buffer goes straight to the file, and an exception leaves a part of it written, as with io. The
    position says how much."""
    data = random.Random(1).randbytes(8 * MIB)

    def step() -> None:
        at = f.tell()
        f.write(memoryview(data)[at : at + 700_000])

    with pacedio.open(tmp_path / "file", mode, pacing=SMALL, sync=False) as f:
        interruptions = interrupt(step, lambda: f.tell() == len(data), 0.001)
        assert f.tell() == len(data)
    assert interruptions > 3
    assert (tmp_path / "file").read_bytes() == data


def test_interrupted_writes_of_all_sizes_with_seeks(tmp_path: Path) -> None:
    choose = random.Random(2)
    data = choose.randbytes(4 * MIB)
    end = 0

    def step() -> None:
        nonlocal end
        end = max(end, f.tell())
        if choose.random() < 0.2:
            at = max(0, end - choose.randrange(200_000))
            f.seek(at)
            assert f.tell() == at
            if choose.random() < 0.5:
                assert f.read(5000) == data[at : min(at + 5000, end)]
                f.seek(at)
            f.write(data[at : min(at + 100_000, end)])
            f.seek(0, 2)
            assert f.tell() == end
        elif choose.random() < 0.1:
            f.flush()
        f.write(data[end : end + choose.choice([10, 1000, 20_000, 300_000])])

    def until() -> bool:
        nonlocal end
        end = f.seek(0, 2)
        return end == len(data)

    with pacedio.open(tmp_path / "file", "w+b", pacing=SMALL, sync=False) as f:
        interruptions = interrupt(step, until, 0.0005)
    assert interruptions > 3
    assert (tmp_path / "file").read_bytes() == data


def test_interrupted_text(tmp_path: Path) -> None:
    """TextIOWrapper hands its text on in pieces; a line that was accepted arrives once."""
    sure: list[int] = []
    numbers = iter(range(10**6))

    def step() -> None:
        number = next(numbers)
        f.write(f"{number}\n")
        sure.append(number)

    with pacedio.open(tmp_path / "file", "w", encoding="ascii", pacing=SMALL, sync=False) as f:
        interruptions = interrupt(step, lambda: len(sure) > 200_000)
    assert interruptions > 3
    found = [int(line) for line in (tmp_path / "file").read_text().split()]
    # io's own wrapper forgets its pending text when its buffer's write raises, so lines may be missing, never doubled.
    assert sorted(set(found)) == found


def test_after_writes_through_the_native_writer(tmp_path: Path) -> None:
    """What others wrote is not taken for the result of an interrupted write."""
    copying = pytest.importorskip("pacedio.copying")
    source = tmp_path / "source"
    source.write_bytes(os.urandom(MIB))
    data = random.Random(3).randbytes(MIB)
    with pacedio.open(tmp_path / "file", "wb", pacing=SMALL, sync=False) as f:
        fd = os.open(source, os.O_RDONLY)
        assert copying.copy_contents(fd, f) == MIB
        os.close(fd)

        def step() -> None:
            at = f.tell() - MIB
            f.write(data[at : at + 3000])

        assert interrupt(step, lambda: f.tell() == 2 * MIB, 0.0002) > 3
    assert (tmp_path / "file").read_bytes() == source.read_bytes() + data


@pytest.mark.parametrize("size", [1000, 10 * MIB])
def test_a_stall_ends_with_the_handlers_exception(tmp_path: Path, size: int) -> None:
    """With 1 MB/s and windows of 64 KiB, a window takes 66 ms."""
    pacing = Pacing(window="64KiB", limit="128KiB", rate="1MB/s")
    data = random.Random(4).randbytes(size)
    f = pacedio.open(tmp_path / "file", "wb", pacing=pacing, sync=False)

    def write_on() -> None:
        while True:
            f.write(data)

    signal.signal(signal.SIGALRM, lambda number, frame: raise_interrupted())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begin = time.monotonic()
        with pytest.raises(Interrupted):
            write_on()
        took = time.monotonic() - begin
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert 0.25 < took < 0.7
    # At most a buffer's worth is left.
    f.close()
    assert (tmp_path / "file").stat().st_size < 700_000
    written = (tmp_path / "file").read_bytes()
    assert written == (data * (len(written) // size + 1))[: len(written)]


def test_ctrl_c_ends_a_process(tmp_path: Path) -> None:
    script = (
        "import sys, pacedio\n"
        "pacing = pacedio.Pacing(window='64KiB', limit='128KiB', rate='1MB/s')\n"
        "with pacedio.open(sys.argv[1], 'wb', pacing=pacing, atomic=True) as f:\n"
        "    print('ready', flush=True)\n"
        "    f.write(bytes(100 * 1024 * 1024))\n"
    )
    target = tmp_path / "file"
    target.write_bytes(b"older")
    command = [sys.executable, "-c", script, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, errors = process.communicate(timeout=10)
        took = time.monotonic() - begin
    assert took < 1
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert target.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["file"]


def test_a_signal_during_sync(tmp_path: Path) -> None:
    """It may be called again after a handler raised in it."""
    rounds = 0

    def step() -> None:
        nonlocal rounds
        f.write(b"x")
        f.sync()
        rounds += 1

    with pacedio.open(tmp_path / "file", "wb", pacing=SMALL) as f:
        interrupt(step, lambda: rounds >= 3)
    assert set((tmp_path / "file").read_bytes()) == set(b"x")


@pytest.mark.parametrize("arguments", [{}, {"sync": False}, {"atomic": True}], ids=str)
def test_a_signal_during_close(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Whenever a handler raises, the descriptor is released in the end, and an atomic file is whole or not there."""
    interruptions = 0
    for number in range(100):
        f = pacedio.open(tmp_path / "file", "wb", pacing=SMALL, **arguments)
        fd = f.fileno()
        f.write(b"%d" % (number % 10) * 100_000)
        interruptions += interrupt(f.close, lambda f=f: f.closed, 0.00005 + number * 5e-6)  # type: ignore[misc]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        if "atomic" in arguments and (tmp_path / "file").exists():
            whole = (tmp_path / "file").read_bytes()
            assert len(whole) == 100_000
            assert len(set(whole)) == 1
        assert len(os.listdir(tmp_path)) <= 1
    assert interruptions > 10
