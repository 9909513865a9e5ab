"""The automatic limit, and the budget that all writers of a device share: in threads, in processes, and with those that
stop, die or fork in the middle. Nothing here depends on how long anything takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel import simulated
from machine import FileSystem, Machine, Undo, need, needs_cachestat, observed

import pacedio
from pacedio import POLITE, Pacing
from pacedio.copying import copy_contents

KIB = 1024
MIB = 1024 * KIB
PIECE = 64 * KIB
WINDOW = 512 * KIB  # the largest that the controller chooses
SHARED = Path(f"/dev/shm/pacedio-{os.geteuid()}")
HANGING = 60  # seconds; nothing takes so long unless it hangs

# Python 3.12 and later warn of every fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

needs_shared_memory = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a /dev/shm to write in")


def content(number: int, size: int) -> bytes:
    """Different for each writer, and nowhere the same."""
    block = b"".join(b"%3d %11d\n" % (number, at) for at in range(0, PIECE, 16))
    return b"".join(b"%3d %11d\n" % (number, at) + block[16:] for at in range(0, size, PIECE))


# What a writer in another process does; its argument is a JSON object. It says "ready" after the first piece and goes
# on when told to; it may stop itself after some bytes; and it says what its stats were.
WORKER = """
import json, os, signal, sys
import pacedio
from pacedio import Pacing, observe
job = json.loads(sys.argv[1])
if job["cgroup"]:
    with open(job["cgroup"], "w") as processes:
        processes.write(str(os.getpid()))
largest = 0
with open(job["data"], "rb") as data, pacedio.open(job["path"], "wb", 0, pacing=Pacing(**job["pacing"])) as f:
    f.write(data.read(65536))
    print("ready", flush=True)
    sys.stdin.readline()
    while piece := data.read(65536):
        f.write(piece)
        largest = max(largest, f.stats.limit)
        if f.tell() == job["stop_at"]:
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    sizes = [os.stat(path).st_size for path in job["others"]]
print(json.dumps({"largest": largest, "sizes": sizes, "cap": observe.limit_cap(), **f.stats.as_dict()}), flush=True)
"""


class Worker:
    def __init__(self, directory: Path, number: int, size: int, **job: Any) -> None:
        self.path = directory / f"file {number}"
        self.content = content(number, size)
        data = directory / f"data {number}"
        data.write_bytes(self.content)
        defaults: dict[str, Any] = {"pacing": {}, "stop_at": None, "others": [], "cgroup": None}
        command = [
            sys.executable,
            "-c",
            WORKER,
            json.dumps({"path": str(self.path), "data": str(data), **defaults, **job}),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=HANGING)
        assert self.process.returncode == 0
        assert self.path.read_bytes() == self.content
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def workers(directory: Path, count: int, size: int, **job: Any) -> Iterator[list[Worker]]:
    """Processes that have written their first piece."""
    with contextlib.ExitStack() as undo:
        made = []
        for number in range(count):
            worker = Worker(directory, number, size, **job)
            undo.callback(worker.end)
            made.append(worker)
        for worker in made:
            assert worker.hears() == "ready"
        yield made


def write_all(path: Path, data: bytes, pacing: Pacing | None = None) -> pacedio.WriteStats:
    with pacedio.open(path, "wb", 0, pacing=pacing or Pacing()) as f:
        for at in range(0, len(data), PIECE):
            f.write(data[at : at + PIECE])
    assert path.read_bytes() == data
    return f.stats


def write_in_a_thread(path: Path, size: int) -> None:
    """Fails where it hangs."""
    done: list[pacedio.WriteStats] = []
    thread = threading.Thread(target=lambda: done.append(write_all(path, content(99, size))), daemon=True)
    thread.start()
    thread.join(HANGING)
    assert done


@pytest.fixture(scope="module")
def slow(machine: Machine) -> Iterator[FileSystem]:
    with machine.slow_disk() as made:
        yield made


@pytest.fixture
def directory(slow: FileSystem) -> Iterator[Path]:
    """On a disk that is the bottleneck, whatever the machine's own is."""
    made = slow.directory / "test"
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made)


# ---- many writers -------------------------------------------------------------------------------------------------

WRITERS, SIZE = 8, 20 * MIB


@needs_cachestat
def test_threads_share_the_budget_and_none_starves(directory: Path) -> None:
    paths = [directory / str(number) for number in range(WRITERS)]
    contents = [content(number, SIZE) for number in range(WRITERS)]
    together = threading.Barrier(WRITERS)
    largest = [0] * WRITERS
    written: list[list[int]] = []

    def produce(number: int) -> None:
        with pacedio.open(paths[number], "wb", 0) as f:
            f.write(contents[number][:PIECE])
            together.wait(HANGING)
            for at in range(PIECE, SIZE, PIECE):
                f.write(contents[number][at : at + PIECE])
                largest[number] = max(largest[number], f.stats.limit)
            written.append([path.stat().st_size for path in paths])

    running = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(WRITERS)]
    with observed(*paths) as seen:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(HANGING)
    assert len(written) == WRITERS
    assert [path.read_bytes() for path in paths] == contents
    assert seen["samples"] > 50
    assert seen["most"] <= max(largest) + WINDOW
    assert min(written[0]) >= SIZE // 3


@needs_cachestat
@needs_shared_memory
def test_processes_share_the_budget_and_none_starves(directory: Path) -> None:
    paths = [directory / f"file {number}" for number in range(WRITERS)]
    others = [str(path) for path in paths]
    with workers(directory, WRITERS, SIZE, others=others) as running, observed(*paths) as seen:
        for worker in running:
            worker.go()
        found = [worker.finish() for worker in running]
    assert all(one["share"] == "host" for one in found)
    assert seen["samples"] > 50
    assert seen["most"] <= max(one["largest"] for one in found) + WRITERS * WINDOW
    first = min(found, key=lambda one: sum(one["sizes"]))
    assert min(first["sizes"]) >= SIZE // 3


# ---- those that do nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [4 * MIB, 4 * MIB + 200 * KIB], ids=["whole windows", "half a window"])
def test_an_idle_writer_holds_nobody_up(directory: Path, left: int) -> None:
    data = content(1, 8 * MIB)
    with pacedio.open(directory / "idle", "wb", 0) as idle:
        for at in range(0, left, 40 * KIB):
            idle.write(data[at : min(at + 40 * KIB, left)])
        before = idle.stats.in_flight
        assert before > 0
        write_in_a_thread(directory / "busy", 16 * MIB)
        assert idle.stats.in_flight <= before
        idle.write(data[left:])
    assert (directory / "idle").read_bytes() == data


@needs_shared_memory
@pytest.mark.parametrize("left", [4 * MIB, 4 * MIB + PIECE], ids=["whole windows", "a window begun"])
def test_a_stopped_process_between_two_calls_holds_nobody_up(directory: Path, left: int) -> None:
    with workers(directory, 1, 8 * MIB, stop_at=left) as (worker,):
        worker.go()
        assert worker.hears() == "stops"
        write_in_a_thread(directory / "busy", 16 * MIB)
        worker.process.send_signal(signal.SIGCONT)
        assert worker.finish()["share"] == "host"


def wait_until_stopped(pid: int) -> None:
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


@needs_shared_memory
def test_a_stopped_process_in_the_middle_of_calls_holds_nobody_up(directory: Path) -> None:
    """Ctrl-Z: somewhere in a wait, or asleep in line."""
    with workers(directory, 4, 48 * MIB) as running:
        for worker in running:
            worker.go()
        for round_ in range(2):
            write_in_a_thread(directory / "meanwhile", MIB)
            for worker in running:
                worker.process.send_signal(signal.SIGSTOP)
                wait_until_stopped(worker.process.pid)
            write_in_a_thread(directory / f"busy {round_}", 4 * MIB)
            for worker in running:
                worker.process.send_signal(signal.SIGCONT)
        for worker in running:
            worker.finish()


@needs_shared_memory
def test_a_killed_process_leaves_nothing_locked(directory: Path) -> None:
    with workers(directory, 4, 48 * MIB) as running:
        for worker in running:
            worker.go()
        for worker in running[:3]:
            write_in_a_thread(directory / "meanwhile", MIB)
            worker.process.kill()
            worker.process.wait()
        write_in_a_thread(directory / "busy", 8 * MIB)
        running[3].finish()
    with workers(directory, 1, 4 * MIB) as (another,):
        another.go()
        assert another.finish()["share"] == "host"


@pytest.mark.parametrize("share", ["host", "process"])
def test_a_forked_child_and_its_parent_both_write_on(directory: Path, share: str) -> None:
    data = content(1, 8 * MIB)
    pacing = Pacing(share=share)
    with pacedio.open(directory / "parent", "wb", 0, pacing=pacing) as f:
        f.write(data[: 4 * MIB])
        parents = f.stats.share
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                stats = write_all(directory / "child", content(2, 8 * MIB), pacing)
                os._exit(0 if stats.share == parents else 2)
            os._exit(1)
        f.write(data[4 * MIB :])
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (directory / "parent").read_bytes() == data
    assert (directory / "child").read_bytes() == content(2, 8 * MIB)


# ---- with whom ----------------------------------------------------------------------------------------------------


def shared_files(*devices: int) -> list[Path]:
    """What is there for these devices."""
    return [file for d in devices for file in SHARED.glob(f"*-{os.major(d)}:{os.minor(d)}")]


def forget(*devices: int) -> None:
    """Another disk may have had the number; nobody writes to this one yet."""
    for file in shared_files(*devices):
        file.unlink()


@needs_shared_memory
def test_who_shares_with_nobody_leaves_no_file(machine: Machine) -> None:
    with machine.mounted("ext4") as fresh:
        device = fresh.directory.stat().st_dev
        forget(device)
        stats = write_all(fresh.directory / "alone", content(1, 8 * MIB), Pacing(share="process"))
        assert stats.share == "process"
        assert shared_files(device) == []

        stats = write_all(fresh.directory / "with others", content(1, 8 * MIB))
        assert stats.share == "host"
        (file,) = shared_files(device)
        assert file.stat().st_mode == 0o100600
        assert SHARED.lstat().st_mode == 0o040700


@needs_shared_memory
def test_two_disks_share_nothing(machine: Machine) -> None:
    with machine.mounted("ext4") as one, machine.mounted("ext4") as two:
        devices = [disk.directory.stat().st_dev for disk in (one, two)]
        forget(*devices)
        for disk in (one, two):
            write_all(disk.directory / "file", content(1, 4 * MIB))
        assert len(set(shared_files(*devices))) == 2


@needs_shared_memory
def test_another_disk_of_the_same_number_is_a_stranger(machine: Machine) -> None:
    numbers = set()
    for size in (64, 4):
        with machine.mounted("ext4") as fresh:
            numbers.add(fresh.directory.stat().st_dev)
            stats = write_all(fresh.directory / "file", content(1, size * MIB))
    if len(numbers) > 1:
        pytest.skip("the second disk got another number")
    assert stats.delivery_rate is None or stats.limited_by == "device"
    with machine.mounted("ext4") as fresh, pacedio.open(fresh.directory / "file", "wb", 0) as f:
        f.write(content(1, MIB))
        assert f.stats.delivery_rate is None  # what was learned of the others is not believed


@needs_shared_memory
def test_partitions_share_their_disk(machine: Machine) -> None:
    need("losetup", "mount", "mkfs.ext4", "addpart")
    with Undo() as undo:
        disk = undo.loop(undo.sparse(machine.base / "parted.disk", 256 * MIB), partitions=True)
        whole = os.makedev(*map(int, Path(f"/sys/block/{disk.name}/dev").read_text().split(":")))
        forget(whole)
        parts = []
        for number in (1, 2):
            # Told to the kernel, which thus need not know any kind of partition table.
            start = 2048 + (number - 1) * 64 * MIB // 512
            subprocess.run(["addpart", disk, str(number), str(start), str(64 * MIB // 512)], check=True)
            undo.callback(lambda gone: subprocess.run(["delpart", disk, gone], check=True), str(number))
            device = Path(f"/sys/block/{disk.name}/{disk.name}p{number}/dev").read_text()
            parts.append(os.makedev(*map(int, device.split(":"))))
            node = machine.base / f"partition {number}"
            os.mknod(node, 0o060600, parts[-1])
            undo.callback(node.unlink)
            subprocess.run(["mkfs.ext4", "-q", "-F", node], check=True)
            where = undo.mount("ext4", node, undo.directory(machine.base / f"parted {number}"))
            forget(parts[-1])
            write_all(where / "file", content(1, 4 * MIB))
        assert shared_files(*parts) == []
        assert len(shared_files(whole)) == 1


@needs_shared_memory
def test_copies_share_as_well(ext4: FileSystem) -> None:
    source = ext4.directory / "source"
    source.write_bytes(content(1, 8 * MIB))
    with open(source, "rb") as data, pacedio.open(ext4.directory / "copy", "wb") as f:
        copy_contents(data.fileno(), f)
    assert f.stats.share == "host"
    assert (ext4.directory / "copy").read_bytes() == source.read_bytes()


@needs_shared_memory
def test_pacedcp_shares_as_well(machine: Machine) -> None:
    with machine.mounted("ext4") as fresh:
        device = fresh.directory.stat().st_dev
        forget(device)
        source, copy = fresh.directory / "source", fresh.directory / "copy"
        source.write_bytes(content(1, 8 * MIB))
        subprocess.run([sys.executable, "-m", "pacedio.cli.pacedcp", source, copy], check=True)
        assert copy.read_bytes() == source.read_bytes()
        assert len(shared_files(device)) == 1


# ---- why the limit is what it is ----------------------------------------------------------------------------------


def test_limited_by(mounts: Any, ext4: FileSystem) -> None:
    named = write_all(ext4.directory / "named", content(1, 4 * MIB), Pacing(limit="2MiB"))
    assert (named.limited_by, named.limit) == ("configuration", 2 * MIB)
    followed = write_all(ext4.directory / "followed", content(1, 64 * MIB))
    assert followed.limited_by == "device"
    assert followed.delivery_rate is not None
    with mounts.directory("fuse") as fuse:
        assert write_all(fuse.directory / "file", content(1, 8 * MIB)).limited_by == "engine"


def test_a_slow_disk_is_known_as_such(directory: Path) -> None:
    stats = write_all(directory / "file", content(1, 100 * MIB))
    assert stats.base_delay_seconds is not None
    assert stats.base_delay_seconds >= 0.002
    assert stats.limited_by == "device"
    assert stats.limit <= 4 * MIB


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB, of version 1."""
    parent = Path("/sys/fs/cgroup/memory")
    made = parent / f"pacedio-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(64 * MIB))
    except OSError as e:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no memory cgroup (version 1) can be made here: {e}")
    try:
        yield made
    finally:
        made.rmdir()


def test_a_small_cgroup_is_what_limits(small_cgroup: Path, machine: Machine) -> None:
    cgroup = str(small_cgroup / "cgroup.procs")
    # On a disk that would be given more.
    with machine.slow_disk(delay=0.02) as deep, workers(deep.directory, 1, 32 * MIB, cgroup=cgroup) as (worker,):
        worker.go()
        stats = worker.finish()
    assert stats["limited_by"] == "cgroup"
    assert 0 < stats["cap"] < 16 * MIB
    assert stats["limit"] <= max(stats["cap"], WINDOW)


# ---- giving way ---------------------------------------------------------------------------------------------------


def test_polite_windows_are_of_the_idle_class(ext4: FileSystem) -> None:
    with simulated() as kernel:
        stats = write_all(ext4.directory / "file", content(1, 8 * MIB), POLITE)
        assert kernel.priorities["sync_file_range"] | kernel.priorities.get("write_uncached", set()) == {3 << 13}
        assert kernel.priority == 0
    assert stats.bytes == 8 * MIB
    assert stats.windows > 0
    assert stats.in_flight == 0


@pytest.mark.parametrize("polite", [False, True])
def test_a_rate_holds_with_an_automatic_limit(ext4: FileSystem, polite: bool) -> None:
    rate, size = 40_000_000, 8 * MIB
    with simulated() as kernel:
        begin = kernel.now()
        stats = write_all(ext4.directory / "file", content(1, size), Pacing(rate=rate, polite=polite))
        seconds = (kernel.now() - begin) / 1e9
    assert stats.bytes == size
    assert kernel.count("sleep") > 0
    assert size <= rate * seconds + rate / 25
