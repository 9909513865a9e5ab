"""tarfile and zipfile, written and extracted paced.

    with open_tar("home.tar.gz", "w:gz", atomic=True) as tar:
        tar.add("/home")
    extract("home.tar.gz", "/restored")

`open_tar` and `open_zip` return what the stdlib's classes are in all else. What is added is read without disturbing the
page cache. `extract` makes all files durable together.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import warnings
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

from pacedio._batch import Batch
from pacedio.files import open as _open
from pacedio.pacing import BALANCED
from pacedio.writer import PacedWriter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from pacedio.pacing import Pacing
    from pacedio.reader import PacedReader

    Path = str | os.PathLike[str]

__all__ = ["PacedTarFile", "PacedZipFile", "SourceChange", "SourceChangedWarning", "extract", "open_tar", "open_zip"]

_CHUNK = 1 << 20


class SourceChangedWarning(UserWarning):
    """A file changed its size while it was added to an archive."""


class SourceChange(NamedTuple):
    """What was found: the name in the archive, the size at first, and the size that was read, in bytes. In a tar
    archive the member has the first size: what is missing is zeros, what is more is left out.
    """

    name: str
    expected: int
    found: int


def _note_change(changed: list[SourceChange], name: str, expected: int, found: int, what: str) -> None:
    changed.append(SourceChange(name, expected, found))
    warnings.warn(
        f"{name!r} had {expected} bytes at first and {found} when it was read: {what}",
        SourceChangedWarning,
        stacklevel=4,
    )


# ---- writing ----------------------------------------------------------------------------------------------------


class _Exactly:
    """As many bytes of a file as its header says, whatever became of it."""

    def __init__(self, source: PacedReader, size: int) -> None:
        self._source = source
        self._left = size
        self.found = 0

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data = self._source.read(size)
        self._left -= size
        self.found += len(data)
        return data if len(data) == size else data + bytes(size - len(data))

    def finish(self) -> None:
        """Find out whether there is more."""
        if self._left == 0:
            self.found += len(self._source.read(1))


class PacedTarFile(tarfile.TarFile):
    """A tarfile.TarFile over a paced file, which is closed with it. `open_tar` makes them."""

    changed: list[SourceChange]
    _paced: PacedWriter | None = None

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: Any = None) -> None:
        """Add a member, as tarfile does. A regular file that was not read from yet is read paced."""
        source = _reopened(fileobj) if tarinfo.isreg() else None
        if source is None:
            super().addfile(tarinfo, fileobj)
            return
        with source:
            content = _Exactly(source, tarinfo.size)
            super().addfile(tarinfo, content)
            content.finish()
        if content.found != tarinfo.size:
            grew = content.found > tarinfo.size
            found = os.fstat(fileobj.fileno()).st_size if grew else content.found
            what = "what came later is left out" if grew else "the rest is zeros"
            _note_change(self.changed, tarinfo.name, tarinfo.size, found, what)

    def close(self) -> None:
        """Write the end of the archive, make it durable, commit it if it is atomic, and close."""
        try:
            super().close()
        except BaseException:
            self._leave()
            raise
        if self._paced is not None:
            self._paced.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or self._paced is None:
            super().__exit__(kind, value, traceback)
            return
        try:
            super().__exit__(kind, value, traceback)  # compressors write their rest
        except OSError:
            pass  # the exception under way is the one to tell
        finally:
            self._paced.__exit__(kind, value, traceback)

    def _leave(self) -> None:
        if self._paced is not None:
            self._paced.discard()


def _reopened(fileobj: Any) -> PacedReader | None:
    """A regular file that was opened and not read from, to be read paced."""
    if type(fileobj) is not io.BufferedReader or type(fileobj.raw) is not io.FileIO:
        return None
    fd = fileobj.fileno()
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.lseek(fd, 0, os.SEEK_CUR) != 0:
        return None
    fd = os.dup(fd)
    try:
        return _open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def open_tar(
    name: Path,
    mode: str = "r",
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
    **options: Any,
) -> PacedTarFile:
    """Open a tar archive as tarfile.open does, with its modes ("w:gz", "a", "w|xz", "r:*" and so on) and options.

    pacing, sync, atomic
        As `pacedio.open`; `atomic` in modes "w" and "x" only.

    Files that change while they are added are listed in the archive's `changed`, with a `SourceChangedWarning`: the
    archive is valid in any case. Raises what tarfile.open raises, and what `pacedio.open` raises for its arguments.
    """
    action = mode[:1] if mode else "r"
    appending = action == "a" and os.path.exists(name)
    how = {"w": "wb", "x": "xb", "a": "r+b" if appending else "wb"}.get(action, "rb")
    if action == "a" and not appending:
        mode = f"w{mode[1:]}"
    file: Any = _open(name, how, pacing=pacing, sync=sync, atomic=atomic)
    try:
        tar: PacedTarFile = PacedTarFile.open(os.fspath(name), mode, fileobj=file, **options)  # type: ignore[call-overload]
    except BaseException:
        _abandon(file)
        raise
    tar._paced = file
    tar.changed = []
    return tar


def _abandon(file: Any) -> None:
    if isinstance(file, PacedWriter):
        file.discard()
    else:
        file.close()


class PacedZipFile(zipfile.ZipFile):
    """A zipfile.ZipFile over a paced file, which is closed with it. `open_zip` makes them."""

    changed: list[SourceChange]
    _paced: Any = None

    def write(
        self,
        filename: Path,
        arcname: Path | None = None,
        compress_type: int | None = None,
        compresslevel: int | None = None,
    ) -> None:
        """Add a file, as zipfile does, read paced."""
        if not os.path.isfile(filename):
            super().write(filename, arcname, compress_type, compresslevel)
            return
        with _open(filename, "rb") as source:
            info = zipfile.ZipInfo.from_file(filename, arcname, strict_timestamps=self._strict_timestamps)  # type: ignore[attr-defined]
            info.compress_type = self.compression if compress_type is None else compress_type
            level = self.compresslevel if compresslevel is None else compresslevel
            info._compresslevel = level  # type: ignore[attr-defined]
            expected, found = info.file_size, 0
            with self.open(info, "w", force_zip64=expected > 1 << 30) as target:
                while data := source.read(_CHUNK):
                    target.write(data)
                    found += len(data)
        if found != expected:
            _note_change(self.changed, info.filename, expected, found, "all that was read is in the archive")

    def close(self) -> None:
        """Write the end of the archive, make it durable, commit it if it is atomic, and close."""
        try:
            super().close()
        except BaseException:
            if self._paced is not None:
                _abandon(self._paced)
            raise
        if self._paced is not None:
            self._paced.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or self._paced is None:
            super().__exit__(kind, value, traceback)
            return
        try:
            super().close()
        except (OSError, ValueError):
            pass  # the exception under way is the one to tell; ValueError: a member was being written
        finally:
            self._paced.__exit__(kind, value, traceback)


def open_zip(
    file: Path,
    mode: str = "r",
    compression: int = zipfile.ZIP_STORED,
    allowZip64: bool = True,  # noqa: N803  # as zipfile spells it
    compresslevel: int | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
    **options: Any,
) -> PacedZipFile:
    """Open a zip archive as zipfile.ZipFile does, with its modes and arguments.

    pacing, sync, atomic
        As `pacedio.open`; `atomic` in modes "w" and "x" only.

    Files that change while they are added are listed in the archive's `changed`, with a `SourceChangedWarning`.
    """
    how = {"w": "w+b", "x": "x+b", "a": "r+b" if os.path.exists(file) else "w+b", "r": "rb"}.get(mode)
    if how is None:
        raise ValueError(f"open_zip() requires mode 'r', 'w', 'x', or 'a', not {mode!r}")
    paced: Any = _open(file, how, pacing=pacing, sync=sync, atomic=atomic)
    make: type[Any] = PacedZipFile
    try:
        archive: PacedZipFile = make(paced, mode, compression, allowZip64, compresslevel, **options)
    except BaseException:
        _abandon(paced)
        raise
    archive._paced = paced
    archive.changed = []
    return archive


# ---- extraction -------------------------------------------------------------------------------------------------


def extract(
    archive: Path | tarfile.TarFile | zipfile.ZipFile,
    path: Path = ".",
    members: Iterable[Any] | None = None,
    *,
    filter: Any = "data",
    numeric_owner: bool = False,
    pwd: bytes | None = None,
    pacing: Pacing | None = None,
    sync: bool = True,
) -> None:
    """Extract a tar or zip archive, paced; when this returns, everything is durable.

    archive
        A path, or an open archive of either kind, tar streams included.
    path
        The directory to extract to; it is made if it is not there.
    members
        As extractall's: all, by default.
    filter, numeric_owner
        Of tar archives, as TarFile.extractall's; by default "data" (PEP 706), which refuses what leaves `path`.
    pwd
        The password of a zip archive.
    sync
        Whether files, their names and the directories are made durable, together at the end.

    Holes of sparse members stay holes. Members are what tarfile and zipfile make of them: zipfile restores no modes.
    Raises what they raise, `OSError` with the name of a file that could not be written or made durable, and
    `RuntimeError` where this Python has no extraction filters (before 3.10.12 and 3.11.4).
    """
    path = os.fspath(path)
    if isinstance(archive, tarfile.TarFile):
        _extract_tar(archive, path, members, filter, numeric_owner, pacing, sync)
    elif isinstance(archive, zipfile.ZipFile):
        _extract_zip(archive, path, members, pwd, pacing, sync)
    elif zipfile.is_zipfile(archive) and not _is_tar(archive):
        with open_zip(archive) as zipped:
            _extract_zip(zipped, path, members, pwd, pacing, sync)
    else:
        with open_tar(archive) as tar:
            _extract_tar(tar, path, members, filter, numeric_owner, pacing, sync)


def _is_tar(archive: Path) -> bool:
    """A tar archive may hold a zip archive as its last member, which then looks like one itself."""
    return tarfile.is_tarfile(archive)


def _extract_tar(
    tar: tarfile.TarFile,
    path: str,
    members: Iterable[Any] | None,
    filter: Any,
    numeric_owner: bool,
    pacing: Pacing | None,
    sync: bool,
) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise RuntimeError("extract() needs a Python with extraction filters: 3.10.12, 3.11.4, 3.12 or later")
    pacing = pacing or BALANCED
    members = None if members is None else list(members)
    # Kept until the end, since what is raised in a member's extraction is tarfile's to ignore (`errorlevel`).
    errors: list[OSError] = []
    batch = Batch(sync=sync, on_error=lambda _, error: errors.append(error))
    pending: list[PacedWriter] = []

    def hand_over() -> None:
        # By now tarfile has set owner, mode and times, by name.
        while pending:
            batch.add(pending.pop())

    def make_file(member: tarfile.TarInfo, target: str) -> None:
        hand_over()
        sparse = getattr(member, "sparse", None)
        # Blocks that are allocated ahead would fill holes.
        how = pacing if sparse is None else pacing.replace(preallocate="off")
        file = _open(target, "wb", pacing=how, sync=sync)
        try:
            source: Any = tar.fileobj
            source.seek(member.offset_data)
            for offset, size in [(0, member.size)] if sparse is None else sparse:
                if file.tell() != offset:
                    file.seek(offset)
                _copy_exactly(source, file, size)
            if sparse is not None:
                file.truncate(member.size)
            file._complete()
        except BaseException:
            file.discard()
            raise
        pending.append(file)

    _make_directory(path, batch)
    vars(tar)["makefile"] = make_file
    try:
        tar.extractall(path, members, numeric_owner=numeric_owner, filter=filter)  # noqa: S202  # filtered by default
        hand_over()
        for member in tar.getmembers() if members is None else members:
            if not member.isfile():
                _add_directories(batch, path, os.path.join(path, member.name.lstrip("/")))
        batch.commit()
        if errors:
            raise errors[0]
    except BaseException:
        for file in pending:
            file.discard()
        batch.discard()
        raise
    finally:
        del vars(tar)["makefile"]


def _copy_exactly(source: Any, target: PacedWriter, size: int) -> None:
    while size > 0:
        data = source.read(min(size, _CHUNK))
        if not data:
            raise tarfile.ReadError("unexpected end of data")
        target.write(data)
        size -= len(data)


def _extract_zip(
    archive: zipfile.ZipFile,
    path: str,
    members: Iterable[Any] | None,
    pwd: bytes | None,
    pacing: Pacing | None,
    sync: bool,
) -> None:
    batch = Batch(sync=sync)
    _make_directory(path, batch)
    try:
        for each in archive.infolist() if members is None else members:
            info = each if isinstance(each, zipfile.ZipInfo) else archive.getinfo(each)
            # As zipfile has it: no name leads out of the directory.
            parts = [part for part in info.filename.split("/") if part not in ("", ".", "..")]
            target = os.path.join(path, *parts)
            if info.is_dir():
                os.makedirs(target, exist_ok=True)
                _add_directories(batch, path, target)
                continue
            if len(parts) > 1:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                _add_directories(batch, path, target)
            with archive.open(info, pwd=pwd) as source:
                file = _open(target, "wb", pacing=pacing, sync=sync)
                try:
                    while data := source.read(_CHUNK):
                        file.write(data)
                except BaseException:
                    file.discard()
                    raise
            batch.add(file)
        batch.commit()
    except BaseException:
        batch.discard()
        raise


def _make_directory(path: str, batch: Batch) -> None:
    """Make it and what is missing above it, and have the names made durable."""
    missing = []
    above = os.path.abspath(path)
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for made in missing:
        batch.add_directory(os.path.dirname(made))


def _add_directories(batch: Batch, top: str, member: str) -> None:
    """Those below `top` that a member's name goes through, which may have been made for it."""
    top = os.path.abspath(top)
    directory = os.path.abspath(member)
    if os.path.commonpath([top, directory]) != top:
        return
    while True:
        if os.path.isdir(directory) and not os.path.islink(directory):
            batch.add_directory(directory)
        if directory == top:
            return
        directory = os.path.dirname(directory)
