"""The local files of fsspec's users (pandas, pyarrow, Dask, zarr), paced: protocol "paced".

    df.to_parquet("paced:///backup/x.parquet")
    fsspec.filesystem("paced", rate="100MB/s", polite=True)

It is fsspec's own local file system; what writes, copies and removes is pacedio.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import isfilelike

from pacedio import copying as _copying
from pacedio import files as _files
from pacedio.pacing import Pacing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from pacedio.writer import PacedWriter

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


class PacedFileSystem(LocalFileSystem):
    """fsspec's local file system, written through pacedio.

    Files are durable when they are closed (`sync`), with their names and the directories that were made for them. In a
    transaction, all are written beside their targets, and take their names when it ends well.

    Every option can be given as a storage option.

    auto_mkdir
        Whether to make the directories that a file is written into.
    pacing
        A `Pacing`; or any of its arguments, such as limit="8MiB", rate="100MB/s" or polite=True, as options of their
        own.
    sync
        Whether closing a file makes it durable.
    atomic
        Whether files that are written anew replace their targets only when they are closed without an exception.
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

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory and those above it, durably."""
        path = os.path.abspath(self._strip_protocol(path))
        missing = []
        above = path
        while not os.path.isdir(above):
            missing.append(above)
            above = os.path.dirname(above)
        os.makedirs(path, exist_ok=exist_ok)
        if self.sync:
            for made in reversed(missing):
                _files._sync_directory_at(os.path.dirname(made))

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        """Copy a file, paced and durable; of a directory, only make it."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.auto_mkdir:
            self.makedirs(self._parent(target), exist_ok=True)
        if self.isfile(source):
            _copying.copyfile(source, target, pacing=self.pacing, sync=self.sync)
        elif self.isdir(source):
            self.makedirs(target, exist_ok=True)
        else:
            raise FileNotFoundError(source)

    def get_file(self, path1: Any, path2: Any, callback: Any = None, **options: Any) -> None:
        """Copy a file to a path or an open file."""
        if isfilelike(path2):
            with _files.open(self._strip_protocol(path1), "rb") as source:
                _copying.copyfileobj(source, path2, pacing=self.pacing)
        else:
            self.cp_file(path1, path2, **options)

    def mv(self, path1: Any, path2: Any, recursive: bool = True, **options: Any) -> None:
        """Move a file or a directory; across file systems, it is removed once the copy is durable."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.auto_mkdir:
            self.makedirs(self._parent(target), exist_ok=True)
        _copying.move(source, target, pacing=self.pacing, sync=self.sync)

    def rm_file(self, path: Any) -> None:
        """Remove a file, a big one in steps."""
        _copying.unlink(self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files and, with `recursive`, directories, big files in steps."""
        for each in path if isinstance(path, list) else [path]:
            name = self._strip_protocol(each)
            if not self.isdir(name) or self.islink(name):
                _copying.unlink(name)
            elif not recursive:
                raise ValueError(f"cannot delete directory, set recursive=True: {name!r}")
            elif os.path.abspath(name) == os.getcwd():
                raise ValueError(f"cannot delete current working directory: {name!r}")
            else:
                _copying.rmtree(name)

    def _open(
        self, path: Any, mode: str = "rb", block_size: Any = None, *, autocommit: bool = True, **options: Any
    ) -> Any:
        path = self._strip_protocol(path)
        if "r" in mode and "+" not in mode:
            reader: Any = _files.open(path, mode)
            reader.size = os.fstat(reader.fileno()).st_size  # fsspec's own files say so
            return reader
        if self.auto_mkdir and "r" not in mode:
            self.makedirs(self._parent(path), exist_ok=True)
        anew = "w" in mode or "x" in mode
        if autocommit:
            return _files.open(path, mode, pacing=self.pacing, sync=self.sync, atomic=self.atomic and anew)
        if not anew:
            raise ValueError(
                f"a transaction writes whole files, and cannot take back what mode {mode!r} does: {path!r}"
            )
        writer: Any = _files.open(path, mode, pacing=self.pacing, sync=self.sync, atomic=True)
        return _InTransaction(writer)


class _InTransaction(io.BufferedIOBase):
    """An atomic file that gets its name not when it is closed, but by `commit`."""

    def __init__(self, file: PacedWriter) -> None:
        self._file = file

    @property
    def name(self) -> Any:
        return self._file.name

    @property
    def mode(self) -> str:
        return self._file.mode

    def readable(self) -> bool:
        return self._file.readable()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: ReadableBuffer, /) -> int:
        self._checked()
        return self._file.write(data)

    def read(self, size: int | None = -1, /) -> bytes:
        return self._checked().read(-1 if size is None else size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._checked().seek(offset, whence)

    def tell(self) -> int:
        return self._checked().tell()

    def truncate(self, size: int | None = None, /) -> int:
        return self._checked().truncate(size)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def _checked(self) -> PacedWriter:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return self._file

    def commit(self) -> None:
        """Make it durable and give it its name."""
        self._file.close()

    def discard(self) -> None:
        """Leave no trace of it."""
        self._file.discard()
