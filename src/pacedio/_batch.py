"""Many files made durable together.

An fsync for each small file is ruinous: each waits for a journal commit of its own. So files that are complete are
handed to a `Batch`, which starts them, and later waits for all, syncs all (the first sync commits what the others need
as well), and syncs each directory once.
"""

from __future__ import annotations

import os

from pacedio import files as _files

TYPE_CHECKING = False  # typing is too slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pacedio.writer import PacedWriter

_FILES = 128  # kept open at once
_IN_FLIGHT = 2 << 20  # bytes of those that are too small to take part in their device's budget


class Batch:
    """Takes over paced files when all is written, and makes them and their names durable, many at a time.

    Leaving the `with` block, or `commit`, makes all durable that were added. An exception that leaves the block, or
    `discard`, closes them as they are.

    :param sync: if false, files are only closed, and directories left alone.
    :param on_error: is told the name of a file or directory that could not be made durable, and why. Without it, the
        first such error is raised by the call that met it, after the other files were seen to.
    """

    def __init__(self, *, sync: bool = True, on_error: Callable[[object, OSError], object] | None = None) -> None:
        self._sync = sync
        self._on_error = on_error
        self._open: list[PacedWriter] = []
        self._waited = 0  # so many of the first ones have nothing in flight any more
        self._directories: dict[str, bool] = {}  # of the files; whether it can be opened, to be synced
        self._error: OSError | None = None

    def add(self, file: PacedWriter) -> None:
        """Take over an open file that is complete, its metadata included. It is closed in due course."""
        if not self._sync:
            self._try(file.name, file.close)
        elif self._try(file.name, file._start_rest):
            self._open.append(file)
            self._bound_in_flight()
            if len(self._open) >= _FILES:
                self._sync_files()
        else:
            self._drop(file)
        self._raise()

    def add_directory(self, path: str | os.PathLike[str]) -> None:
        """Make a directory's entries durable as well, when all is committed."""
        if self._sync:
            self._directories[os.path.abspath(path)] = True

    def commit(self) -> None:
        """Make everything durable that was added since the last commit."""
        self._sync_files()
        directories, self._directories = self._directories, {}
        for path, readable in directories.items():
            if readable:
                self._try(path, _files._sync_directory_at, path)
        self._raise()

    def discard(self) -> None:
        """Close the files without making them durable."""
        files, self._open, self._waited, self._directories = self._open, [], 0, {}
        for file in files:
            self._drop(file)

    @staticmethod
    def _drop(file: PacedWriter) -> None:
        try:
            file.discard()
        except OSError:
            pass  # told before, or nothing was promised

    def _bound_in_flight(self) -> None:
        total = sum(file._raw.raw_stats().in_flight for file in self._open[self._waited :])
        while total > _IN_FLIGHT and self._waited < len(self._open):
            file = self._open[self._waited]
            total -= file._raw.raw_stats().in_flight
            if not self._try(file.name, file._raw.wait_rest):
                self._drop(self._open.pop(self._waited))
            else:
                self._waited += 1

    def _sync_files(self) -> None:
        files, self._open, self._waited = self._open, [], 0
        for file in files:
            if not (self._try(file.name, self._sync_file, file) and self._try(file.name, file._close_synced)):
                self._drop(file)

    def _sync_file(self, file: PacedWriter) -> None:
        directory = _files._directory_of(file.fileno())
        if directory is not None and directory not in self._directories:
            self._directories[directory] = os.access(directory, os.R_OK)
        file._sync_contents()
        if directory is not None and not self._directories[directory]:
            os.fsync(file.fileno())  # journalling file systems commit a file's entry with the file

    def _try(self, name: object, action: Callable[..., object], *arguments: object) -> bool:
        """Whether it went well."""
        try:
            action(*arguments)
        except OSError as error:
            if self._on_error is not None:
                self._on_error(name, error)
            elif self._error is None:
                self._error = error
            return False
        return True

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.commit()
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()
