"""open and wrap, and what becomes of a file's name: made durable, or given to the new content in one step."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat

from pacedio._buffered import _Buffered
from pacedio.pacing import BALANCED, Pacing
from pacedio.reader import PacedReader, RawReader
from pacedio.writer import PacedRandom, PacedTextWriter, PacedWriter, _PacedFile

TYPE_CHECKING = False  # typing is too slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any, Literal, SupportsIndex, TypeAlias
    from typing import overload as _overload

    from _typeshed import OpenBinaryModeUpdating, OpenBinaryModeWriting, OpenTextModeUpdating, OpenTextModeWriting
    from _typeshed import OpenTextModeReading as ReadingText

    File: TypeAlias = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]
    Opener: TypeAlias = Callable[[Any, int], int]
    ReadingBinary: TypeAlias = Literal["rb", "br"]
else:

    def _overload(function):  # what typing's does at run time
        return function


_NAME_MAX = 255  # bytes, on every file system that Linux has


@_overload
def open(
    file: File,
    mode: OpenTextModeWriting | OpenTextModeUpdating,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> PacedTextWriter: ...
@_overload
def open(
    file: File,
    mode: ReadingText = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> io.TextIOWrapper: ...
@_overload
def open(
    file: File,
    mode: OpenBinaryModeUpdating,
    buffering: int = -1,
    encoding: None = None,
    errors: None = None,
    newline: None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> PacedRandom: ...
@_overload
def open(
    file: File,
    mode: OpenBinaryModeWriting,
    buffering: int = -1,
    encoding: None = None,
    errors: None = None,
    newline: None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> PacedWriter: ...
@_overload
def open(  # type: ignore[overload-overlap]
    file: File,
    mode: ReadingBinary,
    buffering: Literal[0],
    encoding: None = None,
    errors: None = None,
    newline: None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> RawReader: ...
@_overload
def open(
    file: File,
    mode: ReadingBinary,
    buffering: int = -1,
    encoding: None = None,
    errors: None = None,
    newline: None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> PacedReader: ...
@_overload
def open(
    file: File,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Opener | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> IO[Any]: ...
def open(
    file: int | str | bytes | os.PathLike[str] | os.PathLike[bytes],
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[Any, int], int] | None = None,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    atomic: bool = False,
) -> IO[Any]:
    """Open a file as the builtin `open` does, with all of its modes and arguments, and pace what is written to it.

    Returns a `PacedWriter` ("wb", "xb", "ab", and with "+"), a `PacedReader` ("rb"), or the text file over one of them.

    pacing
        How; `BALANCED` by default.
    sync
        Whether `close` makes the data durable, the name of a new file included.
    atomic
        Modes "w" and "x" only. The content is written beside the target and takes its name when the file is closed, or
        its `with` block left, without an exception; until then, and after an exception, in a garbage-collected writer
        or a killed process, the target is what it was. Mode, owner and extended attributes of a replaced file are kept,
        a symbolic link is followed. With `sync` (the default) data, name and directory are durable then. Where the file
        system has O_TMPFILE the new file has no name until the end; elsewhere a killed process leaves a file whose name
        begins with a dot and ends in ".tmp".

    Raises what the builtin raises, and `ValueError` for `atomic` with another mode, a descriptor or an opener.
    """
    try:
        raw_mode, text, writes = _MODES[mode]
    except (KeyError, TypeError):
        raw_mode, text, writes = _parse_mode(mode)
    if not isinstance(file, (str, bytes, int)):
        file = os.fspath(file)
    if buffering != -1:
        buffering = _parse_buffering(buffering)
    if pacing is None:
        pacing = BALANCED
    elif not isinstance(pacing, Pacing):
        raise TypeError(f"pacing must be a Pacing, not {type(pacing).__name__}")
    if atomic and raw_mode[0] not in "wx":
        raise ValueError(f"atomic=True needs mode 'w' or 'x', not {mode!r}")
    if text:
        if buffering == 0:
            raise ValueError("can't have unbuffered text I/O")
        encoding = io.text_encoding(encoding)  # type: ignore[attr-defined]  # not in typeshed
    elif not (encoding is None and errors is None and newline is None):
        name = "encoding" if encoding is not None else "errors" if errors is not None else "newline"
        raise ValueError(f"binary mode doesn't take {'a' if name == 'newline' else 'an'} {name} argument")
    elif buffering == 1:
        import warnings

        warnings.warn(
            "line buffering (buffering=1) isn't supported in binary mode, the default buffer size will be used",
            RuntimeWarning,
            stacklevel=2,
        )
        buffering = -1

    binary: Any
    if writes:
        binary = _open_writer(file, raw_mode, buffering, closefd, opener, pacing, sync, atomic)
    elif buffering == 0:
        return RawReader(file, closefd, opener)
    else:
        binary = PacedReader(file, -1 if buffering == 1 else buffering, closefd=closefd, opener=opener)
    if not text:
        return binary  # type: ignore[no-any-return]
    try:
        line_buffering = buffering == 1 or (buffering < 0 and binary.isatty())
        make = PacedTextWriter if writes else io.TextIOWrapper
        wrapper = make(binary, encoding=encoding, errors=errors, newline=newline, line_buffering=line_buffering)
    except BaseException:
        if writes:
            binary.discard()
        else:
            binary.close()
        raise
    wrapper.mode = mode  # type: ignore[misc]
    return wrapper


_MODES: dict[str, tuple[str, bool, bool]] = {}


def _parse_mode(mode: str) -> tuple[str, bool, bool]:
    """The mode of the unbuffered file, whether text is wanted, whether it is written to."""
    if not isinstance(mode, str):
        raise TypeError(f"open() argument 'mode' must be str, not {type(mode).__name__}")
    flags = set(mode)
    if flags - set("rwxabt+") or len(mode) > len(flags):
        raise ValueError(f"invalid mode: {mode!r}")
    if flags >= set("bt"):
        raise ValueError("can't have text and binary mode at once")
    if len(flags & set("rwxa")) != 1:
        raise ValueError("must have exactly one of create/read/write/append mode")
    raw_mode = "".join(sorted(flags - set("bt"), key="rwxa+".index))
    _MODES[mode] = parsed = raw_mode, "b" not in flags, raw_mode != "r"
    return parsed


def _parse_buffering(buffering: SupportsIndex) -> int:
    try:
        size = buffering.__index__()
    except AttributeError:
        raise TypeError(f"'{type(buffering).__name__}' object cannot be interpreted as an integer") from None
    if not -(2**31) <= size < 2**31:
        raise OverflowError("Python int too large to convert to C int")
    return size


def _open_writer(
    file: int | str | bytes,
    mode: str,
    buffering: int,
    closefd: bool,
    opener: Callable[[Any, int], int] | None,
    pacing: Pacing,
    sync: bool,
    atomic: bool,
) -> PacedWriter:
    entry: _Entry | _Replacement | None
    if atomic:
        if isinstance(file, int) or opener is not None or not closefd:
            raise ValueError("atomic=True needs a path, and takes neither an opener nor closefd=False")
        entry = replacement = _Replacement(file, exclusive="x" in mode)
        try:
            raw = _PacedFile(replacement.create(readable="+" in mode), "wb+" if "+" in mode else "wb")
        except BaseException:
            replacement.discard()
            raise
        raw.name = file
    else:
        entry = None if "r" in mode else _ENTRY
        raw = _PacedFile(file, mode, closefd, opener)
    if buffering > 1:
        raw.buffer_size = buffering
    kind = PacedRandom if "+" in mode else PacedWriter
    try:
        return kind(raw, pacing, sync=sync, entry=entry, unbuffered=buffering == 0)
    except BaseException:  # no memory
        raw.close()
        if entry is not None:
            entry.discard()
        raise


def wrap(fileobj: IO[bytes], pacing: Pacing | None = None, *, sync: bool = True) -> PacedWriter:
    """Pace what is written to a binary file that the caller opened and keeps.

    What is in the file's own buffer is written first; then write to the returned `PacedWriter` only. Its `close`
    syncs, unless `sync` is false, and leaves the caller's file open, at the position after what was written.

    Raises `TypeError` for what is not a file as `open` or `tempfile` return them: a text file, a path, and above all a
    file that changes what is written to it (gzip, bz2, lzma), which goes over a paced file and not under it.
    `ValueError` for one that is closed or not open for writing.
    """
    inner = getattr(fileobj, "file", fileobj)  # tempfile's wrappers
    if isinstance(inner, io.TextIOBase):
        raise TypeError(f"wrap() needs a binary file, not {type(inner).__name__}: wrap its .buffer")
    buffered = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, _Buffered)
    raw_file = inner.raw if isinstance(inner, buffered) else inner
    if not isinstance(raw_file, io.FileIO):
        raise TypeError(
            f"wrap() needs a file as open(..., 'wb') returns it, not {type(fileobj).__name__}; what compresses or"
            " converts is to be opened over a paced file: gzip.open(pacedio.open(path, 'wb'))"
        )
    if pacing is not None and not isinstance(pacing, Pacing):
        raise TypeError(f"pacing must be a Pacing, not {type(pacing).__name__}")
    fileobj.flush()
    fd = fileobj.fileno()
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if access == os.O_RDONLY:
        raise ValueError(f"not open for writing: {getattr(fileobj, 'name', fd)!r}")
    if fileobj.seekable():
        fileobj.seek(0, io.SEEK_CUR)  # a file that was read from has its descriptor further on than its position
    # On a descriptor, "w" does not truncate.
    raw = _PacedFile(fd, "wb" if access == os.O_WRONLY else "rb+", closefd=False)
    if isinstance(name := getattr(fileobj, "name", None), (str, bytes)):
        raw.name = name
    kind = PacedWriter if access == os.O_WRONLY else PacedRandom
    return kind(raw, pacing or BALANCED, sync=sync, entry=_ENTRY, keep=fileobj)


# ---- names ------------------------------------------------------------------------------------------------------


class _Entry:
    """The directory entry of a file that may be new: made durable with the first sync. It has no state of its own."""

    atomic = False

    def sync(self, fd: int) -> None:
        _sync_entry(fd)

    def commit(self, fd: int, *, durable: bool) -> None:
        pass

    def discard(self) -> None:
        pass


_ENTRY = _Entry()


def _sync_entry(fd: int) -> None:
    """Sync the directory that holds the file, whatever was renamed, or changed its directory, since it was opened.

    A file without a name (deleted, O_TMPFILE, a pipe) has no entry to sync.
    """
    directory = _directory_of(fd)
    if directory is None:
        return
    try:
        _sync_directory_at(directory)
    except PermissionError:
        # A directory that may be written and not read. Journalling file systems commit a file's entry with the file.
        os.fsync(fd)


def _directory_of(fd: int) -> str | None:
    """The directory that holds the file now."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        named, opened = os.lstat(path), os.fstat(fd)
    except OSError:
        return None
    if not stat.S_ISREG(opened.st_mode) or (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
        return None
    return os.path.dirname(path)


def _sync_directory_at(path: str) -> None:
    directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync_directory(directory_fd, path)
    finally:
        os.close(directory_fd)


def _sync_directory(directory_fd: int, path: object) -> None:
    try:
        os.fsync(directory_fd)
    except OSError as error:
        # File systems that cannot sync a directory say EINVAL, and then have no other way either.
        if error.errno != errno.EINVAL:
            error.filename = path
            raise


class _Replacement:
    """An atomic file: written without a name, or beside the target, and given the target's name by `commit`."""

    atomic = True

    def __init__(self, path: str | bytes, *, exclusive: bool) -> None:
        self._path = path
        self._exclusive = exclusive
        if not path:  # which realpath takes for the current directory
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if exclusive and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        # As bytes: a name need not be text. A symbolic link stays one, and what it points to is replaced.
        directory, self._name = os.path.split(os.path.realpath(os.fsencode(path)))
        self._temporary: bytes | None = None
        self._replaced: int | None = None
        try:
            self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._open = True
            try:
                self._look_at_target()
            except BaseException:
                self.discard()
                raise
        except OSError as error:
            error.filename = path
            raise

    def _look_at_target(self) -> None:
        if self._name == b"" or os.fsencode(self._path).endswith(b"/"):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            # Opened, not only looked at, because who may not write a file may not replace it either; and
            # held, because its metadata are kept.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._replaced = os.open(self._name, flags, dir_fd=self._directory)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENXIO:  # a FIFO that nobody reads
                raise self._not_regular() from None
            raise
        if not stat.S_ISREG(os.fstat(self._replaced).st_mode):
            raise self._not_regular()

    def _not_regular(self) -> ValueError:
        return ValueError(f"atomic=True replaces regular files only: {self._path!r}")

    def create(self, *, readable: bool) -> int:
        """Return the descriptor of the new file."""
        access = (os.O_RDWR if readable else os.O_WRONLY) | os.O_CLOEXEC
        # A replaced file's mode comes with `commit`; until then the content is nobody else's to read.
        mode = 0o666 if self._replaced is None else 0o600
        try:
            try:
                return os.open(b".", access | os.O_TMPFILE, mode, dir_fd=self._directory)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise
            name = self._beside()
            fd = os.open(name, access | os.O_CREAT | os.O_EXCL, mode, dir_fd=self._directory)
            self._temporary = name
            return fd
        except OSError as error:
            error.filename = self._path
            raise

    def _beside(self) -> bytes:
        suffix = b"." + os.urandom(6).hex().encode() + b".tmp"
        return b"." + self._name[: _NAME_MAX - 1 - len(suffix)] + suffix

    def sync(self, fd: int) -> None:
        pass  # no name yet

    def commit(self, fd: int, *, durable: bool) -> None:
        """Give the file the target's name. Its data were synced if they are to be durable."""
        try:
            if self._replaced is not None:
                _keep_metadata(self._replaced, fd)
                if durable:
                    os.fsync(fd)
            if self._exclusive:
                self._link(fd, self._name)
            else:
                self._rename(fd)
            if durable:
                _sync_directory(self._directory, self._path)
        except OSError as error:
            error.filename, error.filename2 = self._path, None
            raise
        finally:
            self.discard()

    def _rename(self, fd: int) -> None:
        if self._temporary is None:
            if self._replaced is None:
                try:
                    self._link(fd, self._name)
                    return
                except FileExistsError:
                    pass  # it came while we wrote; "w" replaces it
            name = self._beside()
            self._link(fd, name)
            self._temporary = name
        os.rename(self._temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._temporary = None

    def _link(self, fd: int, name: bytes) -> None:
        """Give the file the name, which must be free. A temporary name goes with `discard`."""
        if self._temporary is None:
            # linkat(2), AT_EMPTY_PATH would need a capability.
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self._directory, follow_symlinks=True)
        else:
            os.link(self._temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def discard(self) -> None:
        """Leave no trace. After `commit`, nothing."""
        if not self._open:
            return
        self._open = False
        try:
            if self._temporary is not None:
                os.unlink(self._temporary, dir_fd=self._directory)
        except FileNotFoundError:
            pass
        finally:
            os.close(self._directory)
            if self._replaced is not None:
                os.close(self._replaced)


def _keep_metadata(source: int, target: int) -> None:
    """Owner, then extended attributes (chown clears capabilities), then mode, as far as the caller may set them."""
    old, new = os.fstat(source), os.fstat(target)
    mode = stat.S_IMODE(old.st_mode)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        try:
            os.fchown(target, old.st_uid, old.st_gid)
        except PermissionError:
            try:
                os.fchown(target, -1, old.st_gid)
            except PermissionError:
                pass
            mode &= ~(stat.S_ISUID | stat.S_ISGID)  # another owner's rights are not ours to hand on
    try:
        names = os.listxattr(source)
    except OSError:  # not supported here
        names = []
    for name in names:
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError:  # privileged namespaces, or gone meanwhile
            pass
    os.fchmod(target, mode)
