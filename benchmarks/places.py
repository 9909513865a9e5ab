"""Where a benchmark writes, made and always undone: directories, mounted file systems, memory control groups."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
def scratch(directory: str, size: int) -> Iterator[str]:
    """A directory for the files of this run, if three times `size` fits; removed with all that is in it."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as e:
        raise CannotMeasure(f"{directory}: {e.strerror}") from None
    if free < 3 * size:
        raise CannotMeasure(f"{directory} has {free / GIB:.1f} GiB free; needed are 3 x the size, {3 * size / GIB:.1f}")
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
        with open(f"/sys/block/{os.path.basename(device)}/loop/dio") as f:
            if f.read().strip() != "1":
                raise CannotMeasure("the file system below refuses direct I/O to the loop device")
        run(*MAKE[kind], device)
        run("mount", "-o", "nodiscard", device, target)
        try:
            yield target
        finally:
            _unmount(target)
    finally:
        run("losetup", "--detach", device)


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
