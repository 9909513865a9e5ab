"""Where a benchmark writes, made and always undone: directories, mounted file systems, memory control groups."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType

GIB = 1 << 30
MIB = 1 << 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotMeasure(SystemExit):
    """The benchmark cannot run here; its text is the one line that says why."""

    def __init__(self, why: str) -> None:
        print(f"{os.path.basename(sys.argv[0])}: {why}", file=sys.stderr)
        super().__init__(2)


def undo_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP unwind the stack once, so that everything is undone, and not disturb that."""

    def end(number: int, _frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in SIGNALS:
        signal.signal(each, end)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"{' '.join(command[:2])}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def needs_root(what: str) -> None:
    if os.geteuid():
        raise CannotMeasure(f"{what} needs root")


@contextlib.contextmanager
def scratch(directory: str, size: int, times: int = 3) -> Iterator[str]:
    """A directory for the files of this run, if `times` times `size` fits; removed with all that is in it."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as e:
        raise CannotMeasure(f"{directory}: {e.strerror}") from None
    if free < times * size:
        needed = f"{times} x the size, {times * size / GIB:.1f}"
        raise CannotMeasure(f"{directory} has {free / GIB:.1f} GiB free; needed are {needed}")
    path = tempfile.mkdtemp(prefix="pacedio-benchmark-", dir=directory)
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.sync()


def _unmount(target: str) -> None:
    for _ in range(20):
        if not subprocess.run(["umount", target], capture_output=True, check=False).returncode:
            return
        time.sleep(0.25)
    run("umount", "--lazy", target)


@contextlib.contextmanager
def overlay(base: str) -> Iterator[tuple[str, str]]:
    """An overlayfs with its upper layer in `base`: where it is mounted, and the upper layer, which has the pages."""
    needs_root("overlayfs")
    lower, upper, work, merged = (os.path.join(base, name) for name in ("lower", "upper", "work", "merged"))
    for each in (lower, upper, work, merged):
        os.mkdir(each)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    run("mount", "-t", "overlay", "pacedio-benchmark", "-o", options, merged)
    try:
        yield merged, upper
    finally:
        _unmount(merged)


MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
    "btrfs": ("mkfs.btrfs", "-q", "-f", "--nodiscard"),
}


def _needs_direct(device: str) -> None:
    with open(f"/sys/block/{os.path.basename(device)}/loop/dio") as f:
        if f.read().strip() != "1":
            raise CannotMeasure("the file system below refuses direct I/O to the loop device")


@contextlib.contextmanager
def loop(kind: str, base: str, size: int) -> Iterator[str]:
    """A new file system with room for `size` on a loop device with direct I/O: its pages are the only ones cached.

    The file below is preallocated, so that the file system below has no blocks to find while we measure.
    """
    needs_root(f"{kind} on a loop device")
    if not shutil.which(MAKE[kind][0]):
        raise CannotMeasure(f"{MAKE[kind][0]} is not installed")
    backing, target = os.path.join(base, "backing"), os.path.join(base, kind)
    os.mkdir(target)
    fd = os.open(backing, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size + size // 4 + 512 * MIB)
    finally:
        os.close(fd)
    device = run("losetup", "--direct-io=on", "--show", "--find", backing)
    try:
        _needs_direct(device)
        run(*MAKE[kind], device)
        run("mount", "-o", "nodiscard", device, target)
        try:
            yield target
        finally:
            _unmount(target)
    finally:
        run("losetup", "--detach", device)


@dataclass(frozen=True)
class Disk:
    """A disk on which every write takes `delay_ms`, and all of them together reach `rate` bytes a second."""

    rate: int
    delay_ms: int


DISKS = {"hdd": Disk(150 * 10**6, 8), "usb": Disk(20 * 10**6, 20), "cloud": Disk(200 * 10**6, 2)}


@contextlib.contextmanager
def _served(base: str, disk: Disk, size: int) -> Iterator[str]:
    """A file of `size` bytes with the pace of `disk`: memory, served by nbdkit, through FUSE."""
    server = os.path.join(base, "server")
    os.mkdir(server)
    command = [
        *("nbdfuse", os.path.join(server, "disk"), "--command", "nbdkit", "-s", "--exit-with-parent"),
        *("--filter=delay", "--filter=rate", "memory", str(size), f"wdelay={disk.delay_ms}ms"),
        f"rate={disk.rate * 8}",  # bits a second
        "burstiness=0.05",  # seconds; else the first two seconds' worth would be free
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 10
            while not os.path.exists(command[1]):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CannotMeasure("nbdfuse ended, or did not come up within 10 s")
                time.sleep(0.02)
            try:
                yield command[1]
            finally:
                _unmount(server)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)  # what is unmounted ends by itself
            process.kill()  # and nbdkit ends with it


def _direct_writes(device: str, size: int, depth: int, seconds: float) -> tuple[float, list[float]]:
    """Bytes a second, and the time of each write, of `depth` threads with O_DIRECT: zeros, to the start of `device`."""
    buffer = mmap.mmap(-1, size)
    fd = os.open(device, os.O_WRONLY | os.O_DIRECT)
    began = time.monotonic()

    def write(number: int) -> list[float]:
        took = []
        while (now := time.monotonic()) < began + seconds:
            if os.pwrite(fd, buffer, number * size) != size:
                raise CannotMeasure(f"a short write to {device}")
            took.append(time.monotonic() - now)
        return took

    try:
        with ThreadPoolExecutor(depth) as pool:
            each = [took for writer in pool.map(write, range(depth)) for took in writer]
        return len(each) * size / (time.monotonic() - began), each
    finally:
        os.close(fd)


@contextlib.contextmanager
def programmable(disk: Disk, base: str, size: int) -> Iterator[tuple[str, str]]:
    """ext4 on a disk in memory with a delay and a rate: where it is mounted, and what the disk does, in words."""
    needs_root("a programmable disk")
    for program in ("nbdkit", "nbdfuse", MAKE["ext4"][0]):
        if not shutil.which(program):
            raise CannotMeasure(f"{program} is not installed")
    with open("/proc/meminfo") as f:
        available = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable:")) * 1024
    if available < 2 * size:
        raise CannotMeasure(f"{available / GIB:.1f} GiB of memory are available; needed are 2 x {size / GIB:.1f} GiB")
    target = os.path.join(base, "programmable")
    os.mkdir(target)
    with _served(base, disk, size) as served:
        device = run("losetup", "--direct-io=on", "--show", "--find", served)
        try:
            _needs_direct(device)
            delay = statistics.median(_direct_writes(device, 4096, 1, 1.0)[1]) * 1000
            rate = _direct_writes(device, MIB, 16, 2.0)[0] / 1e6
            # The device is all zeros, so inode tables and journal need not be written, at the disk's pace.
            run("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", device)
            run("mount", "-o", "nodiscard,noinit_itable", device, target)
            try:
                named = f"in memory, {disk.rate / 1e6:.0f} MB/s, {disk.delay_ms} ms a write"
                seen = f"{rate:.0f} MB/s for 16 writes of 1 MiB at once, {delay:.1f} ms for one of 4 KiB"
                yield target, f"{named} (seen with O_DIRECT: {seen})"
            finally:
                _unmount(target)
        finally:
            run("losetup", "--detach", device)


@contextlib.contextmanager
def dirty_bytes(most: int | None) -> Iterator[None]:
    """Set vm.dirty_bytes, which zeroes vm.dirty_ratio; both are put back. None leaves them alone."""
    if most is None:
        yield
        return
    needs_root("vm.dirty_bytes")
    # Writing either of the two zeroes the other, and 0 is not accepted as a size: only the one that counts is put back.
    before = {name: _vm(name) for name in ("dirty_bytes", "dirty_ratio")}
    name = "dirty_bytes" if before["dirty_bytes"] else "dirty_ratio"
    try:
        _set_vm("dirty_bytes", most)
        yield
    finally:
        _set_vm(name, before[name])


def _vm(name: str) -> int:
    with open(f"/proc/sys/vm/{name}") as f:
        return int(f.read())


def _set_vm(name: str, value: int) -> None:
    with open(f"/proc/sys/vm/{name}", "w") as f:
        f.write(str(value))


def _memory_hierarchy() -> tuple[str, int]:
    """Where the memory controller is mounted, and the version of its control groups."""
    second: str | None = None
    with open("/proc/self/mountinfo") as f:
        for line in f:
            fields = line.split()
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            if kind == "cgroup" and "memory" in options:
                return fields[4], 1
            if kind == "cgroup2":
                second = fields[4]
    if second:
        with open(os.path.join(second, "cgroup.controllers")) as f:
            if "memory" in f.read().split():
                return second, 2
    raise CannotMeasure("no memory controller is mounted (control groups v1 or v2)")


@contextlib.contextmanager
def memory_cgroup(limit: int | None) -> Iterator[str | None]:
    """A control group of `limit` bytes of memory: its cgroup.procs. None without a limit."""
    if limit is None:
        yield None
        return
    needs_root("a memory control group")
    root, version = _memory_hierarchy()
    group = os.path.join(root, f"pacedio-benchmark-{os.getpid()}")
    try:
        if version == 2:
            with open(os.path.join(root, "cgroup.subtree_control"), "w") as f:
                f.write("+memory")
        os.mkdir(group)
    except OSError as e:
        raise CannotMeasure(f"cannot make a memory control group below {root}: {e.strerror}") from None
    try:
        with open(os.path.join(group, "memory.limit_in_bytes" if version == 1 else "memory.max"), "w") as f:
            f.write(str(limit))
        yield os.path.join(group, "cgroup.procs")
    finally:
        _remove_group(group)


def _remove_group(group: str) -> None:
    """A process that has just ended may still count for a moment."""
    for _ in range(40):
        with contextlib.suppress(OSError):
            os.rmdir(group)
            return
        time.sleep(0.1)
    os.rmdir(group)


def memory_cgroup_version() -> int:
    return _memory_hierarchy()[1]
