"""pacedio.archives, judged by tarfile, zipfile and the system's tar."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import mmap
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import FileSystem, Machine, descriptors, needs_cachestat, observed, system_calls

import pacedio
from pacedio import Pacing
from pacedio.archives import PacedTarFile, SourceChange, SourceChangedWarning, extract, open_tar, open_zip
from pacedio.exceptions import SourceError

KIB = 1024
MIB = 1024 * KIB
DATA = os.urandom(3 * MIB + 5)
DOCS = Path(__file__).resolve().parents[1] / "docs" / "archives.md"
WRITES = ["w", "w:", "w:gz", "w:bz2", "w:xz", "x", "x:gz", "w|", "w|gz", "w|bz2", "w|xz"]
if sys.version_info >= (3, 14):
    WRITES += ["w:zst", "w|zst"]


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    top = tmp_path / "tree"
    (top / "below" / "empty").mkdir(parents=True)
    (top / "file").write_bytes(DATA)
    (top / "below" / "small").write_bytes(b"x")
    (top / "below" / "script").write_bytes(b"#!\n")
    (top / "below" / "script").chmod(0o750)
    (top / "link").symlink_to("below/small")
    os.link(top / "file", top / "second")
    for path in [top, *top.rglob("*")]:
        os.utime(path, (10**9, 10**9), follow_symlinks=False)
    return top


def look(top: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        when = 0 if path.is_symlink() else int(status.st_mtime)  # tarfile does not set those of links
        found[str(path.relative_to(top))] = (stat.S_IFMT(status.st_mode), when, what)
    return found


# ---- tar ----


@pytest.mark.parametrize("mode", WRITES)
def test_a_tar_is_what_tarfile_writes(tree: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("time.time", lambda: 1e9)  # which gzip puts into its header
    with tarfile.open("their.tar", mode) as theirs:  # type: ignore[call-overload]
        theirs.add("tree")
    os.rename("their.tar", "theirs.tar")
    with open_tar("their.tar", mode, pacing=Pacing(limit="2MiB")) as ours:
        assert isinstance(ours, tarfile.TarFile)
        ours.add("tree")
    assert Path("their.tar").read_bytes() == Path("theirs.tar").read_bytes()
    assert ours.changed == []
    if shutil.which("tar") and not mode.endswith(("xz", "bz2", "zst")):
        assert subprocess.run(["tar", "-tf", "their.tar"], check=True, capture_output=True).stdout.count(b"\n") == 8
    extract("their.tar", "out")
    assert look(Path("out/tree")) == look(tree)


def test_append_and_read(tree: Path) -> None:
    with open_tar("a.tar", "a") as tar:
        tar.add("tree/file")
    with open_tar("a.tar", "a") as tar:
        tar.add("tree/below")
        tar.addfile(tarfile.TarInfo("nothing"))
        info = tarfile.TarInfo("memory")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"12345"))
    with open_tar("a.tar") as tar:
        names = tar.getnames()
        assert names[0] == "tree/file"
        assert len(names) == 7
        member = tar.extractfile("memory")
        assert member is not None
        assert member.read() == b"12345"
    with open_tar("a.tar", "r|") as tar:
        assert tar.getnames() == names
    with tarfile.open("a.tar") as theirs:
        assert theirs.getnames() == names
    with pytest.raises(FileExistsError):
        open_tar("a.tar", "x")
    with pytest.raises(ValueError, match="mode"):
        open_tar("a.tar", "q")
    with pytest.raises(tarfile.ReadError, match=r"^tree/file: "):
        open_tar("tree/file", "r:")
    with pytest.raises(tarfile.ReadError, match=r"^tree/file: "):
        open_tar("tree/file", "a")
    assert Path("tree/file").read_bytes() == DATA
    with pytest.raises(FileNotFoundError):
        open_tar("none.tar")


MISUSES: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception]]] = [
    (open_tar, ("w:foo",), {}, tarfile.CompressionError),
    (open_tar, ("w|foo",), {}, tarfile.CompressionError),
    (open_tar, ("x|",), {}, ValueError),
    (open_tar, ("wb",), {}, ValueError),
    (open_tar, ("a:gz",), {}, ValueError),
    (open_tar, ("w",), {"nonsense": 1}, TypeError),
    (open_tar, ("w",), {"pacing": 1}, TypeError),
    (open_tar, ("w:gz",), {"compresslevel": 99}, Exception),
    (open_tar, ("w:xz",), {"preset": 99}, Exception),
    (open_tar, ("a",), {"atomic": True}, ValueError),
    (open_tar, ("r",), {"atomic": True}, ValueError),
    (open_zip, ("w", 99), {}, NotImplementedError),
    (open_zip, ("w",), {"metadata_encoding": "ascii"}, Exception),
    (open_zip, ("a",), {"atomic": True}, ValueError),
    (open_zip, ("r",), {"atomic": True}, ValueError),
    (open_zip, ("q",), {}, ValueError),
]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(("make", "arguments", "named", "kind"), MISUSES)
def test_a_misuse_touches_nothing(
    tmp_path: Path, make: Any, arguments: tuple[Any, ...], named: dict[str, Any], kind: type[Exception], exists: bool
) -> None:
    path = tmp_path / "archive"
    if exists:
        path.write_bytes(b"old")
    with pytest.raises(kind):
        make(path, *arguments, **named)
    assert path.exists() == exists
    assert not exists or path.read_bytes() == b"old"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w|xz", "x"])
def test_an_exception_leaves_an_atomic_tar_what_it_was(tree: Path, mode: str) -> None:
    path = Path("a.tar")
    if mode != "x":
        path.write_bytes(b"old")
    with pytest.raises(KeyError), open_tar(path, mode, atomic=True) as tar:  # noqa: PT012
        tar.add("tree")
        raise KeyError
    assert path.exists() == (mode != "x")
    assert mode == "x" or path.read_bytes() == b"old"
    with open_tar(path, mode, atomic=True) as tar:
        tar.add("tree")
        assert mode == "x" or path.read_bytes() == b"old"
    with tarfile.open(path) as theirs:
        assert len(theirs.getnames()) == 8
    assert sorted(os.listdir()) == ["a.tar", "tree"]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w|"])
@pytest.mark.parametrize("change", [-MIB, 1, MIB])
def test_a_tar_of_a_source_that_changes_is_valid(tree: Path, mode: str, change: int) -> None:
    class Changing(PacedTarFile):
        """The file changes between its header and its content."""

        def addfile(self, tarinfo: tarfile.TarInfo, fileobj: Any = None) -> None:
            if tarinfo.name == "tree/file":
                os.truncate("tree/file", len(DATA) + change)
            super().addfile(tarinfo, fileobj)

    os.unlink("tree/second")
    with open_tar("a.tar", mode) as tar:
        tar.__class__ = Changing
        with pytest.warns(SourceChangedWarning, match="tree/file") as warned:
            tar.add("tree")
    assert warned[0].filename == __file__
    assert tar.changed == [("tree/file", len(DATA), len(DATA) + change)]
    with tarfile.open("a.tar") as theirs:
        member = theirs.extractfile("tree/file")
        assert member is not None
        content = member.read()
        assert len(theirs.getnames()) == 7
    kept = min(len(DATA), len(DATA) + change)
    assert content == DATA[:kept] + bytes(len(DATA) - kept)


def test_a_part_of_a_file_is_what_the_caller_asked_for(tree: Path) -> None:
    """No report, the file is left where tarfile leaves it, and its locks are kept."""
    sizes, contents = [10, 100_000, 5], []
    with open("tree/file", "r+b") as locked, open("tree/file", "rb") as f, open_tar("a.tar", "w") as tar:
        fcntl.lockf(locked, fcntl.LOCK_EX)
        contents.append(f.read(3))
        for i, size in enumerate(sizes):
            info = tarfile.TarInfo(str(i))
            info.size = size
            tar.addfile(info, f)
            assert f.tell() == 3 + sum(sizes[: i + 1])
        rest = f.read()
        assert is_locked("tree/file")
    assert tar.changed == []
    with tarfile.open("a.tar") as theirs:
        contents += [theirs.extractfile(str(i)).read() for i in range(3)]  # type: ignore[union-attr]
    assert [len(content) for content in contents[1:]] == sizes
    assert b"".join(contents) + rest == DATA


def is_locked(path: str) -> bool:
    """As another process finds it."""
    script = "import fcntl, sys\nfcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run([sys.executable, "-c", script, path], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0 or "BlockingIOError" in done.stderr
    return done.returncode != 0


def test_a_file_that_is_too_short_for_its_header(tree: Path) -> None:
    with open_tar("a.tar", "w") as tar, open("tree/below/script", "rb") as f:
        info = tarfile.TarInfo("script")
        info.size = 600
        with pytest.warns(SourceChangedWarning, match="'script' had 600 bytes at first and 3") as warned:
            tar.addfile(info, f)
        tar.addfile(tarfile.TarInfo("next"))
    assert warned[0].filename == __file__
    assert tar.changed == [SourceChange("script", 600, 3)]
    with tarfile.open("a.tar") as theirs:
        assert theirs.extractfile("script").read() == b"#!\n" + bytes(597)  # type: ignore[union-attr]
        assert theirs.getnames() == ["script", "next"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """/proc/self/mem is a regular file whose first byte cannot be read."""
    info = tarfile.TarInfo("memory")
    info.size = 1
    with open("/proc/self/mem", "rb") as f, open_tar(tmp_path / "a.tar", "w") as tar:
        with pytest.raises(SourceError, match="/proc/self/mem") as error:
            tar.addfile(info, f)
        assert (error.value.errno, error.value.filename) == (errno.EIO, "/proc/self/mem")
    with open_zip(tmp_path / "a.zip", "w") as archive, pytest.raises(SourceError, match="/proc/self/mem") as error:
        archive.write("/proc/self/mem")
    assert (error.value.errno, error.value.filename) == (errno.EIO, "/proc/self/mem")


def test_without_pacing_the_class_is_tarfiles(tree: Path) -> None:
    with PacedTarFile.open("a.tar", "w") as tar:
        tar.add("tree")
    with tarfile.open("a.tar") as theirs:
        assert len(theirs.getnames()) == 8


def resident(path: Path) -> int:
    return int(pacedio.observe.cachestat(path).cached) * mmap.PAGESIZE


@needs_cachestat
def test_adding_leaves_the_page_cache_as_it_was(ext4: FileSystem) -> None:
    cold, warm = ext4.directory / "cold", ext4.directory / "warm"
    for path in (cold, warm):
        path.write_bytes(os.urandom(8 * MIB))
    os.sync()
    for path in (cold, warm):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    warm.read_bytes()
    before = resident(cold), resident(warm)
    assert before[0] < MIB < before[1]
    with open_tar(ext4.directory / "a.tar", "w") as tar, open_zip(ext4.directory / "a.zip", "w") as archive:
        for path in (cold, warm):
            tar.add(path, path.name)
            archive.write(path, path.name)
    assert resident(cold) < MIB
    assert resident(warm) == before[1]


@needs_cachestat
@pytest.mark.parametrize("make", [open_tar, open_zip])
def test_what_is_in_flight_is_bounded(ext4: FileSystem, tmp_path: Path, make: Any) -> None:
    (tmp_path / "source").write_bytes(os.urandom(96 * MIB))
    path = ext4.directory / "archive"
    path.touch()
    with observed(path) as seen, make(path, "w", pacing=Pacing(limit="2MiB")) as archive:
        if make is open_tar:
            archive.add(tmp_path / "source", "source")
        else:
            archive.write(tmp_path / "source", "source")
    assert 0 < seen["most"] <= 2 * MIB + 64 * KIB


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_full_file_system(machine: Machine, tree: Path, mode: str, atomic: bool) -> None:
    (tree / "big").write_bytes(os.urandom(64 * MIB))
    with machine.mounted("ext4", 32 * MIB) as full:
        path = full.directory / "a.tar"
        with pytest.raises(OSError, match="No space left") as error, open_tar(path, mode, atomic=atomic) as tar:
            tar.add("tree")
        assert error.value.filename == str(path)
        assert path.exists() != atomic


# ---- zip ----


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_is_what_zipfile_writes(tree: Path, compression: int) -> None:
    for make, name in ((zipfile.ZipFile, "theirs.zip"), (open_zip, "ours.zip")):
        with make(name, "w", compression) as archive:
            archive.write("tree")
            archive.write("tree/file", compresslevel=1)
            archive.write("tree/below/small", "renamed", zipfile.ZIP_STORED)
            archive.writestr(zipfile.ZipInfo("string"), b"12345")
    assert Path("ours.zip").read_bytes() == Path("theirs.zip").read_bytes()
    with open_zip("ours.zip", "a") as archive:
        archive.write("tree/below/script")
    with open_zip("ours.zip") as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 5
    extract("ours.zip", "out")
    assert Path("out/tree/file").read_bytes() == DATA
    assert Path("out/renamed").read_bytes() == b"x"
    with pytest.raises(ValueError, match="mode"):
        open_zip("ours.zip", "q")
    with pytest.raises(zipfile.BadZipFile):
        open_zip("tree/file")


def test_an_exception_leaves_an_atomic_zip_what_it_was(tree: Path) -> None:
    path = Path("a.zip")
    path.write_bytes(b"old")
    with pytest.raises(KeyError), open_zip(path, "w", atomic=True) as archive:  # noqa: PT012
        archive.write("tree/file")
        raise KeyError
    assert path.read_bytes() == b"old"
    with pytest.raises(KeyError), open_zip(path, "w", atomic=True) as archive:  # noqa: PT012
        archive.open("member", "w").write(b"x")  # and is left open
        raise KeyError
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir()) == ["a.zip", "tree"]


@pytest.mark.parametrize("change", [-MIB, 1, MIB])
def test_a_zip_of_a_source_that_changes(tree: Path, monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    real = zipfile.ZipInfo.from_file

    def from_file(*arguments: Any, **named: Any) -> zipfile.ZipInfo:
        info = real(*arguments, **named)
        os.truncate("tree/file", len(DATA) + change)
        return info

    monkeypatch.setattr(zipfile.ZipInfo, "from_file", from_file)
    with open_zip("a.zip", "w") as archive, pytest.warns(SourceChangedWarning, match="tree/file") as warned:
        archive.write("tree/file")
    assert warned[0].filename == __file__
    assert archive.changed == [("tree/file", len(DATA), len(DATA) + change)]
    with zipfile.ZipFile("a.zip") as theirs:
        assert theirs.read("tree/file") == DATA[: len(DATA) + change]


def test_a_zip_of_itself_and_of_proc(tree: Path) -> None:
    with open_zip("a.zip", "w") as archive:
        archive.write("tree/file")
        archive.fp.flush()  # type: ignore[union-attr]
        with pytest.warns(SourceChangedWarning, match="a.zip"):
            archive.write("a.zip")  # grows as it is read
        archive.write("/proc/self/status", "status")  # says that it is empty
        assert len(archive.changed) == 1
    with zipfile.ZipFile("a.zip") as theirs:
        assert theirs.testzip() is None
        assert theirs.getinfo("a.zip").file_size == archive.changed[0].expected
        assert b"Name:" in theirs.read("status")


def test_the_systems_unzip_reads_it(tree: Path) -> None:
    if not shutil.which("unzip"):
        pytest.skip("unzip is not installed")
    with open_zip("a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in ("tree", "tree/file", "tree/below/script"):
            archive.write(path)
    subprocess.run(["unzip", "-q", "a.zip", "-d", "out"], check=True)
    assert Path("out/tree/file").read_bytes() == DATA
    assert stat.S_IMODE(Path("out/tree/below/script").stat().st_mode) == 0o750


@pytest.mark.parametrize("atomic", [True, False])
def test_a_zip_that_is_garbage(tree: Path, atomic: bool) -> None:
    """zipfile completes it; an atomic one must not take the target's place."""
    path = Path("a.zip")
    path.write_bytes(b"old")
    archive = open_zip(path, "w", atomic=atomic)
    archive.write("tree/below/small")
    del archive
    gc.collect()
    if atomic:
        assert path.read_bytes() == b"old"
    else:
        with zipfile.ZipFile(path) as theirs:
            assert theirs.namelist() == ["tree/below/small"]


def test_a_zip_with_an_open_member_is_closed_later(tree: Path) -> None:
    archive = open_zip("a.zip", "w")
    member = archive.open("member", "w")
    member.write(b"x")
    with pytest.raises(ValueError, match="open writing handle"):
        archive.close()
    member.close()
    archive.close()
    with zipfile.ZipFile("a.zip") as theirs:
        assert theirs.read("member") == b"x"
    with pytest.raises(ValueError, match="open writing handle"), open_zip("b.zip", "w") as archive:
        member = archive.open("member", "w")
    with contextlib.suppress(ValueError):  # as it is with a zipfile that was closed
        member.close()


def test_a_member_that_is_read_keeps_the_zip_open(tree: Path) -> None:
    with open_zip("a.zip", "w") as archive:
        archive.write("tree/file")
    with open_zip("a.zip") as archive:
        member = archive.open("tree/file")
    with member:
        assert member.read() == DATA


# ---- extraction ----

EXTRACT = """
import os, sys
from pacedio.archives import extract
archive, target = sys.argv[1:]
open(os.path.join(os.path.dirname(archive), "begin"), "w").close()
extract(archive, target)
"""


def synced_directories(calls: list[str]) -> list[str]:
    """By the names they were opened by."""
    opened: dict[str, str] = {}
    found = []
    for call in calls:
        if match := re.match(r'openat\(AT_FDCWD, "([^"]+)", [^)]*O_DIRECTORY.*\) = (\d+)$', call):
            opened[match[2]] = match[1]
        elif match := re.match(r"fsync\((\d+)\)\s+= 0$", call):
            found.append(opened[match[1]])
    return found


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_every_directory_is_synced_once(ext4: FileSystem, tmp_path: Path, kind: str) -> None:
    """Those that the archive does not mention, and those that were made to extract to, as well; by whatever name."""
    archive = tmp_path / "archive"
    names = ["a/b/c/file", "a/b/c/second", "a/x/file", "file"]
    if kind == "tar":
        with tarfile.open(archive, "w") as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))
            for name, type_, target in (("a/l/link", tarfile.SYMTYPE, "x"), ("a/h/hard", tarfile.LNKTYPE, "file")):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = type_, target
                tar.addfile(info)
            info = tarfile.TarInfo("a/e/empty")
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
    else:
        with zipfile.ZipFile(archive, "w") as zipped:
            for name in [*names, "a/e/empty/"]:
                zipped.writestr(name, b"")
    top = ext4.directory
    (top / "other").symlink_to(".")
    calls = system_calls(EXTRACT, archive, top / "other" / "new" / "out", log=tmp_path / "log")
    expected = [top, top / "new", *(top / "new" / "out" / name for name in ("", "a", "a/b", "a/b/c", "a/x", "a/e"))]
    expected += [top / "new" / "out" / "a/e/empty"]
    if kind == "tar":
        expected += [top / "new" / "out" / name for name in ("a/l", "a/h")]
    assert sorted(synced_directories(calls)) == sorted(map(str, expected))


@pytest.mark.parametrize("disk", ["ext4", "xfs", "btrfs"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_what_was_extracted_survives_a_power_cut(machine: Machine, tree: Path, disk: str, kind: str) -> None:
    (tree / "below" / "nothing").touch(0o600)
    if kind == "tar":
        with tarfile.open("archive", "w") as tar:
            tar.add("tree/file")  # and not the directory it is in
            tar.add("tree/second")
            tar.add("tree/below")
            tar.add("tree/link")
    else:
        with zipfile.ZipFile("archive", "w") as zipped:
            for path in ("tree/file", "tree/below/script", "tree/below/empty", "tree/below/nothing"):
                zipped.write(path)
    options = [] if disk == "xfs" else ["commit=300"]
    with machine.mounted(disk, 400 * MIB, *options) as before:
        extract("archive", before.directory / "new" / "out")
        copy = before.cut_power(Path("copy").resolve())
        extracted = look(before.directory / "new")
    with machine.remounted(disk, copy) as after:
        found = look(after.directory / "new")
        if kind == "tar":
            script = after.directory / "new" / "out" / "tree" / "below" / "script"
            assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert found == extracted
    assert len(found) == (10 if kind == "tar" else 7)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_many_files_are_made_durable_together(ext4: FileSystem, tmp_path: Path, kind: str) -> None:
    (tmp_path / "tree").mkdir()
    archive = tmp_path / "archive"
    for i in range(300):
        (tmp_path / "tree" / str(i)).write_bytes(DATA[:5000])
    if kind == "tar":
        with tarfile.open(archive, "w") as tar:
            tar.add(tmp_path / "tree", "tree")
    else:
        with zipfile.ZipFile(archive, "w") as zipped:
            for i in range(300):
                zipped.write(tmp_path / "tree" / str(i), f"tree/{i}")
    calls = system_calls(EXTRACT, archive, ext4.directory / "out", log=tmp_path / "log")
    assert len([call for call in calls if call.startswith("fdatasync(")]) == 300
    # The directory with the files, the one it is in, and the one that was there.
    assert len(synced_directories(calls)) == 3
    first = next(i for i, call in enumerate(calls) if call.startswith("fdatasync("))
    assert len([call for call in calls[:first] if "SYNC_FILE_RANGE_WRITE" in call]) >= 100
    assert all((ext4.directory / "out" / "tree" / str(i)).read_bytes() == DATA[:5000] for i in range(300))


@pytest.mark.parametrize("how", ["r", "r|"])
@pytest.mark.parametrize(
    "form", ["--format=gnu", "--sparse-version=0.0", "--sparse-version=0.1", "--sparse-version=1.0"]
)
def test_holes_are_kept(ext4: FileSystem, tmp_path: Path, form: str, how: str) -> None:
    if not shutil.which("tar"):
        pytest.skip("tar is not installed")
    source = ext4.directory / "sparse"
    with open(source, "wb") as f:
        f.seek(20 * MIB)
        f.write(DATA)
        f.seek(50 * MIB)
        f.write(b"x")
        f.truncate(100 * MIB)
    archive = tmp_path / "a.tar"
    form = form.replace("--sparse-version", "--format=posix --sparse-version")
    command: list[str | Path] = ["tar", *form.split(), "--sparse", "-cf", archive, "-C", ext4.directory, "sparse"]
    subprocess.run(command, check=True)
    assert archive.stat().st_size < 4 * MIB
    target = ext4.directory / "out"
    with open_tar(archive, how) as tar:
        extract(tar, target)
    status = (target / "sparse").stat()
    assert status.st_size == 100 * MIB
    assert status.st_blocks * 512 <= len(DATA) + MIB
    assert int(status.st_mtime) == int(source.stat().st_mtime)
    subprocess.run(["cmp", source, target / "sparse"], check=True)


@pytest.mark.parametrize("bad", ["../out", "link/out", "device"])
def test_what_leads_out_is_refused(tmp_path: Path, bad: str) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        if bad.startswith("link"):
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "../.."
            tar.addfile(link)
        info = tarfile.TarInfo(bad)
        if bad == "device":
            info.type = tarfile.CHRTYPE
        tar.addfile(info)
    (tmp_path / "in").mkdir()
    with pytest.raises(tarfile.FilterError):
        extract(archive, tmp_path / "in" / "target")
    assert not (tmp_path / "out").exists()
    archive.unlink()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("../../out", b"x")
        zipped.writestr("/absolute", b"y")
    extract(archive, tmp_path / "in" / "target")
    assert (tmp_path / "in" / "target" / "out").read_bytes() == b"x"
    assert (tmp_path / "in" / "target" / "absolute").read_bytes() == b"y"


def test_absolute_names_and_filters(tmp_path: Path) -> None:
    """The "data" filter takes the slash away; whoever trusts the archive gets what it says, and that synced as well."""
    archive, away = tmp_path / "a.tar", tmp_path / "away" / "below"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo(str(away / "file")))
    extract(archive, tmp_path / "out")
    assert not away.exists()
    assert (tmp_path / "out" / away.relative_to("/") / "file").exists()
    calls = system_calls(
        EXTRACT.replace("(archive, target)", "(archive, target, filter='fully_trusted')"),
        *(archive, tmp_path / "other"),
        log=tmp_path / "log",
    )
    assert away.exists()
    assert {str(away), str(away.parent), str(tmp_path)} <= set(synced_directories(calls))
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
        tar.addfile(tarfile.TarInfo("b"))
    extract(archive, tmp_path / "some", filter=lambda member, path: None if member.name == "a" else member)
    assert os.listdir(tmp_path / "some") == ["b"]


def test_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tar(tmp_path / "a.tar", "w"):
        pass
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(RuntimeError, match=r"3\.10\.12, 3\.11\.4"):
        extract(tmp_path / "a.tar", tmp_path / "out")


def test_some_members(tree: Path) -> None:
    with tarfile.open("a.tar", "w") as tar:
        tar.add("tree")
    with tarfile.open("a.tar") as theirs:
        extract(theirs, "some", members=(m for m in theirs.getmembers() if "below" in m.name))
        assert not {"makefile", "chown"} & set(vars(theirs))
    assert sorted(path.name for path in Path("some").rglob("*")) == ["below", "empty", "script", "small", "tree"]
    assert stat.S_IMODE(Path("some/tree/below/script").stat().st_mode) == 0o750
    # Of a stream members are known only as they come.
    with open_tar("a.tar", "r|") as stream:
        extract(stream, "streamed", members=(member for member in stream if member.name == "tree/file"))
    assert Path("streamed/tree/file").read_bytes() == DATA
    with zipfile.ZipFile("a.zip", "w") as zipped:
        zipped.writestr("a", b"a")
        zipped.writestr("b", b"b")
        zipped.writestr("..", b"")
    extract("a.zip", "zipped", members=["b"])
    assert os.listdir("zipped") == ["b"]
    with pytest.raises(ValueError, match=r"a\.zip: a member has no name"):
        extract("a.zip", "zipped")


@pytest.mark.parametrize("sizes", [(3 * MIB, 5), (5, 3 * MIB), (3 * MIB, 2 * MIB)])
def test_the_last_member_of_a_name_counts(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar, zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        for i, size in enumerate(sizes):
            info = tarfile.TarInfo("file")
            info.size, info.mtime, info.mode = size, 10**9 + i, 0o600 + i * 0o40
            tar.addfile(info, io.BytesIO(DATA[i : i + size]))
            with contextlib.nullcontext() if i == 0 else pytest.warns(UserWarning, match="Duplicate"):
                zipped.writestr("file", DATA[i : i + size])
    for kind in ("tar", "zip"):
        extract(tmp_path / f"a.{kind}", tmp_path / kind)
        assert (tmp_path / kind / "file").read_bytes() == DATA[1 : 1 + sizes[1]]
    status = (tmp_path / "tar" / "file").stat()
    assert (status.st_mtime, stat.S_IMODE(status.st_mode)) == (10**9 + 1, 0o640)


# A tar has no checksum of contents, and tarfile's streams do not look at gzip's.
DAMAGED = [("cut", mode, how) for mode in ("w", "w:gz", "w:bz2", "w:xz") for how in ("r", "r|*")]
DAMAGED += [("changed", mode, how) for mode in ("w:gz", "w:bz2", "w:xz") for how in ("r", "r|*")]
DAMAGED.remove(("changed", "w:gz", "r|*"))


@pytest.mark.parametrize(("damage", "mode", "how"), DAMAGED)
def test_a_damaged_tar_is_named(tree: Path, mode: str, how: str, damage: str) -> None:
    with open_tar("a.tar", mode) as tar:
        tar.add("tree")
    if damage == "cut":
        os.truncate("a.tar", MIB)
    else:
        with open("a.tar", "r+b") as f:
            f.seek(MIB)
            f.write(bytes(1000))
    with pytest.raises(tarfile.ReadError, match=r"a\.tar: "), open_tar("a.tar", how) as tar:
        extract(tar, "out")
    with pytest.raises(tarfile.ReadError, match=r"a\.tar: "):
        extract("a.tar", "out")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_zip_is_named(tree: Path, compression: int) -> None:
    with open_zip("a.zip", "w", compression) as archive:
        archive.write("tree/file")
    with open("a.zip", "r+b") as f:
        f.seek(MIB)
        f.write(bytes(1000))
    with pytest.raises(zipfile.BadZipFile, match=r"a\.zip: "):
        extract("a.zip", "out")
    os.truncate("a.zip", MIB)
    with pytest.raises(zipfile.BadZipFile, match=r"a\.zip: "):
        open_zip("a.zip")


def test_what_is_no_archive(tree: Path) -> None:
    with pytest.raises(tarfile.ReadError, match=r"^tree/file: "):
        extract("tree/file", "out")
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        extract("none.tar", "out")
    with open_tar("a.tar", "w") as tar, pytest.raises(io.UnsupportedOperation, match=r"a\.tar.*mode 'w'"):
        extract(tar, "out")
    with open_zip("a.zip", "w") as archive, pytest.raises(io.UnsupportedOperation, match=r"a\.zip.*mode 'w'"):
        extract(archive, "out")
    with pytest.raises(FileExistsError, match="tree/file"):
        extract("a.tar", "tree/file")
    with zipfile.ZipFile("inner.zip", "w") as zipped:
        zipped.writestr("a", b"a")
    with open_tar("outer.tar", "w") as tar:
        tar.add("inner.zip")
    extract("outer.tar", "out")
    assert os.listdir("out") == ["inner.zip"]


def test_a_directory_that_may_not_be_read(tmp_path: Path) -> None:
    """Its mode is the archive's to choose. What is in it was made durable with the files."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        for name, type_, mode in (("box", tarfile.DIRTYPE, 0o300), ("box/file", tarfile.REGTYPE, 0o600)):
            info = tarfile.TarInfo(name)
            info.type, info.mode = type_, mode
            tar.addfile(info)
    with tempfile.TemporaryDirectory() as reachable, open_tar(archive) as opened:
        os.chmod(reachable, 0o777)
        out = Path(reachable) / "out"
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
        else:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                extract(opened, out, filter="fully_trusted")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert stat.S_IMODE((out / "box").stat().st_mode) == 0o300
        assert (out / "box" / "file").exists()


def test_the_documentation_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    command = [sys.executable, "-W", "error", "-c", "\n".join(blocks)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_extraction_to_a_disk_that_fails(machine: Machine, tree: Path) -> None:
    os.unlink("tree/second")
    with tarfile.open("a.tar", "w") as tar:
        for i in range(30):
            tar.add("tree/file", str(i))
    with machine.failing_disk() as failing, pytest.raises(OSError) as error:  # noqa: PT011
        extract("a.tar", failing.directory / "out")
    assert str(failing.directory) in str(error.value.filename)
    with machine.mounted("ext4", 32 * MIB) as full, pytest.raises(OSError, match="No space left") as error:
        extract("a.tar", full.directory / "out")
    assert str(full.directory) in str(error.value.filename)
