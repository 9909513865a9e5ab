"""The automatic limit, and the budget that all writers of a device share: in threads, in processes, and with those that
stop, die or fork in the middle. Nothing here depends on how long anything takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel import simulated
from machine import FileSystem, Machine, Undo, need, needs_cachestat, observed

import pacedio
from pacedio import POLITE, Pacing
from pacedio._native import ffi, lib
from pacedio.copying import copy_contents

KIB = 1024
MIB = 1024 * KIB
PIECE = 64 * KIB
WINDOW = MIB  # the largest that the controller chooses
SHARED = Path(f"/dev/shm/pacedio-{os.geteuid()}")
JOINED = 128 * KIB  # until then a file is small, and shares nothing
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
largest = largest_cap = 0
with open(job["data"], "rb") as data, pacedio.open(job["path"], "wb", 0, pacing=Pacing(**job["pacing"])) as f:
    f.write(data.read(65536))
    print("ready", flush=True)
    sys.stdin.readline()
    while piece := data.read(65536):
        f.write(piece)
        if f.tell() > 131072:  # until then it is a small file, and has joined nobody
            largest = max(largest, f.stats.limit)
        largest_cap = max(largest_cap, observe.limit_cap() or 0)
        if f.tell() == job["stop_at"]:
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    sizes = [os.stat(path).st_size for path in job["others"]]
found = {"largest": largest, "largest_cap": largest_cap, "sizes": sizes, **f.stats.as_dict()}
print(json.dumps(found), flush=True)
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

WRITERS, SIZE = 16, 16 * MIB


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
                if f.tell() > JOINED:
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
    assert min(written[0]) >= SIZE // 2


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
    assert min(first["sizes"]) >= SIZE // 2


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


def wait_until_larger(path: Path, size: int) -> None:
    """By what was written, whatever time that takes."""
    for _ in range(HANGING * 5000):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size >= size:
                return
        time.sleep(0.0002)
    raise AssertionError(f"{path} hangs")


@needs_shared_memory
def test_processes_killed_at_any_moment_leave_nothing_locked(directory: Path) -> None:
    chance = random.Random(20)
    size = 16 * MIB
    with workers(directory, 14, size) as running:
        *victims, first, last = running
        for worker in running:
            worker.go()
        for victim in victims:
            wait_until_larger(victim.path, chance.randrange(PIECE, size // 4))
            victim.process.kill()
            victim.process.wait()
        assert first.finish()["share"] == "host"
        assert last.finish()["share"] == "host"
    # What the dead had in flight is counted no more: one alone has all the room again.
    with workers(directory, 1, 32 * MIB) as (another,):
        another.go()
        found = another.finish()
    assert found["share"] == "host"
    assert found["most_in_flight"] > found["limit"] // 2


# Forks children that write and then die with the writer open, or stay; prints with whom they shared.
FORKING = """
import os, signal, sys
import pacedio
directory, count, stay = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "stay"
children = []
for number in range(count):
    heard, say = os.pipe()
    child = os.fork()
    if child == 0:
        f = pacedio.open(f"{directory}/{number}", "wb", 0)
        for _ in range(4):
            f.write(bytes(65536))
        if stay:
            f.sync()  # else its bytes would count for a while
        os.write(say, f.stats.share.encode())
        if stay:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(say)
    print(os.read(heard, 100).decode())
    os.close(heard)
    children.append(child)
    if not stay:
        os.waitpid(child, 0)
for child in children * stay:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def with_whom(directory: Path, count: int, stay: str) -> list[str]:
    command = [sys.executable, "-c", FORKING, str(directory), str(count), stay]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGING).stdout.split()


@needs_shared_memory
def test_slots_of_the_dead_are_there_again(directory: Path) -> None:
    assert with_whom(directory, lib.PIO_PROCESSES + 8, "die") == ["host"] * (lib.PIO_PROCESSES + 8)


@needs_shared_memory
def test_without_a_free_slot_a_process_is_alone(machine: Machine) -> None:
    many = lib.PIO_PROCESSES
    with machine.mounted("ext4") as fresh:  # on which this process has no slot
        for _ in range(2):
            assert with_whom(fresh.directory, many + 2, "stay") == ["host"] * many + ["process"] * 2


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


def slots_taken(file: Path) -> int:
    """How many bytes of the file are locked, in whichever process."""
    inode = f":{file.stat().st_ino}"
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(1 for lock in locks if lock[5].endswith(inode) and lock[6] != "0")


# A parent and its child, both with a writer open; the child closes its copy of the parent's, and stays until told.
PARENT_AND_CHILD = """
import os, signal, sys
import pacedio
parent = pacedio.open(sys.argv[1] + "/parent", "wb", 0)
parent.write(bytes(1 << 20))
if os.fork() == 0:
    child = pacedio.open(sys.argv[1] + "/child", "wb", 0)
    child.write(bytes(1 << 20))
    parent.close()
    print(child.stats.share, flush=True)
    sys.stdin.read()
    child.close()
    print(child.stats.bytes, flush=True)
else:
    signal.pause()
"""


@needs_shared_memory
def test_a_forked_child_has_a_slot_of_its_own_and_not_its_parents(machine: Machine) -> None:
    with machine.mounted("ext4") as fresh:
        device = fresh.directory.stat().st_dev
        forget(device)
        command = [sys.executable, "-c", PARENT_AND_CHILD, str(fresh.directory)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            assert parent.stdout.readline() == "host\n"
            (shared,) = shared_files(device)
            assert slots_taken(shared) == 2
            parent.kill()
            parent.wait()
            assert slots_taken(shared) == 1
            parent.stdin.close()
            assert parent.stdout.read() == f"{MIB}\n"


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
def test_a_block_device_is_its_own_budget(machine: Machine) -> None:
    """And not that of where its node is, which all nodes have in common."""
    need("losetup")
    with Undo() as undo:
        node = undo.loop(undo.sparse(machine.base / "block.disk", 64 * MIB))
        device = node.stat().st_rdev
        forget(device)
        elsewhere = {file: file.stat().st_mtime_ns for file in shared_files(node.stat().st_dev)}
        data = content(1, 8 * MIB)
        with pacedio.open(node, "r+b", 0) as f:
            for at in range(0, len(data), PIECE):
                f.write(data[at : at + PIECE])
            assert f.stats.share == "host"
        assert len(shared_files(device)) == 1
        assert {file: file.stat().st_mtime_ns for file in shared_files(node.stat().st_dev)} == elsewhere
        with open(node, "rb") as written:
            assert written.read(len(data)) == data


@needs_shared_memory
def test_a_shared_file_that_is_larger_stays_so(machine: Machine) -> None:
    with machine.mounted("ext4", 64 * MIB) as fresh:
        device = fresh.directory.stat().st_dev
        forget(device)
        write_all(fresh.directory / "file", content(1, MIB))
        (file,) = shared_files(device)
        size = file.stat().st_size + 100_000
        os.truncate(file, size)
        assert with_whom(fresh.directory, 1, "die") == ["host"]
        assert file.stat().st_size == size


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


def test_a_logical_volume_shares_its_disk(tmp_path: Path) -> None:
    """The numbers are those of a volume (253:0) on the second partition of a disk (8:2, 8:0)."""
    block, shm = tmp_path / "block", tmp_path / "shm"
    disk = block / "sda"
    for device, numbers in ((disk, "8:0"), (disk / "sda2", "8:2"), (block / "dm-0", "253:0")):
        (device / "slaves").mkdir(parents=True)
        (device / "dev").write_text(numbers + "\n")
        (block / numbers).symlink_to(device)
    (disk / "sda2/partition").write_text("2\n")
    (block / "dm-0/slaves/sda2").symlink_to(disk / "sda2")
    (disk / "diskseq").write_text("7\n")
    shm.mkdir()
    with simulated() as kernel:
        kernel.shared_memory = shm

        def here(name: str) -> Any:
            def call(path: Any, *arguments: Any) -> int:
                real = ffi.string(path).replace(b"/sys/dev/block", os.fsencode(block))
                return int(kernel.real[name](ffi.new("char[]", real), *arguments))

            return call

        kernel.replace("open", here("open"))
        kernel.replace("only_entry", here("only_entry"))
        for major, minor in ((253, 0), (8, 2), (8, 0)):

            def status(fd: int, out: Any, numbers: tuple[int, int] = (major, minor)) -> int:
                code = kernel.status(fd, out)
                out.dev_major, out.dev_minor = numbers
                return code

            kernel.replace("status", status)
            assert write_all(tmp_path / "file", content(1, 2 * MIB)).share == "host"
    (file,) = (shm / f"pacedio-{os.geteuid()}").iterdir()
    assert file.name.endswith("-8:0")


# Another /dev/shm, in a mount namespace of the process's own, so that nothing of it is seen by others or stays.
@pytest.mark.parametrize(
    ("prepare", "share"),
    [
        ("mount -t tmpfs none /dev/shm", "host"),
        ("mount -t tmpfs -o ro none /dev/shm", "process"),
        ("mount -t tmpfs none /dev/shm; mkdir -m 700 $OURS; chown 65534 $OURS", "process"),
        ("mount -t tmpfs none /dev/shm; mkdir -m 700 /dev/shm/real; ln -s real $OURS", "process"),
        ("mount -t tmpfs none /dev/shm; mkdir -m 777 $OURS", "process"),
        ("mount -t tmpfs none /dev/shm; touch $OURS", "process"),
        ("mount -t tmpfs -o nr_inodes=2 none /dev/shm", "process"),
        ("mount -t tmpfs none /dev", "process"),
    ],
    ids=["empty", "read-only", "of someone else", "a link", "open to all", "a file", "full", "none"],
)
def test_where_nothing_can_be_shared_a_process_is_alone(ext4: FileSystem, prepare: str, share: str) -> None:
    need("unshare", "mount")
    written = ext4.directory / "file"
    script = f"""set -e; OURS=/dev/shm/pacedio-0; {prepare}; exec "$0" -c 'if True:
        import sys, pacedio
        with pacedio.open(sys.argv[1], "wb", 0) as f:
            for _ in range(64):
                f.write(bytes(65536))
        print(f.stats.share, f.stats.error)' "$1"
    """
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGING)
    assert (done.stdout, done.stderr) == (f"{share} None\n", "")
    assert written.read_bytes() == bytes(4 * MIB)


@needs_shared_memory
def test_another_user_has_a_budget_of_their_own(ext4: FileSystem) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    user = 65534
    theirs = Path(f"/dev/shm/pacedio-{user}")
    if theirs.exists():
        pytest.skip(f"{theirs} is there already")
    ext4.directory.chmod(0o777)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.chdir(ext4.directory)  # which lies below some that only root may enter
            os.setgroups([])
            os.setresuid(user, user, user)
            stats = write_all(Path("file"), content(1, 4 * MIB))
            os._exit(0 if stats.share == "host" else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    try:
        assert os.waitstatus_to_exitcode(status) == 0
        assert (theirs.stat().st_uid, theirs.stat().st_mode) == (user, 0o040700)
    finally:
        shutil.rmtree(theirs, ignore_errors=True)


@needs_cachestat
def test_copies_and_writers_have_one_budget(directory: Path) -> None:
    source = directory / "source"
    source.write_bytes(content(1, 12 * MIB))
    paths = [directory / str(number) for number in range(6)]
    largest = [0] * len(paths)
    together = threading.Barrier(len(paths))

    def produce(number: int) -> None:
        with pacedio.open(paths[number], "wb", 0) as f, open(source, "rb") as data:

            def look(_: object = None) -> None:
                if f.tell() > JOINED:
                    largest[number] = max(largest[number], f.stats.limit)

            together.wait(HANGING)
            if number % 2:
                copy_contents(data.fileno(), f, progress=look)
            else:
                while piece := data.read(PIECE):
                    f.write(piece)
                    look()
            assert f.stats.share == "host"

    running = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(len(paths))]
    with observed(*paths) as seen:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(HANGING)
    assert all(path.read_bytes() == source.read_bytes() for path in paths)
    assert seen["samples"] > 50
    assert seen["most"] <= max(largest) + WINDOW


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
    with observed(directory / "file") as seen:
        # It lets some of the beginning through faster, and that must be forgotten.
        stats = write_all(directory / "file", content(1, 250 * MIB))
    assert stats.base_delay_seconds is not None
    assert stats.base_delay_seconds >= 0.002
    assert stats.delivery_rate is not None
    assert stats.delivery_rate <= 300_000_000
    assert stats.limited_by == "device"
    assert stats.limit <= 4 * MIB
    assert stats.most_in_flight <= 8 * MIB
    assert seen["most"] <= 8 * MIB


@contextlib.contextmanager
def cgroup_with(name: str, value: str) -> Iterator[str]:
    """A cgroup of version 1: the file that lists its processes."""
    made = Path(f"/sys/fs/cgroup/{name.partition('.')[0]}/pacedio-test-{os.getpid()}")
    try:
        made.mkdir()
        (made / name).write_text(value)
    except OSError as e:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no cgroup (version 1) with {name} can be made here: {e}")
    try:
        yield str(made / "cgroup.procs")
    finally:
        made.rmdir()


def test_a_small_cgroup_is_what_limits(machine: Machine) -> None:
    # On a disk that would be given more.
    with (
        cgroup_with("memory.limit_in_bytes", str(64 * MIB)) as cgroup,
        machine.slow_disk(delay=0.02) as deep,
        workers(deep.directory, 1, 96 * MIB, cgroup=cgroup) as (worker,),
        observed(worker.path) as seen,
    ):
        worker.go()
        stats = worker.finish()
    assert stats["limited_by"] == "cgroup"
    assert 0 < stats["largest_cap"] < 16 * MIB
    assert stats["largest"] <= max(stats["largest_cap"], 128 * KIB)
    assert 0 < seen["most"] <= stats["largest"] + WINDOW


def test_where_a_cgroup_lets_bytes_through_in_slices_nobody_stands_still(machine: Machine) -> None:
    """Of each 100 ms the device takes 5 MB at its own speed, and then nothing: who is as fast waits for 90 ms."""
    with machine.mounted("ext4") as disk:
        device = os.stat(disk.directory).st_dev
        what = f"{os.major(device)}:{os.minor(device)} 50000000"
        with cgroup_with("blkio.throttle.write_bps_device", what) as cgroup:

            def write(count: int, size: int) -> list[dict[str, Any]]:
                with workers(disk.directory, count, size, cgroup=cgroup) as processes:
                    for process in processes:
                        process.go()
                    return [process.finish() for process in processes]

            (first,) = write(1, 128 * MIB)  # which is about to find out
            again = [write(1, 64 * MIB)[0]["longest_stall_seconds"] for _ in range(3)]
            together = [max(s["longest_stall_seconds"] for s in write(4, 16 * MIB)) for _ in range(3)]
    assert first["longest_stall_seconds"] > 0.08
    assert first["delivery_rate"] == pytest.approx(50e6, rel=0.15)
    # A busy machine may be late at any time, but not every time.
    assert min(again) < 0.06
    assert min(together) < 0.06


# ---- giving way ---------------------------------------------------------------------------------------------------


def test_polite_windows_are_of_the_idle_class(ext4: FileSystem) -> None:
    with simulated() as kernel:
        stats = write_all(ext4.directory / "file", content(1, 8 * MIB), POLITE)
        assert kernel.priorities["sync_file_range"] | kernel.priorities.get("write_uncached", set()) == {3 << 13}
        assert kernel.priority == 0
    assert stats.bytes == 8 * MIB
    assert stats.windows > 0
    assert stats.in_flight == 0


# A neighbour without any pacing: it always has this much under way.
PLAIN = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for number in range(int(sys.argv[2]) // (4 << 20)):
    os.pwrite(fd, bytes(4 << 20), number << 22)
    os.fdatasync(fd)
"""


def test_a_polite_writer_gives_way_and_never_stops(machine: Machine) -> None:
    neighbours = 128 * MIB
    with machine.slow_disk() as fresh, pacedio.open(fresh.directory / "polite", "wb", 0, pacing=POLITE) as f:
        for _ in range(64 * MIB // PIECE):
            f.write(bytes(PIECE))
        alone = f.stats
        plain = fresh.directory / "plain"
        with subprocess.Popen([sys.executable, "-c", PLAIN, str(plain), str(neighbours)]) as neighbour:
            wait_until_larger(plain, 1)
            while neighbour.poll() is None:
                f.write(bytes(PIECE))
        beside = f.stats
    assert neighbour.returncode == 0
    assert (alone.limited_by, beside.limited_by) == ("device", "device")
    # Two that share evenly would have written as much.
    assert MIB <= beside.bytes - alone.bytes < neighbours // 2
    assert beside.most_in_flight <= 4 * MIB


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


def test_each_writer_keeps_a_rate_of_its_own(tmp_path: Path) -> None:
    rates, seconds = (20_000_000, 40_000_000), 0.125
    with simulated() as kernel:
        begin, slept = kernel.now(), kernel.clock
        files = [pacedio.open(tmp_path / str(rate), "wb", 0, pacing=Pacing(rate=rate)) for rate in rates]
        for _ in range(int(seconds * 1000)):
            for f, rate in zip(files, rates, strict=True):
                f.write(bytes(rate // 1000))
        took, asleep = (kernel.now() - begin) / 1e9, (kernel.clock - slept) / 1e9
        for f, rate in zip(files, rates, strict=True):
            assert f.stats.bytes <= rate * (took + 0.04)
            f.close()
    assert asleep <= seconds  # at once, not one after the other
