"""pacedio.archives, judged by tarfile, zipfile and the system's tar."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import FileSystem, Machine, descriptors, needs_cachestat, observed, system_calls

import pacedio
from pacedio import Pacing
from pacedio.archives import PacedTarFile, SourceChangedWarning, extract, open_tar, open_zip

KIB = 1024
MIB = 1024 * KIB
DATA = os.urandom(3 * MIB + 5)
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
    with pytest.raises(tarfile.ReadError):
        open_tar("tree/file", "r:")
    with pytest.raises(FileNotFoundError):
        open_tar("none.tar")


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
        with pytest.warns(SourceChangedWarning, match="tree/file"):
            tar.add("tree")
    assert tar.changed == [("tree/file", len(DATA), len(DATA) + change)]
    with tarfile.open("a.tar") as theirs:
        member = theirs.extractfile("tree/file")
        assert member is not None
        content = member.read()
        assert len(theirs.getnames()) == 7
    kept = min(len(DATA), len(DATA) + change)
    assert content == DATA[:kept] + bytes(len(DATA) - kept)


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
        with make(name, "w", compression) as archive:  # type: ignore[operator]
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


def test_a_zip_of_a_source_that_changes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = zipfile.ZipInfo.from_file

    def from_file(*arguments: Any, **named: Any) -> zipfile.ZipInfo:
        info = real(*arguments, **named)
        os.truncate("tree/file", 1000)
        return info

    monkeypatch.setattr(zipfile.ZipInfo, "from_file", from_file)
    with open_zip("a.zip", "w") as archive, pytest.warns(SourceChangedWarning, match="tree/file"):
        archive.write("tree/file")
    assert archive.changed == [("tree/file", len(DATA), 1000)]
    with zipfile.ZipFile("a.zip") as theirs:
        assert theirs.read("tree/file") == DATA[:1000]


# ---- extraction ----

EXTRACT = """
import os, sys
from pacedio.archives import extract
archive, target = sys.argv[1:]
open(os.path.join(os.path.dirname(target), "begin"), "w").close()
extract(archive, target)
"""


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
    assert len([call for call in calls if call.startswith("fsync(")]) == 3
    first = next(i for i, call in enumerate(calls) if call.startswith("fdatasync("))
    assert len([call for call in calls[:first] if "SYNC_FILE_RANGE_WRITE" in call]) >= 100
    assert all((ext4.directory / "out" / "tree" / str(i)).read_bytes() == DATA[:5000] for i in range(300))


def test_holes_are_kept(ext4: FileSystem, tmp_path: Path) -> None:
    if not shutil.which("tar"):
        pytest.skip("tar is not installed")
    source = ext4.directory / "sparse"
    with open(source, "wb") as f:
        f.seek(20 * MIB)
        f.write(DATA)
        f.truncate(100 * MIB)
    archive = tmp_path / "a.tar"
    subprocess.run(["tar", "--sparse", "-cf", archive, "-C", ext4.directory, "sparse"], check=True)
    for how in ("r", "r|"):
        target = ext4.directory / f"out {how}"
        with open_tar(archive, how) as tar:
            extract(tar, target)
        status = (target / "sparse").stat()
        assert status.st_size == 100 * MIB
        assert status.st_blocks * 512 <= len(DATA) + MIB
        assert int(status.st_mtime) == int(source.stat().st_mtime)
        with open(target / "sparse", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as content:
            assert content[20 * MIB : 20 * MIB + len(DATA)] == DATA
            assert content[: 20 * MIB].count(0) == 20 * MIB


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


def test_some_members_and_a_truncated_archive(tree: Path) -> None:
    with tarfile.open("a.tar", "w") as tar:
        tar.add("tree")
    with tarfile.open("a.tar") as theirs:
        extract(theirs, "some", members=(m for m in theirs.getmembers() if "below" in m.name))
        assert "makefile" not in vars(theirs)
    assert sorted(path.name for path in Path("some").rglob("*")) == ["below", "empty", "script", "small", "tree"]
    assert stat.S_IMODE(Path("some/tree/below/script").stat().st_mode) == 0o750
    os.truncate("a.tar", MIB)
    with pytest.raises(tarfile.ReadError, match="unexpected end"):
        extract("a.tar", "cut")
    with pytest.raises(FileNotFoundError):
        extract("none.tar", "cut")


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
