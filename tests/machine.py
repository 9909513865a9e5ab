"""Real file systems and disks for tests, as root: mounted over loop devices with direct I/O, disks that fail under
writeback, disks that are slow, copies of a disk as a power cut would leave it, and an observer in another process.

Everything lies below one directory whose name holds the process that made it (`pacedio-machine.PID.STARTED`), is
undone in reverse order whatever happens, and, where a run was killed before it could, by the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
DISK = 768 * MIB  # sparse: takes what was written to it
KINDS = ("ext4", "xfs", "btrfs", "btrfs-compressed", "overlayfs", "tmpfs", "fuse")

_MAKE = {  # nothing left to be done in the background, which an observer of the whole machine would see
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
    "btrfs": ["mkfs.btrfs", "-q", "-f", "-K"],
}
_NAME = re.compile(r"/pacedio-machine\.(\d+)\.(\d+)(?=/|$)")


def _has_cachestat() -> bool:
    """Asked of the kernel itself, so that a fault of ours does not look like an older kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(451, -1, None, None, 0)
    return ctypes.get_errno() != errno.ENOSYS


HAS_CACHESTAT = _has_cachestat()
needs_cachestat = pytest.mark.skipif(not HAS_CACHESTAT, reason="cachestat needs Linux 6.5")


def _started(pid: int) -> int | None:
    """The time at which the process started, which tells it from a later one of the same number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def need(*tools: str) -> None:
    """Skip the test where it cannot run."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    for tool in tools:
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")


def descriptors() -> list[str]:
    """This process's open ones, but those that are kept for the next file (csrc/device.c)."""
    gc.collect()  # what earlier tests left would be closed at any time
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            where = os.readlink(f"/proc/self/fd/{fd}")
            if f"/pacedio-{os.geteuid()}/" not in where and not where.startswith("/proc/pressure/"):
                found.append(f"{fd} {where}")
    return found


def system_calls(script: str, *arguments: object, log: Path) -> list[str]:
    """Those of the Python script in a process of its own, as strace shows them, from where it makes a file "begin"."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    subprocess.run(["strace", "-f", "-o", log, sys.executable, "-c", script, *map(str, arguments)], check=True)
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    return calls[next(i for i, call in enumerate(calls) if '/begin"' in call) :]


def _patiently(undo: Callable[[], object], seconds: float = 5) -> None:
    """Whatever used a mount (a FUSE server that is ending, udev's look at a new device) may need a moment to let go."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            undo()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _unmount(directory: Path) -> None:
    try:
        _patiently(lambda: _run("umount", directory))
    except OSError:
        # A failed test's traceback may hold a file open. The rest goes when the file does.
        _run("umount", "--lazy", directory)


class Undo(contextlib.ExitStack):
    """Makes things, each with what undoes it."""

    def directory(self, path: Path) -> Path:
        path.mkdir()
        self.callback(shutil.rmtree, path)
        return path

    def sparse(self, path: Path, size: int) -> Path:
        with open(path, "wb") as f:
            self.callback(path.unlink)
            f.truncate(size)
        return path

    def loop(self, backing: Path, *, direct: bool = True, partitions: bool = False) -> Path:
        if not os.path.exists("/dev/loop-control"):
            pytest.skip("this machine has no loop devices")
        options = [*(["--direct-io=on"] if direct else []), *(["--partscan"] if partitions else [])]
        device = _run("losetup", "--find", "--show", *options, backing)
        self.callback(_run, "losetup", "--detach", device)
        return Path(device)

    def mount(self, kind: str, what: object, where: Path, *options: str) -> Path:
        try:
            _run("mount", "-t", kind, *(["-o", ",".join(options)] if options else []), what, where)
        except OSError as e:
            if "unknown filesystem type" in str(e):
                pytest.skip(f"this kernel has no {kind}")
            raise
        self.callback(_unmount, where)
        return where


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system. `directory` is where files go; `backing` the file that its disk is, if it has one."""

    kind: str
    directory: Path
    backing: Path | None = None
    _pages: Path | None = field(default=None, repr=False)

    def pages(self, path: Path) -> Path:
        """Where the pages of a file in it are: for a stacked file system, the file below."""
        return path if self._pages is None else self._pages / path.relative_to(self.directory)

    def within(self, name: str) -> FileSystem:
        below = None if self._pages is None else self._pages / name
        return FileSystem(self.kind, self.directory / name, self.backing, below)

    def cut_power(self, copy: Path) -> Path:
        """Copy the disk as it is at this moment, without anything that only memory knows."""
        assert self.backing is not None
        _run("cp", "--reflink=auto", "--sparse=always", self.backing, copy)
        return copy


class Machine:
    """Makes file systems below a directory of its own in `base`."""

    def __init__(self, base: Path) -> None:
        self.base = base / f"pacedio-machine.{os.getpid()}.{_started(os.getpid())}"
        self._number = 0

    def __enter__(self) -> Machine:
        if os.geteuid() == 0:
            remove_leftovers()
        self.base.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.base)

    def _new(self, name: str) -> Path:
        self._number += 1
        return self.base / f"{self._number}-{name}"

    @contextlib.contextmanager
    def mounted(self, kind: str, size: int = DISK, *options: str) -> Iterator[FileSystem]:
        """A new, empty file system of one of KINDS. `options` are mount options of it, or of the one below it."""
        need("losetup", "mount")
        with Undo() as undo:
            if kind == "tmpfs":
                where = undo.mount("tmpfs", "none", undo.directory(self._new(kind)), f"size={size}", *options)
                yield FileSystem(kind, where)
            elif kind in ("overlayfs", "fuse"):
                below = undo.enter_context(self.mounted("ext4", size, *options))
                where = undo.directory(self._new(kind))
                pages = below.directory / "upper"
                pages.mkdir()
                if kind == "overlayfs":
                    for name in ("lower", "work"):
                        (below.directory / name).mkdir()
                    layers = [f"{name}dir={below.directory / name}" for name in ("lower", "upper", "work")]
                    undo.mount("overlay", "none", where, *layers)
                else:
                    need("bindfs")
                    _run("bindfs", pages, where)
                    undo.callback(_unmount, where)
                yield FileSystem(kind, where, below.backing, pages)
            else:
                kind_on_disk = kind.removesuffix("-compressed")
                need(_MAKE[kind_on_disk][0])
                backing = undo.sparse(self._new(f"{kind}.disk"), size)
                _run(*_MAKE[kind_on_disk], backing)
                if kind == "btrfs-compressed":
                    options = ("compress-force=zstd", *options)
                where = undo.directory(self._new(kind))
                undo.mount(kind_on_disk, undo.loop(backing), where, *options)
                yield FileSystem(kind, where, backing)

    @contextlib.contextmanager
    def remounted(self, kind: str, disk: Path) -> Iterator[FileSystem]:
        """Mount what `cut_power` copied, replaying its journal. The original must be unmounted by then: the two
        have one UUID, and btrfs would mount the original again."""
        need("losetup", "mount")
        with Undo() as undo:
            if kind.startswith("btrfs"):
                _run("btrfs", "device", "scan", "--forget")
            where = undo.directory(self._new(f"{kind}-copy"))
            undo.mount(kind.removesuffix("-compressed"), undo.loop(disk), where)
            yield FileSystem(kind, where, disk)

    @contextlib.contextmanager
    def failing_disk(self, room: int = 24 * MIB, size: int = 512 * MIB) -> Iterator[FileSystem]:
        """ext4 on a disk that fails, under writeback, every write to a block that it has no room left for."""
        need("losetup", "mount", "mkfs.ext4")
        with Undo() as undo:
            ram = undo.mount("tmpfs", "none", undo.directory(self._new("room")), f"size={room}")
            backing = undo.sparse(ram / "disk", size)
            # Without a journal, whose failure would stop the file system before the file's own pages fail, and with
            # few inodes, whose tables take room.
            _run(*_MAKE["ext4"], "-O", "^has_journal", "-N", "64", backing)
            where = undo.directory(self._new("failing"))
            undo.mount("ext4", undo.loop(backing, direct=False), where)
            yield FileSystem("ext4", where, backing)

    @contextlib.contextmanager
    def slow_disk(
        self, delay: float = 0.002, rate: int = 200 * 10**6, kind: str = "ext4", size: int = DISK
    ) -> Iterator[FileSystem]:
        """A disk on which every write takes `delay` seconds and all of them together `rate` bytes a second."""
        need("losetup", "mount", "nbdkit", "nbdfuse", _MAKE[kind][0])
        with Undo() as undo:
            backing = undo.sparse(self._new("slow.disk"), size)
            _run(*_MAKE[kind], backing)
            served = self._served(
                undo,
                *("--filter=delay", "--filter=rate", "file", str(backing)),
                *(f"wdelay={round(delay * 1000)}ms", f"rate={rate * 8}"),  # bits a second
                "burstiness=0.05",  # else the first two seconds' worth would be free
            )
            where = undo.directory(self._new("slow"))
            undo.mount(kind, undo.loop(served), where)
            yield FileSystem(kind, where, backing)

    @contextlib.contextmanager
    def hanging_file(self, size: int) -> Iterator[Path]:
        """A file that every read hangs in, for a minute."""
        need("nbdkit", "nbdfuse")
        with Undo() as undo:
            yield self._served(undo, "--filter=delay", "pattern", str(size), "rdelay=60")

    def _served(self, undo: Undo, *nbdkit: str) -> Path:
        """A file that nbdkit serves, through FUSE."""
        server = undo.directory(self._new("server"))
        command = ["nbdfuse", str(server / "disk"), "--command", "nbdkit", "-s", "--exit-with-parent", *nbdkit]
        process = undo.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        undo.callback(process.kill)  # by itself it would end after the last read
        undo.callback(_unmount, server)
        deadline = time.monotonic() + 10
        while not (server / "disk").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"{' '.join(command)}: ended or never came up: {process.returncode}")
            time.sleep(0.01)
        return server / "disk"


def remove_leftovers() -> None:
    """Undo what runs left behind that were killed: mounts, loop devices and files of a process that is gone."""

    def left(path: str) -> bool:
        found = _NAME.search(path)
        return found is not None and _started(int(found[1])) != int(found[2])

    directories = set()
    for _ in range(3):  # a loop device's file may lie on a mount, which can go only after the device
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        mounts = [mount for mount in reversed(mounts) if left(mount)]
        listed = json.loads(_run("losetup", "--list", "--json", "--output", "NAME,BACK-FILE") or '{"loopdevices": []}')
        loops = {loop["name"]: loop["back-file"] for loop in listed["loopdevices"] if left(loop["back-file"] or "")}
        directories |= {path[: _NAME.search(path).end()] for path in [*mounts, *loops.values()]}  # type: ignore[union-attr]
        for mount in mounts:
            subprocess.run(["umount", mount], stderr=subprocess.DEVNULL, check=False)
        for device in loops:
            subprocess.run(["losetup", "--detach", device], stderr=subprocess.DEVNULL, check=False)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


class Observed(dict[str, Any]):
    """What tests/observer.py found, filled in when the `with observed(...)` ends."""


@contextlib.contextmanager
def observed(*paths: Path) -> Iterator[Observed]:
    """Have another process watch the files' pages meanwhile, from the moment they appear (see observer.py)."""
    observer = [sys.executable, "-S", str(Path(__file__).with_name("observer.py")), *map(str, paths)]
    found = Observed()
    with subprocess.Popen(observer, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield found
        finally:
            out = process.communicate()[0]
    found.update(json.loads(out))
    if found["error"] and found["error"].startswith("ENOSYS"):
        pytest.skip("cachestat needs Linux 6.5")
    assert found["error"] is None, found["error"]
