"""atomic=True: the whole new content under the target's name, or the old file as it was, and nothing beside it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import descriptors
from test_process import in_child

import pacedio
from pacedio import Pacing

OLD = b"what was there before"
NEW = b"new content " * 30_000
SMALL = Pacing(window="4KiB", limit="8KiB")


@pytest.fixture(params=["here", "tmpfs", "fuse"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty directory. "fuse" has no O_TMPFILE, so the new file has a name beside the target's."""
    if request.param == "here":
        yield tmp_path
        return
    with request.getfixturevalue("mounts").directory(request.param) as made:
        yield made.directory


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@pytest.fixture
def target(place: Path) -> Path:
    path = place / "target"
    path.write_bytes(OLD)
    return path


def open_atomic(path: Any, mode: str = "wb", **arguments: Any) -> Any:
    return pacedio.open(path, mode, pacing=SMALL, atomic=True, **arguments)


def only(path: Path) -> bytes:
    """What is in the file, which is the only one in its directory."""
    assert os.listdir(path.parent) == [path.name]
    return path.read_bytes()


# ---- commit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("how", ["with", "close"])
def test_commit(place: Path, sync: bool, there: bool, how: str) -> None:
    path = place / "target"
    if there:
        path.write_bytes(OLD)
    with open_atomic(path, sync=sync) if how == "with" else contextlib.nullcontext(open_atomic(path, sync=sync)) as f:
        assert f.name == path.__fspath__()
        f.write(NEW)
        f.flush()
        # Until then the old content is what everybody else sees.
        assert (path.read_bytes() if there else path.exists()) == (OLD if there else False)
        if how == "close":
            f.close()
    assert only(path) == NEW
    assert f.closed
    f.close()
    f.discard()
    assert only(path) == NEW


def test_sync_does_not_commit(target: Path) -> None:
    with open_atomic(target) as f:
        f.write(NEW)
        f.sync()
        assert target.read_bytes() == OLD
    assert only(target) == NEW


def test_text(target: Path) -> None:
    with open_atomic(target, "w", encoding="utf-16") as f:
        f.write("\N{SNOWMAN}\n")
        f.flush()
        assert target.read_bytes() == OLD
    assert only(target).decode("utf-16") == "\N{SNOWMAN}\n"


def test_update_mode(target: Path) -> None:
    with open_atomic(target, "w+b") as f:
        assert f.read() == b""
        f.write(NEW)
        f.seek(4)
        assert f.read(7) == b"content"
        f.truncate(8)
    assert only(target) == NEW[:8]


def test_an_empty_file_replaces_too(target: Path) -> None:
    open_atomic(target).close()
    assert only(target) == b""


def test_a_reader_of_the_old_file_keeps_it(target: Path) -> None:
    with open(target, "rb") as reader:
        with open_atomic(target) as f:
            f.write(NEW)
        assert reader.read() == OLD


def test_two_at_once_and_the_last_one_wins(target: Path) -> None:
    first, second = open_atomic(target), open_atomic(target)
    first.write(b"first")
    second.write(b"second")
    second.close()
    first.close()
    assert only(target) == b"first"


# ---- no commit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wb", "w", "w+b", "xb"])
@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_leaves_the_old_file(place: Path, mode: str, exception: type[BaseException]) -> None:
    path = place / "target"
    if "x" not in mode:
        path.write_bytes(OLD)
    arguments = {} if "b" in mode else {"encoding": "utf-8"}
    error = exception("mine")

    def fail() -> None:
        with open_atomic(path, mode, **arguments) as f:
            f.write(NEW if "b" in mode else NEW.decode())
            raise error

    with pytest.raises(exception) as caught:
        fail()
    assert caught.value is error
    if "x" in mode:
        assert os.listdir(place) == []
    else:
        assert only(path) == OLD


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_discard(target: Path, mode: str) -> None:
    f = open_atomic(target, mode, **({} if "b" in mode else {"encoding": "utf-8"}))
    f.write(NEW if "b" in mode else NEW.decode())
    f.discard()
    assert f.closed
    f.close()
    assert only(target) == OLD


@pytest.mark.parametrize("mode", ["wb", "w"])
@pytest.mark.parametrize("cycle", [False, True])
def test_garbage(target: Path, mode: str, cycle: bool) -> None:
    f = open_atomic(target, mode, **({} if "b" in mode else {"encoding": "utf-8"}))
    f.write(NEW if "b" in mode else NEW.decode())
    if cycle:
        (f if "b" in mode else f.buffer).itself = f
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del f
        gc.collect()
    assert only(target) == OLD


def test_detach(target: Path) -> None:
    f = open_atomic(target)
    f.write(NEW)
    raw = f.detach()
    assert raw.write(b"more") == 4
    raw.close()
    f.close()
    assert only(target) == OLD


ENDINGS = {
    "exit": "os._exit(0)",
    "kill": "os.kill(os.getpid(), 9)",
    "terminate": "os.kill(os.getpid(), 15)",
    "sys.exit": "sys.exit(0)",
    "error": "1 / 0",
    "end": "",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends(target: Path, ending: str, request: pytest.FixtureRequest) -> None:
    script = (
        "import os, sys, pacedio\n"
        "f = pacedio.open(sys.argv[1], 'wb', atomic=True)\n"
        "f.write(b'x' * 5_000_000)\n"
        f"{ENDINGS[ending]}\n"
    )
    subprocess.run([sys.executable, "-c", script, target], stderr=subprocess.DEVNULL, check=False)
    assert target.read_bytes() == OLD
    left = sorted(os.listdir(target.parent))
    if "fuse" in request.node.name and ending in ("exit", "kill", "terminate"):
        hidden, name = left  # nobody was there to remove it
        assert name == "target"
        assert hidden.startswith(".target.")
        assert hidden.endswith(".tmp")
    else:
        assert left == ["target"]


def test_a_forked_child_neither_commits_nor_removes(target: Path) -> None:
    for how in ("close", "discard", "exception", "collect"):
        f = open_atomic(target)
        f.write(b"parent's")

        def do(how: str = how) -> None:
            nonlocal f
            if how == "exception":
                with contextlib.suppress(ValueError), f:
                    raise ValueError
            elif how == "collect":
                warnings.simplefilter("ignore")
                f = None
                gc.collect()
            else:
                getattr(f, how)()

        in_child(do)
        assert target.read_bytes() != b"parent's"
        f.close()
        assert only(target) == b"parent's"
        target.write_bytes(OLD)


def test_no_room(mounts: Any) -> None:
    with mounts._machine.mounted("tmpfs", 2 << 20) as small:
        target = small.directory / "target"
        target.write_bytes(OLD)

        def fill() -> None:
            with open_atomic(target) as f:
                f.write(bytes(4 << 20))

        with pytest.raises(OSError, match="No space left") as caught:
            fill()
        assert caught.value.errno == errno.ENOSPC
        assert only(target) == OLD


# ---- what happens to the target meanwhile ------------------------------------------------------------------------


def test_the_target_is_deleted_meanwhile(target: Path) -> None:
    target.chmod(0o640)
    with open_atomic(target) as f:
        f.write(NEW)
        target.unlink()
    assert only(target) == NEW
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_the_target_is_created_meanwhile(place: Path) -> None:
    target = place / "target"
    with open_atomic(target) as f:
        f.write(NEW)
        target.write_bytes(OLD)
    assert only(target) == NEW


def test_the_target_becomes_a_directory(place: Path) -> None:
    target = place / "target"
    f = open_atomic(target)
    f.write(NEW)
    target.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        f.close()
    assert caught.value.filename == str(target)
    assert f.closed
    assert os.listdir(place) == ["target"]


def test_the_directory_is_deleted_meanwhile(place: Path, request: pytest.FixtureRequest) -> None:
    if "fuse" in request.node.name:
        pytest.skip("FUSE keeps a deleted file that is open under another name, and its directory")
    directory = place / "directory"
    directory.mkdir()
    f = open_atomic(directory / "target")
    f.write(NEW)
    for name in os.listdir(directory):
        (directory / name).unlink()
    directory.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        f.close()
    assert caught.value.filename == str(directory / "target")


def test_the_directory_is_renamed_meanwhile(place: Path) -> None:
    (place / "directory").mkdir()
    with open_atomic(place / "directory" / "target") as f:
        f.write(NEW)
        (place / "directory").rename(place / "renamed")
    assert only(place / "renamed" / "target") == NEW


def test_chdir_meanwhile(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place)
    f = open_atomic("target")
    f.write(NEW)
    os.chdir("elsewhere")
    f.close()
    assert (place / "target").read_bytes() == NEW
    assert os.listdir(".") == []
    monkeypatch.undo()


@pytest.mark.parametrize("mode", ["xb", "x", "x+b"])
def test_exclusive(target: Path, mode: str) -> None:
    with pytest.raises(FileExistsError) as caught:
        open_atomic(target, mode, **({} if "b" in mode else {"encoding": "utf-8"}))
    assert caught.value.filename == str(target)
    assert only(target) == OLD


def test_exclusive_and_the_target_appears(place: Path) -> None:
    target = place / "target"
    f = open_atomic(target, "xb")
    f.write(NEW)
    target.write_bytes(OLD)
    with pytest.raises(FileExistsError) as caught:
        f.close()
    assert caught.value.filename == str(target)
    assert caught.value.filename2 is None
    assert f.closed
    assert only(target) == OLD


def test_exclusive_commit(place: Path) -> None:
    with open_atomic(place / "target", "xb") as f:
        f.write(NEW)
    assert only(place / "target") == NEW


def test_exclusive_does_not_follow_a_dangling_link(place: Path) -> None:
    (place / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        open_atomic(place / "link", "xb")


# ---- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o4755, 0o2750, 0o200])
def test_the_mode_is_kept(target: Path, mode: int) -> None:
    target.chmod(mode)
    with open_atomic(target) as f:
        f.write(NEW)
        if len(names := set(os.listdir(target.parent)) - {"target"}):
            assert stat.S_IMODE((target.parent / names.pop()).stat().st_mode) == 0o600  # nobody else's until the end
    assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027])
def test_the_umask_holds_for_a_new_file(place: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with open_atomic(place / "target") as f:
            f.write(NEW)
        with open(place / "plain", "wb"):
            pass
    finally:
        os.umask(before)
    assert (place / "target").stat().st_mode == (place / "plain").stat().st_mode


def test_the_owner_is_kept(target: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    os.chown(target, 1234, 5678)
    target.chmod(0o6755)
    with open_atomic(target) as f:
        f.write(NEW)
    found = target.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 5678, 0o6755)


def test_extended_attributes_are_kept(target: Path) -> None:
    try:
        os.setxattr(target, "user.colour", b"red")
    except OSError:
        pytest.skip("no extended attributes here")
    with open_atomic(target) as f:
        f.write(NEW)
        os.setxattr(target, "user.colour", b"blue")  # the last word counts
    assert os.getxattr(target, "user.colour") == b"blue"
    assert only(target) == NEW


def test_a_symbolic_link_is_followed(place: Path) -> None:
    (place / "directory").mkdir()
    real = place / "directory" / "real"
    real.write_bytes(OLD)
    (place / "link").symlink_to("directory/real")
    (place / "link to link").symlink_to(place / "link")
    with open_atomic(place / "link to link") as f:
        f.write(NEW)
        assert f.name == str(place / "link to link")
    assert (place / "link").is_symlink()
    assert only(real) == NEW


def test_a_dangling_link_is_followed(place: Path) -> None:
    (place / "link").symlink_to("real")
    with open_atomic(place / "link") as f:
        f.write(NEW)
    assert (place / "link").is_symlink()
    assert (place / "real").read_bytes() == NEW


# ---- targets and names that are refused, and odd ones that are not -----------------------------------------------


def test_what_is_no_regular_file(place: Path) -> None:
    (place / "directory").mkdir()
    for name in ("directory", "directory/", ".", "missing/", ""):
        builtins_says: type[OSError] = IsADirectoryError if name else FileNotFoundError
        path = f"{place}/{name}" if name else ""
        with pytest.raises(builtins_says) as caught:
            open_atomic(path)
        assert caught.value.filename == path
    os.mkfifo(place / "fifo")
    with pytest.raises(ValueError, match=r"atomic=True replaces regular files only: .*fifo"):
        open_atomic(place / "fifo")
    with pytest.raises(ValueError, match="regular files only: '/dev/null'"):
        open_atomic("/dev/null")
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.bind(str(place / "socket"))
        except OSError:
            pytest.skip("no sockets here")
        with pytest.raises((ValueError, OSError), match="socket"):
            open_atomic(place / "socket")
    assert sorted(os.listdir(place)) == ["directory", "fifo", "socket"]


def test_missing_parent_and_file_as_parent(target: Path) -> None:
    for path, error in ((target.parent / "missing" / "x", FileNotFoundError), (target / "x", NotADirectoryError)):
        with pytest.raises(error) as caught:
            open_atomic(path)
        assert caught.value.filename == str(path)
    (target.parent / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        open_atomic(target.parent / "loop")


def test_misuse(target: Path) -> None:
    with open(target, "r+b") as plain:
        for arguments in ({"file": plain.fileno()}, {"file": target, "closefd": False}):
            with pytest.raises(ValueError, match="atomic=True needs a path"):
                open_atomic(arguments.pop("file"), **arguments)
    with pytest.raises(ValueError, match="atomic=True needs a path"):
        open_atomic(target, opener=os.open)
    for mode in ("ab", "r+b", "rb", "a", "r", "a+"):
        with pytest.raises(ValueError, match="atomic=True needs mode 'w' or 'x'"):
            open_atomic(target, mode)
    with pytest.raises(ValueError, match="null"):
        open_atomic(f"{target}\0")
    assert only(target) == OLD


@contextlib.contextmanager
def somebody_else() -> Iterator[Path]:
    """A directory that anybody may reach, as nobody."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_a_target_that_may_not_be_written() -> None:
    with somebody_else() as directory:
        directory.chmod(0o777)
        target = directory / "target"
        target.write_bytes(OLD)
        target.chmod(0o444)
        os.seteuid(65534)
        with pytest.raises(PermissionError) as caught:
            open_atomic(target)
        os.seteuid(0)
        assert caught.value.filename == str(target)
        assert only(target) == OLD


def test_a_directory_that_may_not_be_written() -> None:
    with somebody_else() as directory:
        target = directory / "target"
        target.write_bytes(OLD)
        target.chmod(0o666)
        os.seteuid(65534)
        for path in (target, directory / "new"):
            with pytest.raises(PermissionError) as caught:
                open_atomic(path)
            assert caught.value.filename == str(path)
        os.seteuid(0)
        assert only(target) == OLD


def test_anothers_file_loses_the_rights_that_are_not_ours_to_hand_on() -> None:
    with somebody_else() as directory:
        directory.chmod(0o777)
        target = directory / "target"
        target.write_bytes(OLD)
        target.chmod(0o6666)
        os.seteuid(65534)
        with open_atomic(target) as f:
            f.write(NEW)
        os.seteuid(0)
        found = target.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (65534, 0o666)
        assert only(target) == NEW


NAMES = [
    *(b"x" * 255, b"x" * 230, "\N{SNOWMAN}".encode() * 85, b"\xff\xfe", b"new\nline", b" ", b"-", b"..x"),
    *(b".hidden", b"a" * 254 + b"\xff"),
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:12])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("text", [True, False])
def test_names(place: Path, name: bytes, there: bool, text: bool) -> None:
    path: Any = os.path.join(os.fsencode(place), name)
    if there:
        with open(path, "wb") as plain:
            plain.write(OLD)
    with open_atomic(os.fsdecode(path) if text else path) as f:
        f.write(NEW)
        assert f.name == (os.fsdecode(path) if text else path)
    assert os.listdir(os.fsencode(place)) == [name]
    with open(path, "rb") as plain:
        assert plain.read() == NEW


def test_a_name_that_is_too_long(place: Path) -> None:
    path = place / ("x" * 256)
    with pytest.raises(OSError, match="File name too long") as caught, open_atomic(path) as f:
        f.write(NEW)
    assert caught.value.filename == str(path)
    assert os.listdir(place) == []


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A process that replaces the file over and over is killed: one whole content or the other is there."""
    script = (
        "import sys, pacedio\n"
        "print('ready', flush=True)\n"
        "for number in range(10**6):\n"
        "    with pacedio.open(sys.argv[1], 'wb', atomic=True, sync=False) as f:\n"
        "        f.write(b'%d' % (number % 10) * 300_000)\n"
    )
    target = tmp_path / "target"
    for number in range(15):
        target.write_bytes(b"x" * 300_000)
        with subprocess.Popen([sys.executable, "-c", script, target], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.01 + number * 0.003)
            process.send_signal(signal.SIGKILL)
        found = target.read_bytes()
        assert len(found) == 300_000
        assert len(set(found)) == 1
        # A replaced file's successor has a name beside it for the moment before the rename.
        left = set(os.listdir(tmp_path)) - {"target"}
        assert len(left) <= 1
        for name in left:
            (tmp_path / name).unlink()
