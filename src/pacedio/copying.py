"""shutil's copying, paced: the same names, arguments, results and exceptions, with `pacing` and `sync` besides.

What is copied is durable when a function returns, unless `sync=False`: a tree's files together, at the end. Every
function can be handed to shutil as `copy_function`. `unlink` and `rmtree` free big files bit by bit.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import sys
import time
from shutil import Error, SameFileError, SpecialFileError

from pacedio._batch import Batch
from pacedio._contents import copy_contents
from pacedio.files import _sync_directory_at, wrap
from pacedio.files import open as _open
from pacedio.reader import PacedReader
from pacedio.writer import PacedWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, TypeAlias, TypeVar

    from pacedio.pacing import Pacing

    Path: TypeAlias = str | os.PathLike[str]
    _P = TypeVar("_P", str, os.PathLike[str])

__all__ = [
    "Error",
    "SameFileError",
    "SpecialFileError",
    "copy",
    "copy2",
    "copy_contents",
    "copyfile",
    "copyfileobj",
    "copytree",
    "move",
    "rmtree",
    "unlink",
]

_CHUNK = 1 << 20  # bytes read at once from what is not a file
_STEP = 64 << 20  # bytes freed at once; a neighbour's p99 was 12 ms with these, and 47 to 67 for 4 GiB at once
_PAUSE = 0.01  # seconds between two steps

# ---- files ------------------------------------------------------------------------------------------------------


def copyfileobj(fsrc: Any, fdst: Any, length: int = 0, *, pacing: Pacing | None = None, sync: bool = False) -> None:
    """Copy what is left in `fsrc` to `fdst`, as shutil.copyfileobj does, paced where `fdst` is a file.

    :param fsrc: a file, a pipe, a response: anything with `read`; or a socket.
    :param fdst: a `PacedWriter`, or a binary file as `open` returns it, which is paced meanwhile and stays open, at the
        position after what was written. Anything else (a text file, a compressing one) is written to as it is.
    :param length: bytes to read at once; negative: all. By default 1 MiB, and files are read ahead.
    :param sync: make the data durable before returning. A `PacedWriter` syncs when it is closed in any case.
    """
    if isinstance(fdst, PacedWriter):
        _copy_to(fdst, fsrc, length)
        if sync:
            fdst.sync()
        return
    try:
        target = wrap(fdst, pacing, sync=sync)
    except TypeError:  # not a file, or one that changes what is written to it
        for data in _pieces(fsrc, length):
            fdst.write(data)
        return
    with target:
        _copy_to(target, fsrc, length)


def _copy_to(target: PacedWriter, source: Any, length: int) -> None:
    if not length and _is_plain_file(source) and source.tell() == 0:
        source.seek(copy_contents(source.fileno(), target, source_name=source.name))
        return
    for data in _pieces(source, length):
        target.write(data)


def _is_plain_file(source: Any) -> bool:
    """Whether its descriptor says the same as its `read`."""
    raw = source.raw if type(source) in (io.BufferedReader, io.BufferedRandom, PacedReader) else source
    if not (type(raw) is io.FileIO or (raw is not source and isinstance(raw, io.FileIO))) or not raw.readable():
        return False
    return stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def _pieces(source: Any, length: int) -> Iterable[Any]:
    length = length or _CHUNK
    if not hasattr(source, "read") and hasattr(source, "recv_into"):
        buffer = memoryview(bytearray(length if length > 0 else _CHUNK))
        while count := source.recv_into(buffer):
            yield buffer[:count]
        return
    while data := source.read(length):
        yield data


def copyfile(
    src: Path, dst: _P, *, follow_symlinks: bool = True, pacing: Pacing | None = None, sync: bool = True
) -> _P:
    """Copy a file's content, as shutil.copyfile does; holes are kept. Returns `dst`.

    Raises `SameFileError` and `SpecialFileError` (a FIFO) as shutil does, and `OSError`.
    """
    _copyfile(src, dst, None, follow_symlinks, pacing, sync)
    return dst


def copy(
    src: Path, dst: _P, *, follow_symlinks: bool = True, pacing: Pacing | None = None, sync: bool = True
) -> _P | str:
    """Copy content and permissions, as shutil.copy does. `dst` may be a directory. Returns the file's new path."""
    target = _within(src, dst)
    _copyfile(src, target, shutil.copymode, follow_symlinks, pacing, sync)
    return target


def copy2(
    src: Path, dst: _P, *, follow_symlinks: bool = True, pacing: Pacing | None = None, sync: bool = True
) -> _P | str:
    """Copy content and metadata, as shutil.copy2 does. `dst` may be a directory. Returns the file's new path."""
    target = _within(src, dst)
    _copyfile(src, target, shutil.copystat, follow_symlinks, pacing, sync)
    return target


def _within(src: Path, dst: _P) -> _P | str:
    return os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else dst


def _copyfile(
    src: Path,
    dst: Path,
    copy_metadata: Callable[..., None] | None,
    follow_symlinks: bool,
    pacing: Pacing | None,
    sync: bool,
    *,
    batch: Batch | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    sys.audit("shutil.copyfile", src, dst)
    if _is_same(src, dst):
        raise SameFileError(f"{src!r} and {dst!r} are the same file")
    for path in (src, dst):
        try:
            is_fifo = stat.S_ISFIFO(os.stat(path).st_mode)
        except OSError:
            continue  # opening it will tell
        if is_fifo:
            raise SpecialFileError(f"`{os.fspath(path)}` is a named pipe")
    if not follow_symlinks and os.path.islink(src):
        os.symlink(os.readlink(src), dst)
        if copy_metadata is not None:
            copy_metadata(src, dst, follow_symlinks=False)
        return
    with open(src, "rb", 0) as source:
        try:
            target = _open(dst, "wb", pacing=pacing, sync=sync)
        except IsADirectoryError as error:
            if os.path.exists(dst):
                raise
            raise FileNotFoundError(errno.ENOENT, "Directory does not exist", os.fspath(dst)) from error
        try:
            copy_contents(source.fileno(), target, source_name=os.fspath(src), progress=progress)
            if copy_metadata is not None:
                target._complete()  # nothing that changes times comes after
                copy_metadata(src, dst, follow_symlinks=follow_symlinks)
        except BaseException:
            target.discard()
            raise
    if batch is not None:
        batch.add(target)
    else:
        target.close()


def _is_same(src: Path, dst: Path) -> bool:
    try:
        return os.path.samefile(src, dst)
    except OSError:
        return False


# ---- trees ------------------------------------------------------------------------------------------------------


def copytree(
    src: Path,
    dst: _P,
    symlinks: bool = False,
    ignore: Callable[[str, list[str]], Iterable[str]] | None = None,
    copy_function: Callable[[str, str], object] = copy2,
    ignore_dangling_symlinks: bool = False,
    dirs_exist_ok: bool = False,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
) -> _P:
    """Copy a directory tree, as shutil.copytree does. Returns `dst`.

    Files that `copy2` (the default), `copy` or `copyfile` of this module copy become durable together: all are started,
    then waited for, then synced, many at a time, and each directory once. Another `copy_function` does as it does.

    Raises `Error` with a list of (source, target, reason) as shutil does, `OSError` where nothing could be copied.
    """
    metadata: dict[Any, Any] = {copy2: shutil.copystat, copy: shutil.copymode, copyfile: None}

    def copy_one(source: str, target: str, batch: Batch) -> None:
        if copy_function in metadata:
            _copyfile(source, target, metadata[copy_function], True, pacing, sync, batch=batch)
        else:
            copy_function(source, target)

    _copytree(src, dst, symlinks, ignore, copy_one, ignore_dangling_symlinks, dirs_exist_ok, sync=sync)
    return dst


def _copytree(
    src: Path,
    dst: Path,
    symlinks: bool,
    ignore: Callable[[str, list[str]], Iterable[str]] | None,
    copy_one: Callable[[str, str, Batch], object],
    ignore_dangling_symlinks: bool,
    dirs_exist_ok: bool,
    *,
    sync: bool,
) -> None:
    errors: list[tuple[str, str, str]] = []
    top = os.fspath(src)

    def note(name: object, error: OSError) -> None:
        errors.append((top, os.fsdecode(name) if isinstance(name, bytes) else str(name), str(error)))

    batch = Batch(sync=sync, on_error=note)

    def visit(directory: str, names: list[str]) -> Iterable[str]:
        batch.add_directory(os.path.join(dst, os.path.relpath(directory, top)))
        return ignore(directory, names) if ignore is not None else set()

    def copy_into_batch(source: str, target: str) -> None:
        copy_one(source, target, batch)

    try:
        shutil.copytree(top, dst, symlinks, visit, copy_into_batch, ignore_dangling_symlinks, dirs_exist_ok)
    except Error as error:
        errors[:0] = error.args[0]
    except BaseException:
        batch.discard()
        raise
    batch.add_directory(os.path.dirname(os.path.abspath(dst)))
    batch.commit()
    if errors:
        raise Error(errors)


def move(
    src: Path,
    dst: Path,
    copy_function: Callable[[str, str], object] = copy2,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
) -> Any:
    """Move a file or a tree, as shutil.move does. Returns its new path.

    Across file systems it is copied, and removed with `unlink` or `rmtree` once the copy is durable.
    """
    sys.audit("shutil.move", src, dst)
    target: Any = dst
    if os.path.isdir(dst):
        if _is_same(src, dst) and not os.path.islink(src):
            os.rename(src, dst)  # another spelling of the same name, perhaps
            return None
        target = os.path.join(dst, os.path.basename(os.fspath(src).rstrip(os.sep)))
        if os.path.exists(target):
            raise Error(f"Destination path '{target}' already exists")
    try:
        os.rename(src, target)
    except OSError:
        if os.path.islink(src):
            os.symlink(os.readlink(src), target)
            os.unlink(src)
        elif os.path.isdir(src):
            if os.path.join(os.path.abspath(dst), "").startswith(os.path.join(os.path.abspath(src), "")):
                raise Error(f"Cannot move a directory '{src}' into itself '{dst}'.") from None
            copytree(src, target, symlinks=True, copy_function=copy_function, pacing=pacing, sync=sync)
            rmtree(src)
        else:
            if copy_function in (copy, copy2, copyfile):
                copy_function(src, target, pacing=pacing, sync=sync)
            else:
                copy_function(src, target)  # type: ignore[arg-type]
            unlink(src)
    if sync:
        for directory in {os.path.dirname(os.path.abspath(path)) for path in (src, target)}:
            _sync_directory_at(directory)
    return target


# ---- removal ----------------------------------------------------------------------------------------------------


def unlink(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, dir_fd: int | None = None) -> None:
    """Remove a file as os.unlink does. The blocks of a big one (64 MiB or more) are freed in steps, with pauses, so
    that neighbours on the disk are not held up by all of it at once.

    The name goes first, so nobody sees a file that is shorter, and after a crash the file system frees the rest. A file
    with another name, or that is open elsewhere, is only unlinked; so is one whose file system does not tell (fcntl(2),
    F_SETLEASE), or that is another user's.
    """
    fd = _open_last(path, dir_fd)
    if fd is None:
        os.unlink(path, dir_fd=dir_fd)
        return
    try:
        os.unlink(path, dir_fd=dir_fd)
        if os.fstat(fd).st_nlink == 0 and _is_alone(fd):
            _free(fd)
    finally:
        os.close(fd)


def _open_last(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], dir_fd: int | None) -> int | None:
    """A descriptor of a big file whose only name and user this is."""
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if not _is_big(status):
            return None
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return None
    if os.path.samestat(status, os.fstat(fd)) and _is_alone(fd):
        return fd
    os.close(fd)
    return None


def _is_big(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_blocks * 512 >= _STEP


def _is_alone(fd: int) -> bool:
    """Whether no other descriptor of the file is open, in any process: only then is there a write lease to be had."""
    import signal

    try:
        # Should somebody open the file right now: a signal that nobody notices, instead of SIGIO, which kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _free(fd: int) -> None:
    status = os.fstat(fd)
    size, blocks = status.st_size, status.st_blocks
    try:
        while size > _STEP:
            size -= _STEP
            os.ftruncate(fd, size)
            left = os.fstat(fd).st_blocks
            if left == 0:
                return
            if left < blocks:  # and no pause for a hole
                time.sleep(_PAUSE)
            blocks = left
    except OSError:
        pass  # it is freed when it is closed


def rmtree(
    path: Any,
    ignore_errors: bool = False,
    onerror: Callable[..., object] | None = None,
    *,
    onexc: Callable[..., object] | None = None,
    dir_fd: int | None = None,
) -> None:
    """Remove a directory tree as shutil.rmtree does, its big files as `unlink` does.

    `onexc` can be used with every Python; `dir_fd` needs Python 3.11, and is a `NotImplementedError` before.
    """
    arguments: dict[str, Any] = {}
    if dir_fd is not None:
        if sys.version_info < (3, 11):
            raise NotImplementedError("rmtree's dir_fd needs Python 3.11")
        arguments["dir_fd"] = dir_fd
    if onexc is not None:
        if sys.version_info >= (3, 12):
            arguments["onexc"] = onexc
        elif not ignore_errors:
            tell = onexc
            onerror = lambda function, path, info: tell(function, path, info[1])  # noqa: E731
    if onerror is not None and "onexc" not in arguments:
        arguments["onerror"] = onerror
    try:
        for _, _, names, directory in os.fwalk(path, dir_fd=dir_fd):
            for name in names:
                _unlink_big(name, directory)
    except (OSError, RecursionError):
        pass  # what fails here, fails again below, and is reported there
    shutil.rmtree(path, ignore_errors, **arguments)


# As shutil's, which code that removes others' trees asks for: nothing here goes by a path either.
rmtree.avoids_symlink_attacks = shutil.rmtree.avoids_symlink_attacks  # type: ignore[attr-defined]


def _unlink_big(name: str, directory: int) -> None:
    try:
        if _is_big(os.stat(name, dir_fd=directory, follow_symlinks=False)):
            unlink(name, dir_fd=directory)
    except OSError:
        pass
