"""tarfile and zipfile, written and extracted paced.

    with open_tar("home.tar.gz", "w:gz", atomic=True) as tar:
        tar.add("/home")
    extract("home.tar.gz", "/restored")

`open_tar` and `open_zip` return what the stdlib's classes are in all else. What is added is read without disturbing the
page cache. `extract` makes all files durable together.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import tarfile
import warnings
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

from pacedio._batch import Batch
from pacedio.exceptions import SourceError
from pacedio.files import open as _open
from pacedio.pacing import BALANCED
from pacedio.writer import PacedWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from pacedio.pacing import Pacing
    from pacedio.reader import PacedReader

    Path = str | os.PathLike[str]

__all__ = ["PacedTarFile", "PacedZipFile", "SourceChange", "SourceChangedWarning", "extract", "open_tar", "open_zip"]

_CHUNK = 1 << 20  # bytes
_BUFFER = 1 << 18  # bytes that tarfile copies at once, instead of 16 KiB
_UNTOLD = 1 << 30  # bytes of a file that says it has none (in /proc); a zip member may have twice as many unannounced

# What decompressors raise for damaged data, beside an OSError without an errno.
_DAMAGED: tuple[type[Exception], ...] = (EOFError,)
with contextlib.suppress(ImportError):
    from zlib import error as _zlib_error

    _DAMAGED += (_zlib_error,)
with contextlib.suppress(ImportError):
    from lzma import LZMAError

    _DAMAGED += (LZMAError,)


class SourceChangedWarning(UserWarning):
    """A file changed its size while it was added to an archive."""


class SourceChange(NamedTuple):
    """A file that changed its size while it was added.

    name
        In the archive.
    expected
        Its size in bytes when it was looked at first.
    found
        Where it shrank, the bytes that could be read; where it grew, the size that was seen afterwards.

    In a tar archive the member has the expected size: what is missing is zeros, what is more is left out. In a zip
    archive it has what could be read; what is more is left out as well.
    """

    name: str
    expected: int
    found: int


# ---- writing ----------------------------------------------------------------------------------------------------


class _Source:
    """At most `size` bytes of a file that is added."""

    def __init__(self, reader: PacedReader, name: object, size: int, *, pad: bool) -> None:
        self._reader = reader
        self._name = name
        self._size = size
        self._pad = pad  # with zeros, to just `size` bytes
        self._given = 0
        self.found = 0  # bytes that were read; the file's size, if that is more

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._given
        size = left if size < 0 else min(size, left)
        try:
            data = self._reader.read(size)
        except OSError as error:
            raise SourceError(error.errno, error.strerror, self._name) from error
        self.found += len(data)
        if self._pad and len(data) < size:
            data += bytes(size - len(data))
        self._given += len(data)
        return data

    def look_for_more(self) -> None:
        """Should the file have more than was wanted, that size was found. Reading would tell as well, but may block."""
        if self.found == self._size:
            self.found = max(self.found, os.fstat(self._reader.fileno()).st_size)


class _Closing:
    """What both kinds of archive do about the paced file, which is closed with them."""

    changed: list[SourceChange]
    _paced: Any = None  # None: opened by the stdlib's own constructors

    def _note_change(self, name: str, expected: int, found: int) -> None:
        self.changed.append(SourceChange(name, expected, found))
        # The line to tell is the one that called us, directly or, from tarfile's walk through a directory, not.
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, tarfile.__name__):
            frame, level = frame.f_back, level + 1
        text = f"{name!r} had {expected} bytes at first and {found} when it was read"
        warnings.warn(text, SourceChangedWarning, level)

    def _abandon(self) -> None:
        if self._paced is not None:
            _abandon(self._paced)

    @contextlib.contextmanager
    def _after(self, kind: Any, value: Any, traceback: Any) -> Iterator[None]:
        """Close the paced file after what ends the archive; nothing that fails now hides the exception under way."""
        try:
            with contextlib.suppress(Exception):
                yield
        finally:
            self._paced.__exit__(kind, value, traceback)


def _abandon(file: Any) -> None:
    if isinstance(file, PacedWriter):
        file.discard()
    else:
        file.close()


class PacedTarFile(_Closing, tarfile.TarFile):
    """A tarfile.TarFile over a paced file, which is closed with it. `open_tar` makes them.

    `changed` lists the files that changed their size while they were added (`SourceChange`).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.changed = []
        self._adds = 0  # calls of add() under way, one in the other
        super().__init__(*arguments, **options)

    def add(
        self,
        name: Path,
        arcname: Path | None = None,
        recursive: bool = True,
        *,
        filter: Callable[[tarfile.TarInfo], tarfile.TarInfo | None] | None = None,
    ) -> None:
        """Add a file or a directory with what is in it, as tarfile does. Files are read paced.

        A file that changes its size meanwhile is noted in `changed`, with a `SourceChangedWarning`. Raises
        `SourceError` where a file could not be read.
        """
        self._adds += 1
        try:
            super().add(name, arcname, recursive, filter=filter)
        finally:
            self._adds -= 1

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: Any = None) -> None:
        """Add a member, as tarfile does, with the bytes from the position of `fileobj` on. A file as `open(..., "rb")`
        returns it is read paced; if it has fewer bytes than `tarinfo` says, the rest is zeros, which is noted in
        `changed`, with a `SourceChangedWarning`. Raises `SourceError` where it could not be read.
        """
        if not (tarinfo.isreg() and _is_plain_file(fileobj)):
            super().addfile(tarinfo, fileobj)
            return
        fd, position = fileobj.fileno(), fileobj.tell()
        read_to = os.lseek(fd, 0, os.SEEK_CUR)  # further than its position, by what is in its buffer
        # On the caller's own descriptor: to close another one of the file would end the caller's locks (fcntl(2)).
        with _open(fd, "rb", closefd=False) as reader:
            reader.seek(position)
            source = _Source(reader, fileobj.name, tarinfo.size, pad=True)
            try:
                super().addfile(tarinfo, source)
            finally:
                os.lseek(fd, read_to, os.SEEK_SET)
            fileobj.seek(position + source.found)
            if self._adds:  # else the caller may want just the file's beginning, with a size of their own
                source.look_for_more()
        if source.found != tarinfo.size:
            self._note_change(tarinfo.name, tarinfo.size, source.found)

    def close(self) -> None:
        """Write the end of the archive, make it durable, commit it if it is atomic, and close."""
        try:
            super().close()
        except BaseException:
            self._abandon()
            raise
        if self._paced is not None:
            self._paced.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or self._paced is None:
            super().__exit__(kind, value, traceback)
            return
        with self._after(kind, value, traceback):
            super().__exit__(kind, value, traceback)  # compressors write their rest


def _is_plain_file(file: Any) -> bool:
    """Whether it is a regular file's descriptor with a buffer, and nothing else."""
    return (
        type(file) is io.BufferedReader
        and type(file.raw) is io.FileIO
        and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    )


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
    archive is valid in any case. Raises what tarfile.open raises, before an existing file is touched, and what
    `pacedio.open` raises.
    """
    path = os.fspath(name)
    action = mode[:1]
    if atomic and action not in ("w", "x"):
        raise ValueError(f"atomic=True needs mode 'w' or 'x', not {mode!r}")
    if action in ("w", "x", "a"):
        # What is wrong with mode or options shall be told before the file is made or emptied.
        end_of_archive = bytes(2 * tarfile.BLOCKSIZE) if action == "a" else b""
        tarfile.TarFile.open(path, mode, fileobj=io.BytesIO(end_of_archive), **options).close()  # type: ignore[call-overload]
    options.setdefault("copybufsize", _BUFFER)
    file: Any
    if action == "a":
        try:
            file = _open(path, "r+b", pacing=pacing, sync=sync)
        except FileNotFoundError:
            file, mode = _open(path, "wb", pacing=pacing, sync=sync), "w"
    else:
        file = _open(path, f"{action}b" if action in ("w", "x") else "rb", pacing=pacing, sync=sync, atomic=atomic)
    try:
        with _naming(path, tarfile.ReadError):
            tar: PacedTarFile = PacedTarFile.open(path, mode, fileobj=file, **options)  # type: ignore[call-overload]
    except BaseException:
        _abandon(file)
        raise
    tar._paced = file
    return tar


class PacedZipFile(_Closing, zipfile.ZipFile):
    """A zipfile.ZipFile over a paced file, which is closed with it. `open_zip` makes them.

    `changed` lists the files that changed their size while they were added (`SourceChange`).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.changed = []
        super().__init__(*arguments, **options)

    def write(
        self,
        filename: Path,
        arcname: Path | None = None,
        compress_type: int | None = None,
        compresslevel: int | None = None,
    ) -> None:
        """Add a file, as zipfile does, read paced: as much of it as it had at first.

        A file that changes its size meanwhile is noted in `changed`, with a `SourceChangedWarning`. Raises
        `SourceError` where it could not be read.
        """
        if not os.path.isfile(filename):
            super().write(filename, arcname, compress_type, compresslevel)
            return
        with _open(filename, "rb") as reader:
            info = zipfile.ZipInfo.from_file(filename, arcname, strict_timestamps=self._strict_timestamps)  # type: ignore[attr-defined]
            info.compress_type = self.compression if compress_type is None else compress_type
            level = self.compresslevel if compresslevel is None else compresslevel
            info._compresslevel = level  # type: ignore[attr-defined]
            expected = info.file_size
            source = _Source(reader, filename, expected or _UNTOLD, pad=False)
            with self.open(info, "w") as target:
                while data := source.read(_CHUNK):
                    target.write(data)
            source.look_for_more()
            # A file in /proc says that it has no bytes, before and after.
            changed = source.found != expected and (expected != 0 or os.fstat(reader.fileno()).st_size != 0)
        if changed:
            self._note_change(info.filename, expected, source.found)

    def close(self) -> None:
        """Write the end of the archive, make it durable, commit it if it is atomic, and close.

        Raises `ValueError`, as zipfile does, while a member is open for writing.
        """
        try:
            super().close()
        except BaseException:
            if self.fp is None:  # else it can be closed later
                self._abandon()
            raise
        # Members that are open for reading keep the file open, and zipfile closes it after them.
        if isinstance(self._paced, PacedWriter):
            self._paced.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(self._paced, PacedWriter):
            super().__exit__(kind, value, traceback)
        elif kind is None:
            try:
                self.close()
            except BaseException:
                self._abandon()
                raise
        else:
            with self._after(kind, value, traceback):
                super().close()

    def __del__(self) -> None:
        # zipfile closes what is garbage. That would commit an atomic file, of which garbage is to leave no trace.
        if isinstance(self._paced, PacedWriter) and (self._paced.closed or _is_atomic(self._paced)):
            self._abandon()
            self.fp = None
        super().__del__()


def _is_atomic(file: PacedWriter) -> bool:
    return file._entry is not None and file._entry.atomic


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

    Files that change while they are added are listed in the archive's `changed`, with a `SourceChangedWarning`. Raises
    what zipfile.ZipFile raises, before an existing file is touched, and what `pacedio.open` raises.
    """
    path = os.fspath(file)
    if mode not in ("r", "w", "x", "a"):
        raise ValueError(f"open_zip() requires mode 'r', 'w', 'x', or 'a', not {mode!r}")
    if atomic and mode not in ("w", "x"):
        raise ValueError(f"atomic=True needs mode 'w' or 'x', not {mode!r}")
    make: type[Any] = PacedZipFile
    if mode != "r":
        # What is wrong with the arguments shall be told before the file is made or emptied.
        make(io.BytesIO(), mode, compression, allowZip64, compresslevel, **options).close()
    paced: Any
    if mode == "a":
        try:
            paced = _open(path, "r+b", pacing=pacing, sync=sync)
        except FileNotFoundError:
            paced = _open(path, "w+b", pacing=pacing, sync=sync)
    else:
        paced = _open(path, "rb" if mode == "r" else f"{mode}+b", pacing=pacing, sync=sync, atomic=atomic)
    try:
        with _naming(path, zipfile.BadZipFile):
            archive: PacedZipFile = make(paced, mode, compression, allowZip64, compresslevel, **options)
    except BaseException:
        _abandon(paced)
        raise
    if mode == "r":
        # To be closed by zipfile, which waits for members that are being read, as if it had opened it.
        archive._filePassed = 0  # type: ignore[attr-defined]
    archive._paced = paced
    return archive


# ---- errors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(archive: object, damaged: type[Exception]) -> Iterator[None]:
    """Name the archive in what the stdlib raises for damaged ones; what decompressors raise becomes `damaged`."""
    try:
        yield
    except damaged as error:
        error.args = (f"{archive}: {error}",)
        raise
    except _DAMAGED as error:
        raise damaged(f"{archive}: {str(error) or 'unexpected end of data'}") from error
    except OSError as error:
        if error.errno is None:
            raise damaged(f"{archive}: {error}") from error
        raise


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

    Holes of sparse members stay holes. Members are what tarfile and zipfile make of them: zipfile restores neither
    modes nor times. Raises what they raise, `OSError` with the name of a file that could not be written or made
    durable, `tarfile.ReadError` or `zipfile.BadZipFile` with the name of the archive where it is damaged or neither of
    the two, and `RuntimeError` where this Python has no extraction filters (before 3.10.12 and 3.11.4). What was
    extracted before an error stays, and is not durable.
    """
    top = os.fspath(path)
    if isinstance(archive, tarfile.TarFile):
        _extract_tar(archive, top, members, filter, numeric_owner, pacing, sync)
        return
    if isinstance(archive, zipfile.ZipFile):
        _extract_zip(archive, top, members, pwd, pacing, sync)
        return
    opened: tarfile.TarFile | zipfile.ZipFile
    try:
        # First, since a tar archive may end with a zip archive, and then looks like one.
        opened = open_tar(archive)
    except tarfile.ReadError as error:
        try:
            opened = open_zip(archive)
        except zipfile.BadZipFile:
            raise error from None
    with opened:
        extract(opened, top, members, filter=filter, numeric_owner=numeric_owner, pwd=pwd, pacing=pacing, sync=sync)


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
    if tar.mode != "r":
        raise io.UnsupportedOperation(f"{tar.name!r}: not open for reading, but in mode {tar.mode!r}")
    pacing = pacing or BALANCED
    # Kept until the end as well, since what is raised in a member's extraction is tarfile's to ignore (`errorlevel`).
    errors: list[OSError] = []

    def note_error(name: object, error: OSError) -> None:
        # A directory whose mode in the archive lets nobody read it can be no more than left to the file system: a
        # journalling one commits the names of new files with the files.
        if not (isinstance(error, PermissionError) and isinstance(name, str) and os.path.isdir(name)):
            errors.append(error)

    batch = Batch(sync=sync, on_error=note_error)
    directories = _Directories(batch, path)
    pending: list[PacedWriter] = []

    def hand_over() -> None:
        # By now tarfile has set owner, mode and times, by name.
        while pending:
            batch.add(pending.pop())
        if errors:
            raise errors[0]

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
                _copy_exactly(source, file, size, member.name)
            if sparse is not None:
                file.truncate(member.size)
            file._complete()
        except BaseException:
            file.discard()
            raise
        pending.append(file)

    set_owner = tar.chown

    def set_owner_and_note(member: tarfile.TarInfo, target: str, *arguments: Any, **options: Any) -> None:
        # What tarfile calls once for each member it has made, of whatever type.
        directories.note(target if member.isdir() else os.path.dirname(target))
        set_owner(member, target, *arguments, **options)

    try:
        with (
            _replaced(tar, makefile=make_file, chown=set_owner_and_note),
            _naming(tar.name or "tar archive", tarfile.ReadError),
        ):
            tar.extractall(path, members, numeric_owner=numeric_owner, filter=filter)  # noqa: S202  # filtered by default
            if members is None and isinstance(tar, PacedTarFile):
                # Compressed archives end with a checksum, which is looked at only by who reads to their end. (Of a
                # stream that others opened, a socket perhaps, there may be no end.)
                while tar.fileobj.read(_CHUNK):
                    pass
        hand_over()
        directories.hand_over()
        batch.commit()
        if errors:
            raise errors[0]
    except BaseException:
        for file in pending:
            file.discard()
        batch.discard()
        raise


@contextlib.contextmanager
def _replaced(tar: tarfile.TarFile, **methods: Any) -> Iterator[None]:
    """With methods of its own, of those that tarfile has be replaced for extraction."""
    own = vars(tar)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del own[name]
        own.update(before)


def _copy_exactly(source: Any, target: PacedWriter, size: int, name: str) -> None:
    while size > 0:
        data = source.read(min(size, _CHUNK))
        if not data:
            raise tarfile.ReadError(f"unexpected end of data in {name!r}")
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
    if archive.mode != "r":
        raise io.UnsupportedOperation(f"{archive.filename!r}: not open for reading, but in mode {archive.mode!r}")
    batch = Batch(sync=sync)
    directories = _Directories(batch, path)
    try:
        with _naming(archive.filename or "zip archive", zipfile.BadZipFile):
            for member in archive.infolist() if members is None else members:
                info = member if isinstance(member, zipfile.ZipInfo) else archive.getinfo(member)
                # As zipfile has it: no name leads out of the directory.
                parts = [part for part in info.filename.split("/") if part not in ("", ".", "..")]
                target = os.path.join(path, *parts)
                if info.is_dir():
                    os.makedirs(target, exist_ok=True)
                elif parts:
                    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
                    batch.add(_extract_member(archive, info, target, pwd, pacing, sync))
                else:
                    raise ValueError(f"{archive.filename}: a member has no name: {info.filename!r}")
                directories.note(target if info.is_dir() else os.path.dirname(target))
        directories.hand_over()
        batch.commit()
    except BaseException:
        batch.discard()
        raise


def _extract_member(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    target: str,
    pwd: bytes | None,
    pacing: Pacing | None,
    sync: bool,
) -> PacedWriter:
    with archive.open(info, pwd=pwd) as source:
        file = _open(target, "wb", pacing=pacing, sync=sync)
        try:
            while data := source.read(_CHUNK):
                file.write(data)
        except BaseException:
            file.discard()
            raise
    return file


class _Directories:
    """Those that got new names: up to the one that is extracted to, and above it if it was made for that."""

    def __init__(self, batch: Batch, top: str) -> None:
        self._batch = batch
        self._noted: set[str] = set()  # as they were given
        self._found: dict[str, None] = {}  # in order, without symbolic links
        missing = os.path.realpath(top)
        while not os.path.lexists(missing):
            missing = os.path.dirname(missing)
            self._found[missing] = None
        os.makedirs(top, exist_ok=True)
        self._top = os.path.realpath(top)
        self._found[self._top] = None

    def note(self, directory: str) -> None:
        """Something was made in it; it may have been made itself, and those above it."""
        if directory in self._noted:
            return
        self._noted.add(directory)
        real = os.path.realpath(directory)
        while real not in self._found:
            self._found[real] = None
            real = os.path.dirname(real)

    def hand_over(self) -> None:
        for directory in self._found:
            self._batch.add_directory(directory)
