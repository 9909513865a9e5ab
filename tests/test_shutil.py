"""pacedio.copying: what shutil does, paced and durable; and removal in steps."""

from __future__ import annotations

import gzip
import io
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import FileSystem, Machine, descriptors, system_calls

import pacedio
from pacedio import copying

KIB = 1024
MIB = 1024 * KIB
DATA = os.urandom(5 * MIB + 123)

COPIES = [copying.copyfile, copying.copy, copying.copy2]


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    path.chmod(0o640)
    os.utime(path, ns=(10**18, 10**18 + 1))
    return path


# ---- copyfileobj ----


def read_from(kind: str, path: Path, request: pytest.FixtureRequest) -> Any:
    """Something that DATA comes from."""
    if kind == "socket":
        ours, theirs = socket.socketpair()

        def send() -> None:
            theirs.sendall(DATA)
            theirs.close()

        threading.Thread(target=send).start()
        request.addfinalizer(ours.close)
        return ours
    if kind == "pipe":
        process = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
        request.addfinalizer(process.wait)
        made: Any = process.stdout
    elif kind == "gzip":
        packed = path.with_name("packed")
        packed.write_bytes(gzip.compress(DATA, 1))
        made = gzip.open(packed)  # noqa: SIM115
    elif kind == "memory":
        made = io.BytesIO(DATA)
    elif kind == "paced":
        made = pacedio.open(path, "rb")
    else:
        made = open(path, "rb", 0 if kind == "raw" else -1)  # noqa: SIM115
    request.addfinalizer(made.close)
    return made


@pytest.mark.parametrize("target", ["paced", "plain", "raw", "gzip", "memory"])
@pytest.mark.parametrize("kind", ["socket", "pipe", "gzip", "memory", "paced", "plain", "raw"])
def test_copyfileobj(source: Path, tmp_path: Path, request: pytest.FixtureRequest, kind: str, target: str) -> None:
    path = tmp_path / "target"
    fsrc = read_from(kind, source, request)
    if target == "memory":
        memory = io.BytesIO()
        assert copying.copyfileobj(fsrc, memory) is None  # type: ignore[func-returns-value]
        assert memory.getvalue() == DATA
        return
    opened: dict[str, Callable[[], Any]] = {
        "paced": lambda: pacedio.open(path, "wb"),
        "plain": lambda: open(path, "wb"),  # noqa: SIM115
        "raw": lambda: open(path, "wb", 0),  # noqa: SIM115
        "gzip": lambda: gzip.open(path, "wb", 1),  # noqa: SIM115
    }
    with opened[target]() as fdst:
        fdst.write(b"before")
        copying.copyfileobj(fsrc, fdst)
        fdst.write(b"after")  # it stays open, at its end
    content = gzip.decompress(path.read_bytes()) if target == "gzip" else path.read_bytes()
    assert content == b"before" + DATA + b"after"


@pytest.mark.parametrize("length", [0, 1, 1000, -1])
def test_copyfileobj_goes_on_from_where_the_source_is(source: Path, tmp_path: Path, length: int) -> None:
    with open(source, "rb") as fsrc, open(tmp_path / "target", "wb") as fdst:
        fsrc.seek(5 * MIB)
        copying.copyfileobj(fsrc, fdst, length)
        assert fsrc.read() == b""
    assert (tmp_path / "target").read_bytes() == DATA[5 * MIB :]


def test_copyfileobj_leaves_a_source_at_its_end(source: Path, tmp_path: Path) -> None:
    with open(source, "rb") as fsrc, open(tmp_path / "target", "wb") as fdst:
        copying.copyfileobj(fsrc, fdst, sync=True)
        assert fsrc.tell() == len(DATA)
        assert fsrc.read() == b""


def test_copyfileobj_copies_text(tmp_path: Path) -> None:
    target = io.StringIO()
    copying.copyfileobj(io.StringIO("abc\n" * 1000), target)
    assert target.getvalue() == "abc\n" * 1000
    with open(tmp_path / "file", "w", encoding="utf-8") as f:
        copying.copyfileobj(io.StringIO("ä"), f)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "ä"


def test_copyfileobj_paces_a_plain_file(machine: Machine) -> None:
    with machine.mounted("ext4") as disk:
        path = disk.directory / "file"
        with open(path, "wb") as fdst:
            copying.copyfileobj(io.BytesIO(bytes(64 * MIB)), fdst)
            assert pacedio.observe.cachestat(path).dirty < 8 * MIB


# ---- copyfile, copy, copy2 ----


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_copy_is_what_shutils_is(source: Path, tmp_path: Path, copy: Any, kind: Any) -> None:
    os.setxattr(source, "user.word", b"x")
    theirs = getattr(shutil, copy.__name__)(kind(source), kind(tmp_path / "theirs"))
    ours = copy(kind(source), kind(tmp_path / "ours"))
    assert type(theirs) is type(ours)
    assert str(ours) == str(tmp_path / "ours")
    a, b = os.stat(theirs), os.stat(ours)
    assert Path(ours).read_bytes() == DATA
    assert (a.st_mode, os.listxattr(theirs)) == (b.st_mode, os.listxattr(ours))
    if copy is copying.copy2:
        assert (b.st_mtime_ns, b.st_atime_ns) == (a.st_mtime_ns, a.st_atime_ns) == (10**18 + 1, b.st_atime_ns)


@pytest.mark.parametrize("copy", COPIES)
def test_refusals(source: Path, tmp_path: Path, copy: Any) -> None:
    (tmp_path / "link").symlink_to("source")
    os.link(source, tmp_path / "hard")
    for same in (source, tmp_path / "link", tmp_path / "hard"):
        with pytest.raises(shutil.SameFileError, match="are the same file"):
            copy(source, same)
    os.mkfifo(tmp_path / "fifo")
    for pair in ((tmp_path / "fifo", tmp_path / "x"), (source, tmp_path / "fifo")):
        with pytest.raises(shutil.SpecialFileError, match="is a named pipe"):
            copy(*pair)
    with pytest.raises(FileNotFoundError):
        copy(tmp_path / "none", tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="Directory does not exist"):
        copy(source, f"{tmp_path}/none/")
    assert source.read_bytes() == DATA
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("copy", COPIES)
def test_links(source: Path, tmp_path: Path, copy: Any) -> None:
    (tmp_path / "link").symlink_to("source")
    copy(tmp_path / "link", tmp_path / "followed")
    copy(tmp_path / "link", tmp_path / "copied", follow_symlinks=False)
    assert (tmp_path / "followed").read_bytes() == DATA
    assert not (tmp_path / "followed").is_symlink()
    assert os.readlink(tmp_path / "copied") == "source"


def test_into_a_directory(source: Path, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    assert copying.copy(source, tmp_path / "directory") == str(tmp_path / "directory" / "source")
    assert copying.copy2(str(source), str(tmp_path / "directory")) == str(tmp_path / "directory" / "source")
    with pytest.raises(IsADirectoryError):
        copying.copyfile(source, tmp_path / "directory")


def test_holes_are_kept(ext4: FileSystem) -> None:
    source = ext4.directory / "source"
    with open(source, "wb") as f:
        f.write(b"x")
        f.seek(64 * MIB)
        f.write(b"y")
        f.truncate(100 * MIB)
    copying.copy2(source, ext4.directory / "target")
    status = (ext4.directory / "target").stat()
    assert status.st_size == 100 * MIB
    assert status.st_blocks * 512 < MIB
    assert status.st_mtime_ns == source.stat().st_mtime_ns


def test_a_full_file_system(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes([1]) * (64 * MIB))
    with machine.mounted("ext4", 32 * MIB) as full, pytest.raises(OSError, match="No space left") as error:
        copying.copy2(tmp_path / "source", full.directory / "target")
    assert error.value.filename == str(full.directory / "target")


# ---- trees ----


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    for i in range(40):
        (top / f"d{i % 4}" / "below").mkdir(parents=True, exist_ok=True)
        (top / f"d{i % 4}" / "below" / str(i)).write_bytes(DATA[: i * 10_000])
    (top / "empty").mkdir()
    (top / "link").symlink_to("d0/below/0")
    (top / "d1" / "below" / "1").chmod(0o600)
    os.utime(top / "d1", ns=(7, 7))
    return top


def look(top: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(top))] = (status.st_mode, status.st_mtime_ns if not path.is_symlink() else 0, what)
    return found


@pytest.mark.parametrize("symlinks", [True, False])
@pytest.mark.parametrize("copy", [copying.copy2, shutil.copy2])
def test_copytree(tree: Path, tmp_path: Path, symlinks: bool, copy: Any) -> None:
    shutil.copytree(tree, tmp_path / "theirs", symlinks)
    assert copying.copytree(tree, tmp_path / "ours", symlinks, copy_function=copy) == tmp_path / "ours"
    assert look(tmp_path / "ours") == look(tmp_path / "theirs")


def test_copytree_as_shutils_with_our_function(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "target", symlinks=True, copy_function=copying.copy2)
    assert look(tmp_path / "target") == look(tree)


def test_copytree_leaves_out_and_overwrites(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    copying.copytree(str(tree), str(target), True, shutil.ignore_patterns("d1", "3*"), copy_function=copying.copyfile)
    assert not (target / "d1").exists()
    assert not (target / "d3" / "below" / "3").exists()
    assert (target / "d0" / "below" / "4").exists()
    with pytest.raises(FileExistsError):
        copying.copytree(tree, target)
    (target / "link").unlink()
    copying.copytree(tree, target, True, dirs_exist_ok=True)
    assert look(target) == look(tree)


TREE = """
import os, sys
from pacedio import copying
source, target = sys.argv[1:]
open(os.path.join(source, "..", "begin"), "w").close()
copying.copytree(source, target, symlinks=True)
"""


def test_copytree_syncs_each_file_and_directory_once(tree: Path, ext4: FileSystem, tmp_path: Path) -> None:
    calls = system_calls(TREE, tree, ext4.directory / "target", log=tmp_path / "log")
    assert len([call for call in calls if call.startswith("fdatasync(")]) == 40
    # The tree, four with one below each, the empty one, and the one that it was made in.
    assert len([call for call in calls if call.startswith("fsync(")]) == 1 + 8 + 1 + 1
    assert look(ext4.directory / "target") == look(tree)


def test_copytree_collects_errors(tree: Path, tmp_path: Path) -> None:
    os.mkfifo(tree / "d2" / "fifo")
    (tree / "dangling").symlink_to("nowhere")
    with pytest.raises(shutil.Error) as error:
        copying.copytree(tree, tmp_path / "target")
    names = sorted(os.path.basename(entry[0]) for entry in error.value.args[0])
    assert names == ["dangling", "fifo"]
    assert (tmp_path / "target" / "d3" / "below" / "39").read_bytes() == DATA[:390_000]


def test_copytree_to_a_full_file_system(tree: Path, machine: Machine) -> None:
    (tree / "big").write_bytes(bytes([1]) * (64 * MIB))
    with machine.mounted("ext4", 32 * MIB) as full, pytest.raises(shutil.Error) as error:
        copying.copytree(tree, full.directory / "target", symlinks=True)
    assert any("No space left" in entry[2] and entry[1].endswith("big") for entry in error.value.args[0])


def test_copytree_to_a_failing_disk(tree: Path, machine: Machine) -> None:
    with machine.failing_disk() as failing, pytest.raises((shutil.Error, OSError)):  # noqa: PT012
        for i in range(100):
            copying.copytree(tree, failing.directory / str(i), symlinks=True)


# ---- move ----


def test_move_within_a_file_system(source: Path, tmp_path: Path) -> None:
    number = source.stat().st_ino
    assert copying.move(source, tmp_path / "b") == tmp_path / "b"
    assert (tmp_path / "b").stat().st_ino == number
    (tmp_path / "directory").mkdir()
    assert copying.move(str(tmp_path / "b"), str(tmp_path / "directory")) == str(tmp_path / "directory" / "b")
    (tmp_path / "b").touch()
    with pytest.raises(shutil.Error, match="already exists"):
        copying.move(str(tmp_path / "b"), str(tmp_path / "directory"))


def test_move_across_file_systems(tree: Path, source: Path, ext4: FileSystem, tmp_path: Path) -> None:
    before = look(tree)
    assert copying.move(tree, ext4.directory / "moved") == ext4.directory / "moved"
    assert look(ext4.directory / "moved") == before
    assert not tree.exists()
    status = source.stat()
    copying.move(str(source), ext4.directory)
    moved = ext4.directory / "source"
    assert (moved.read_bytes(), moved.stat().st_mtime_ns) == (DATA, status.st_mtime_ns)
    assert not source.exists()
    (tmp_path / "link").symlink_to("nowhere")
    copying.move(tmp_path / "link", ext4.directory / "link")
    assert os.readlink(ext4.directory / "link") == "nowhere"
    with pytest.raises(shutil.Error, match="into itself"):
        copying.move(ext4.directory / "moved", ext4.directory / "moved" / "d0")
    with pytest.raises(FileNotFoundError):
        copying.move(tmp_path / "none", ext4.directory / "x")


# ---- removal ----

BIG = 200 * MIB

UNLINK = """
import os, sys
from pacedio import copying
directory = os.path.dirname(sys.argv[1])
open(os.path.join(directory, "begin"), "w").close()
copying.unlink(sys.argv[1])
"""


@pytest.fixture
def big(ext4: FileSystem) -> Path:
    path = ext4.directory / "big"
    with open(path, "wb") as f:
        os.posix_fallocate(f.fileno(), 0, BIG)
    return path


def steps(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith(("ftruncate(", "unlink"))]


def test_a_big_file_is_freed_in_steps_once_its_name_is_gone(big: Path, tmp_path: Path) -> None:
    calls = steps(system_calls(UNLINK, big, log=tmp_path / "log"))
    assert calls[0].startswith("unlink")
    sizes = [int(call.split(", ")[1].split(")")[0]) for call in calls[1:]]
    assert sizes == [BIG - 64 * MIB, BIG - 128 * MIB, BIG - 192 * MIB]
    assert not big.exists()


@pytest.mark.parametrize("other", ["name", "descriptor", "mapping", "hole"])
def test_a_file_that_others_use_is_only_unlinked(big: Path, tmp_path: Path, other: str) -> None:
    with open(big, "r+b") as f:
        f.seek(BIG - 5)
        f.write(b"there")
    ours: list[Any] = []
    if other == "name":
        os.link(big, big.with_name("second"))
    elif other == "hole":
        os.truncate(big, 0)
        os.truncate(big, BIG)
    else:
        f = open(big, "rb")  # noqa: SIM115
        ours.append(mmap.mmap(f.fileno(), BIG, prot=mmap.PROT_READ) if other == "mapping" else f)
        if other == "mapping":
            f.close()
    assert len(steps(system_calls(UNLINK, big, log=tmp_path / "log"))) == 1
    assert not big.exists()
    if other == "name":
        assert big.with_name("second").read_bytes()[-5:] == b"there"
    for each in ours:
        each.seek(BIG - 5)
        assert each.read(5) == b"there"
        each.close()


def test_unlink_fails_as_os_does(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        copying.unlink(tmp_path / "none")
    assert error.value.filename == tmp_path / "none" or error.value.filename == str(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        copying.unlink(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    copying.unlink(os.fsencode(tmp_path / "link"))
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        (tmp_path / "file").touch()
        copying.unlink("file", dir_fd=fd)
    finally:
        os.close(fd)
    assert os.listdir(tmp_path) == []


RMTREE = UNLINK.replace("copying.unlink(", "copying.rmtree(")


def test_rmtree_frees_big_files_in_steps(big: Path, tmp_path: Path) -> None:
    top = big.with_name("top")
    (top / "below").mkdir(parents=True)
    (top / "below" / "small").touch()
    os.rename(big, top / "below" / "big")
    calls = steps(system_calls(RMTREE, top, log=tmp_path / "log"))
    assert len([call for call in calls if call.startswith("ftruncate(")]) == 3
    assert not top.exists()


def test_rmtree_fails_as_shutils_does(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("tree")
    with pytest.raises(OSError):  # noqa: PT011  # Python 3.13 garbles the message
        copying.rmtree(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        copying.rmtree(tmp_path / "none")
    copying.rmtree(tmp_path / "none", ignore_errors=True)
    seen: list[Any] = []
    copying.rmtree(tmp_path / "none", onexc=lambda function, path, error: seen.append((path, error)))
    assert [(str(path), type(error)) for path, error in seen] == [(str(tmp_path / "none"), FileNotFoundError)]
    copying.rmtree(str(tree))
    assert not tree.exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="shutil.rmtree has dir_fd since Python 3.11")
def test_rmtree_relative_to_a_directory(tree: Path, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        copying.rmtree("tree", dir_fd=fd)
    finally:
        os.close(fd)
    assert not tree.exists()
