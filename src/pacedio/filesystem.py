"""The local files of fsspec's users (pandas, pyarrow, Dask, zarr), paced: protocol "paced".

    df.to_parquet("paced:///backup/x.parquet")
    fsspec.filesystem("paced", rate="100MB/s", polite=True)

It is fsspec's own local file system; what writes, copies and removes is pacedio.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from typing import TYPE_CHECKING, Any

from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.implementations.local import LocalFileSystem
from fsspec.transaction import Transaction
from fsspec.utils import isfilelike, stringify_path

from pacedio import copying as _copying
from pacedio import files as _files
from pacedio._batch import Batch
from pacedio.pacing import Pacing
from pacedio.reader import PacedReader
from pacedio.writer import PacedWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from _typeshed import ReadableBuffer

__all__ = ["PacedFileSystem"]

_ARGUMENTS = (
    "window",
    "limit",
    "rate",
    "engine",
    "drop_cache",
    "io_class",
    "polite",
    "share",
    "preallocate",
)  # Pacing's
_TEXT = ("encoding", "errors", "newline")  # open's, in text modes


class PacedFileSystem(LocalFileSystem):
    """fsspec's local file system, written through pacedio.

    Files are durable when they are closed (`sync`), with their names and the directories that were made for them; those
    of one `put`, `get` or `copy` together, when it returns.

    In a transaction, new files and copies are written beside their targets. When it ends well, all are made durable,
    and then take their names one after the other; when it is left by an exception, or one of them could not be written,
    none does. A file whose own `with` block is left by an exception is left out. Moves and removals are done at once,
    and opening a file to append to it or to change it is a `ValueError`.

    Every option can be given as a storage option.

    auto_mkdir
        Whether to make the directories that a file is written into.
    pacing
        A `Pacing`; or any of its arguments, such as limit="8MiB", rate="100MB/s" or polite=True, as options of their
        own.
    sync
        Whether closing a file makes it durable.
    atomic
        Whether files that are written anew, copies too, replace their targets only when they are closed. An exception
        that leaves the `with` block of `open` discards the file. What is opened with `fsspec.open`, as pandas and
        others do, is closed after an exception as well, and then replaces its target: use a transaction there.

    Raises what `Pacing` raises, `TypeError` for a `pacing` that is none, and `ValueError` for one beside its arguments.
    """

    protocol = "paced"

    def __init__(
        self,
        auto_mkdir: bool = False,
        *,
        pacing: Pacing | None = None,
        sync: bool = True,
        atomic: bool = False,
        **options: Any,
    ) -> None:
        arguments = {name: options.pop(name) for name in _ARGUMENTS if name in options}
        if pacing is not None and not isinstance(pacing, Pacing):
            raise TypeError(f"pacing must be a Pacing, not {type(pacing).__name__}")
        if pacing is not None and arguments:
            raise ValueError(f"give pacing, or its arguments as options, not both: {', '.join(arguments)}")
        super().__init__(auto_mkdir=auto_mkdir, **options)
        self.pacing = Pacing(**arguments) if arguments else pacing
        self.sync = sync
        self.atomic = atomic
        self._thread = threading.local()

    # ---- open ----

    def open(
        self,
        path: Any,
        mode: str = "rb",
        block_size: Any = None,
        cache_options: Any = None,
        compression: str | None = None,
        **options: Any,
    ) -> Any:
        """Open a file in any of the builtin's modes: a `PacedWriter`, a `PacedReader`, or a text file over one.

        Arguments as fsspec's `open` takes them; `block_size` and `cache_options` mean nothing here. Raises what
        `pacedio.open` raises.
        """
        compression = get_compression(stringify_path(path), compression)
        deferred = not options.pop("autocommit", not self._intrans)
        text = "b" not in mode
        if text and compression is None and not deferred:
            return self._open(path, mode, **options)
        arguments = {name: options.pop(name) for name in _TEXT if name in options} if text else {}
        binary_mode = mode.replace("t", "") + "b" if text else mode
        file = self._open(path, binary_mode, autocommit=not deferred, **options)
        try:
            if compression is not None:
                file = _Compressed(compr[compression](file, mode=mode[0]), file)
            return _Text(file, **arguments) if text else file
        except BaseException:
            _discard(file)
            raise

    def _open(
        self, path: Any, mode: str = "rb", block_size: Any = None, *, autocommit: bool = True, **options: Any
    ) -> Any:
        path = self._strip_protocol(path)
        text = {name: options[name] for name in _TEXT if name in options}
        if "r" in mode and "+" not in mode:
            return _Reader(path) if "b" in mode else _files.open(path, mode, **text)
        anew = "w" in mode or "x" in mode
        if not autocommit and not anew:
            raise ValueError(
                f"a transaction writes whole files, and cannot take back what mode {mode!r} does: {path!r}"
            )
        if self.auto_mkdir and "r" not in mode:
            self.makedirs(self._parent(path), exist_ok=True)
        atomic = anew and (self.atomic or not autocommit)
        file: Any = _files.open(path, mode, pacing=self.pacing, sync=self.sync, atomic=atomic, **text)
        return file if autocommit else _InTransaction(file, path, self.transaction)

    # ---- copy, move, remove ----

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        """Copy a file; of a directory, only make it."""
        self._copy(path1, path2, None)

    def put_file(self, path1: Any, path2: Any, callback: Any = None, **options: Any) -> None:
        """Copy a file, or all that is left in an open one; of a directory, only make it."""
        if isfilelike(path1):
            with self.open(path2, "wb") as target:
                _copying.copyfileobj(path1, target)
        else:
            self._copy(path1, path2, callback)

    def get_file(self, path1: Any, path2: Any, callback: Any = None, **options: Any) -> None:
        """Copy a file to a path or an open file; of a directory, only make it."""
        if isfilelike(path2):
            with _files.open(self._strip_protocol(path1), "rb") as source:
                _copying.copyfileobj(source, path2, pacing=self.pacing)
        else:
            self._copy(path1, path2, callback)

    def put(self, *arguments: Any, **options: Any) -> Any:
        """Copy files and trees, as fsspec's `put`; all are durable when it returns."""
        with self._together():
            return super().put(*arguments, **options)

    def get(self, *arguments: Any, **options: Any) -> Any:
        """Copy files and trees, as fsspec's `get`; all are durable when it returns."""
        with self._together():
            return super().get(*arguments, **options)

    def copy(self, *arguments: Any, **options: Any) -> Any:
        """Copy files and trees, as fsspec's `copy`; all are durable when it returns."""
        with self._together():
            return super().copy(*arguments, **options)

    def _copy(self, path1: Any, path2: Any, callback: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.auto_mkdir:
            self.makedirs(self._parent(target), exist_ok=True)
        if os.path.isdir(source):
            self.makedirs(target, exist_ok=True)
            return
        if not os.path.isfile(source) and os.path.exists(source):
            raise _copying.SpecialFileError(f"not a regular file: {source!r}")
        progress = None
        if callback is not None:
            callback.set_size(os.path.getsize(source))
            progress = callback.relative_update
        batch = self._batch
        if not (self.atomic or self._intrans):
            _copying._copyfile(source, target, None, True, self.pacing, self.sync, batch=batch, progress=progress)
            return
        if _copying._is_same(source, target):
            raise _copying.SameFileError(f"{source!r} and {target!r} are the same file")
        with open(source, "rb", 0) as reader:
            file = self.open(target, "wb")
            paced = file.paced if isinstance(file, _InTransaction) else file
            try:
                _copying.copy_contents(reader.fileno(), paced, source_name=source, progress=progress)
            except BaseException:
                file.discard()
                raise
        if batch is None or file is not paced:
            file.close()
        else:
            batch.add(file)
            batch.add_directory(os.path.dirname(os.path.realpath(target)))

    @property
    def _batch(self) -> Batch | None:
        """What makes the files of this thread's `put`, `get` or `copy` durable."""
        return getattr(self._thread, "batch", None)

    @contextlib.contextmanager
    def _together(self) -> Iterator[Batch]:
        if self._batch is not None:
            yield self._batch
            return
        try:
            with Batch(sync=self.sync) as self._thread.batch:
                yield self._thread.batch
        finally:
            self._thread.batch = None

    def mv(self, path1: Any, path2: Any, recursive: bool = True, **options: Any) -> None:
        """Move a file or a directory; across file systems, it is removed once the copy is durable."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.auto_mkdir:
            self.makedirs(self._parent(target), exist_ok=True)
        _copying.move(source, target, pacing=self.pacing, sync=self.sync)

    mv_file = mv  # which older versions of fsspec have

    def rm_file(self, path: Any) -> None:
        """Remove a file, a big one in steps."""
        _copying.unlink(self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files and, with `recursive`, directories, big files in steps."""
        for each in path if isinstance(path, list) else [path]:
            name = self._strip_protocol(each)
            if not os.path.isdir(name) or os.path.islink(name):
                _copying.unlink(name)
            elif not recursive:
                raise ValueError(f"cannot delete directory, set recursive=True: {name!r}")
            elif os.path.realpath(name) == os.path.realpath("."):
                raise ValueError(f"cannot delete current working directory: {name!r}")
            else:
                _copying.rmtree(name)

    # ---- names ----

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory and those above it, durably."""
        path = os.path.abspath(self._strip_protocol(path))
        missing = []
        above = path
        while not os.path.isdir(above):
            missing.append(above)
            above = os.path.dirname(above)
        os.makedirs(path, exist_ok=exist_ok)
        with self._together() as batch:
            for made in missing:
                directory = os.path.dirname(made)
                # One that may be written and not read cannot be synced. Journalling file systems commit an entry with
                # what it names.
                batch.add_directory(directory if os.access(directory, os.R_OK, effective_ids=True) else made)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        # In older versions of fsspec, that of local files takes off only its own.
        path = stringify_path(path)
        if isinstance(path, str):
            path = path.removeprefix("paced://").removeprefix("paced:")
        return super()._strip_protocol(path)

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        return f"paced://{self._strip_protocol(name)}"


# ---- files ------------------------------------------------------------------------------------------------------


class _Reader(PacedReader):
    """A PacedReader that can be sent to another process, as fsspec's own local files can."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.size = os.fstat(self.fileno()).st_size  # fsspec's own files say so

    def __reduce__(self) -> Any:
        return _reopened, (self.name, self.tell())


def _reopened(path: str, position: int) -> _Reader:
    reader = _Reader(path)
    reader.seek(position)
    return reader


class _Over(io.BufferedIOBase):
    """A binary file that hands its calls to another one."""

    _file: Any
    paced: Any  # the PacedWriter or PacedReader below all

    _finalizing = False  # IOBase's finalizer sets it before it calls close
    _collected = False  # a text file over this one is garbage, and closes it

    @property
    def name(self) -> Any:
        return self.paced.name

    @property
    def mode(self) -> Any:
        return self.paced.mode

    @property
    def stats(self) -> Any:
        return self.paced.stats

    def readable(self) -> Any:
        return self._checked().readable()

    def writable(self) -> Any:
        return self._checked().writable()

    def seekable(self) -> Any:
        return self._checked().seekable()

    def fileno(self) -> Any:
        return self._checked().fileno()

    def write(self, data: ReadableBuffer, /) -> Any:
        return self._checked().write(data)

    def read(self, size: int | None = -1, /) -> Any:
        return self._checked().read(-1 if size is None else size)

    def read1(self, size: int = -1, /) -> Any:
        return self._checked().read1(size)

    def readinto(self, buffer: Any, /) -> Any:
        return self._checked().readinto(buffer)

    def readline(self, size: int | None = -1, /) -> Any:
        return self._checked().readline(-1 if size is None else size)

    def seek(self, offset: int, whence: int = 0, /) -> Any:
        return self._checked().seek(offset, whence)

    def tell(self) -> Any:
        return self._checked().tell()

    def truncate(self, size: int | None = None, /) -> Any:
        return self._checked().truncate(size)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def _checked(self) -> Any:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return self._file

    def _dealloc_warn(self, source: object, /) -> None:
        self._collected = True  # io.TextIOWrapper asks for its ResourceWarning here


class _Compressed(_Over):
    """What compresses or decompresses, together with the file below, which compressors leave open when they close."""

    def __init__(self, file: Any, below: Any) -> None:
        self._file = file
        self._below = below
        self.paced = below.paced if isinstance(below, _Over) else below

    def close(self) -> None:
        if self.closed or self._finalizing or self._collected:
            return  # what is below is garbage as well, and knows what to do
        try:
            self._file.close()
            super().close()
        except BaseException:
            self.discard()
            raise
        self._below.close()

    def discard(self) -> None:
        """Close what is below as it is; if it replaces another file, leave no trace of it."""
        _discard(self._below)
        with contextlib.suppress(Exception):  # it has nowhere to write to now
            self._file.close()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif isinstance(self._below, _InTransaction) or _is_atomic(self._below):
            self.discard()
        else:
            with contextlib.suppress(Exception):  # the exception under way is the one to tell
                self._file.close()
            super().close()
            self._below.__exit__(kind, value, traceback)


class _Text(io.TextIOWrapper):
    """Text over one of these files: an exception that leaves its `with` block is theirs to judge."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(Exception):
            self.flush()
        buffer: Any = self.buffer
        buffer.__exit__(kind, value, traceback)


def _is_atomic(file: Any) -> bool:
    return isinstance(file, PacedWriter) and file._entry is not None and file._entry.atomic


def _discard(file: Any) -> None:
    if isinstance(file, PacedReader):
        file.close()
    else:
        file.discard()


# ---- transactions -----------------------------------------------------------------------------------------------


class _InTransaction(_Over):
    """An atomic file that takes its name not when it is closed, but when its transaction ends.

    Until it is closed it has no name, where the file system can do that. From then on it has one beside its target, and
    no descriptor: a transaction may have more files than a process may have open.
    """

    def __init__(self, file: PacedWriter, path: str, transaction: _Transaction) -> None:
        self._file = self.paced = file
        self._path = path
        self._transaction = transaction
        self._aside: tuple[bytes, bytes, bool] | None = None  # its name, the one to take, and whether that must be new
        transaction.opened.append(self)

    def close(self) -> None:
        if self.closed or self._finalizing:
            return
        if not self._transaction.is_ours():
            super().close()
            self.paced.close()
            return
        try:
            super().close()
            self._set_aside()
        except BaseException as error:
            self._transaction.errors.append(error)  # whoever goes on after this shall not find the others committed
            self.discard()
            raise
        self._transaction.hand_over(self.paced)

    def _set_aside(self) -> None:
        file, entry = self.paced, self.paced._entry
        file._complete()
        try:
            if entry._replaced is not None:
                _files._keep_metadata(entry._replaced, file.fileno())
            beside = entry._temporary
            if beside is None:
                beside = entry._beside()
                entry._link(file.fileno(), beside)
            directory = os.readlink(f"/proc/self/fd/{entry._directory}".encode())
        except OSError as error:
            error.filename, error.filename2 = self._path, None
            raise
        self._aside = os.path.join(directory, beside), os.path.join(directory, entry._name), entry._exclusive
        file._entry = entry._temporary = None
        entry.discard()  # closes its descriptors

    def take_name(self) -> str | None:
        """Take the target's name, once the content is durable. Returns the directory, which is to be synced."""
        if self._aside is None:
            return None  # discarded, or has it already
        temporary, target, exclusive = self._aside
        try:
            if exclusive:
                os.link(temporary, target)
                os.unlink(temporary)
            else:
                os.rename(temporary, target)
        except OSError as error:
            error.filename, error.filename2 = self._path, None
            raise
        self._aside = None
        return os.fsdecode(os.path.dirname(target))

    def commit(self) -> None:
        """Make it durable and give it its name, apart from the others of the transaction."""
        self._transaction.commit([self])

    def discard(self) -> None:
        """Leave no trace of it."""
        self.paced.discard()
        super().close()
        if self._aside is not None and self._transaction.is_ours():
            with contextlib.suppress(OSError):
                os.unlink(self._aside[0])
        self._aside = None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class _Transaction(Transaction):
    """Makes all files durable together, before the first of them takes its name."""

    def __init__(self, fs: PacedFileSystem, **options: Any) -> None:
        super().__init__(fs, **options)
        self.opened: list[_InTransaction] = []
        self.errors: list[BaseException] = []
        self._batch = Batch(sync=fs.sync, on_error=lambda _, error: self.errors.append(error))
        self._sync = fs.sync
        self._lock = threading.Lock()  # Dask's and zarr's threads write files of one transaction
        self._process = os.getpid()

    def start(self) -> None:
        """Begin anew, as fsspec's own: what was opened before is its caller's to commit."""
        super().start()
        self.opened.clear()
        self.errors.clear()

    def is_ours(self) -> bool:
        """Whether it began in this process: a forked child has a copy, but the files are the parent's to commit."""
        return os.getpid() == self._process

    def hand_over(self, file: PacedWriter) -> None:
        """Make the file durable in due course. Raises the first error of any."""
        with self._lock:
            self._batch.add(file)
        self._raise()

    def commit(self, files: list[_InTransaction]) -> None:
        """Make them durable, and give them their names."""
        for file in files:
            file.close()
        with self._lock:
            self._batch.commit()
        self._raise()
        with Batch(sync=self._sync) as directories:
            for file in files:
                directory = file.take_name()
                if directory is not None:
                    directories.add_directory(directory)

    def complete(self, commit: bool = True) -> None:
        """End the transaction, as fsspec's own."""
        fs = self.fs
        try:
            if commit and self.is_ours():
                self.commit(self.opened)
        finally:
            for file in self.opened:
                file.discard()  # nothing, of those that have their names
            self._batch.discard()
            self.opened.clear()
            super().complete(commit=False)
            fs._intrans, fs._transaction = False, None

    def _raise(self) -> None:
        if self.errors:
            raise self.errors[0]


PacedFileSystem.transaction_type = _Transaction
