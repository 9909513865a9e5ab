"""Paced files for asyncio and trio, over anyio.

Every call on a file runs in a worker thread, so the event loop never waits for a disk. A thread is used for as long as
a call takes: a thousand open files need none while nobody writes. The calls of one file run one after the other, in the
order in which they were made.

Cancelling does not stop a thread in a system call. So a call that has begun is waited for, whatever is cancelled
meanwhile (also by asyncio's own cancellation, as its timeouts do); one that has not begun never will. Either way the
file is what the completed calls made it.
"""

from __future__ import annotations

import threading
from functools import partial
from shutil import copystat
from typing import IO, TYPE_CHECKING, Any, AnyStr, Generic, TypeVar, overload

from anyio import CancelScope, CapacityLimiter, Lock, get_cancelled_exc_class, to_thread
from anyio.abc import AsyncResource
from anyio.lowlevel import RunVar, checkpoint_if_cancelled

from pacedio import copying as _copying
from pacedio import files as _files
from pacedio.writer import PacedTextWriter, PacedWriter

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable
    from types import TracebackType

    from _typeshed import OpenBinaryMode, OpenTextMode, ReadableBuffer, WriteableBuffer

    from pacedio._batch import Batch
    from pacedio.files import File, Opener
    from pacedio.pacing import Pacing
    from pacedio.writer import WriteStats

    Path = str | os.PathLike[str]

__all__ = ["AsyncFile", "copyfile", "copytree", "open_file", "wrap_file"]

_T = TypeVar("_T")

# More calls at once make no disk faster; but one that is stuck should not hold up all others.
_THREADS = 32
_limiter: RunVar[CapacityLimiter] = RunVar("pacedio")


def _default_limiter() -> CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(_THREADS)
        _limiter.set(limiter)
        return limiter


class _GivenUpError(Exception):
    pass


class _Call(Generic[_T]):
    """A function that is called in a thread, once, or never if it is given up before it begins."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._begun = self._given_up = False
        self.finished = threading.Event()
        self.result: _T | None = None

    def __call__(self) -> _T:
        with self._lock:
            if self._given_up:
                raise _GivenUpError  # which nobody waits for
            self._begun = True
        try:
            self.result = self._function()
            return self.result
        finally:
            self.finished.set()

    def give_up(self) -> bool:
        """Whether it will never begin."""
        with self._lock:
            self._given_up = not self._begun
            return self._given_up


async def _in_thread(
    function: Callable[[], _T],
    limiter: CapacityLimiter | None,
    *,
    stop: Callable[[], object] = lambda: None,
    undo: Callable[[_T], object] = lambda _: None,
) -> _T:
    """Call it in a thread. If this is cancelled meanwhile, `stop` may make it end soon, its end is waited for, and what
    it returned is undone.
    """
    call = _Call(function)
    try:
        return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter or _default_limiter())
    except get_cancelled_exc_class():
        if not call.give_up():
            stop()
            await _wait(call.finished)
            if call.result is not None:
                await _wait_for(partial(undo, call.result), limiter)
        raise


async def _wait_for(function: Callable[[], object], limiter: CapacityLimiter | None) -> None:
    """Call it in a thread and wait for its end, whatever is cancelled."""
    call = _Call(function)
    while not call.finished.is_set():
        try:
            with CancelScope(shield=True):
                await to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter or _default_limiter())
        except get_cancelled_exc_class():  # asyncio's own, which no scope holds off
            if call.give_up():
                call = _Call(function)
            else:
                await _wait(call.finished)


async def _wait(event: threading.Event) -> None:
    while not event.is_set():
        try:
            with CancelScope(shield=True):
                await to_thread.run_sync(event.wait, abandon_on_cancel=True, limiter=CapacityLimiter(1))
        except get_cancelled_exc_class():  # asyncio's own, which no scope holds off; the caller has one to raise
            pass


class AsyncFile(AsyncResource, Generic[AnyStr]):
    """A file whose methods are awaited: the interface of anyio's AsyncFile, and `stats` and `sync`.

    Leaving its `async with` block closes it as leaving the file's own `with` block does: an atomic file that an
    exception or a cancellation leaves is not committed.
    """

    def __init__(self, file: IO[AnyStr], *, limiter: CapacityLimiter | None = None) -> None:
        if limiter is not None and not isinstance(limiter, CapacityLimiter):
            raise TypeError(f"limiter must be a CapacityLimiter or None, not {type(limiter).__name__}")
        self._file: Any = file
        self._limiter = limiter
        self._lock = Lock()
        self._stats: WriteStats | None = getattr(file, "stats", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def wrapped(self) -> IO[AnyStr]:
        """The file. While a call is under way it is that call's."""
        return self._file  # type: ignore[no-any-return]

    @property
    def limiter(self) -> CapacityLimiter | None:
        """How many calls may use a thread at once; None: up to 32 of all files without a limiter of their own."""
        return self._limiter

    @property
    def stats(self) -> WriteStats:
        """What the last call that completed left as `PacedWriter.stats`."""
        if self._stats is None:
            raise AttributeError(f"{type(self._file).__name__!r} object has no attribute 'stats'")
        return self._stats

    async def _call(self, name: str, *arguments: object) -> Any:
        async with self._lock:
            return await _in_thread(partial(self._run, getattr(self._file, name), *arguments), self._limiter)

    def _run(self, function: Callable[..., _T], *arguments: object) -> _T:
        try:
            return function(*arguments)
        finally:
            if self._stats is not None:
                self._stats = self._file.stats

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close(partial(self._file.__exit__, kind, value, traceback))

    async def aclose(self) -> None:
        """Sync (unless opened with `sync=False`), commit an atomic file, and close, whatever is cancelled meanwhile.

        Raises the error that made the writer fail, as `PacedWriter.close` does.
        """
        await self._close(self._file.close)

    async def _close(self, close: Callable[[], object]) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self._run(close)
            except BaseException as error:  # told below, since nobody hears what is raised in a thread that was left
                failed.append(error)

        cancelled: BaseException | None = None
        with CancelScope(shield=True):
            # What is under way comes first; it was waited for, unless asyncio's own cancellation got in between.
            while True:
                try:
                    await self._lock.acquire()
                    break
                except get_cancelled_exc_class() as error:
                    cancelled = error
            try:
                await _wait_for(run, self._limiter)
            finally:
                self._lock.release()
        if failed:
            raise failed[0]
        if cancelled is not None:
            raise cancelled

    async def sync(self) -> None:
        """Make all that was written durable, as `PacedWriter.sync`."""
        await self._call("sync")

    async def discard(self) -> None:
        """Close and leave what is not written, as `PacedWriter.discard`."""
        await self._close(self._file.discard)

    async def flush(self) -> None:
        """Hand the user-space buffer to the kernel."""
        await self._call("flush")

    async def read(self, size: int | None = -1) -> AnyStr:
        """Read `size` bytes or characters, by default all."""
        return await self._call("read", size)  # type: ignore[no-any-return]

    async def read1(self: AsyncFile[bytes], size: int = -1) -> bytes:
        """Read at most `size` bytes, in at most one read(2)."""
        return await self._call("read1", size)  # type: ignore[no-any-return]

    async def readinto(self: AsyncFile[bytes], b: WriteableBuffer) -> int:
        """Fill a buffer, and return how many bytes were read."""
        return await self._call("readinto", b)  # type: ignore[no-any-return]

    async def readinto1(self: AsyncFile[bytes], b: WriteableBuffer) -> int:
        """Fill a buffer with at most one read(2), and return how many bytes were read."""
        return await self._call("readinto1", b)  # type: ignore[no-any-return]

    async def readline(self, size: int = -1) -> AnyStr:
        """Read a line, of at most `size` bytes or characters if that is not negative."""
        return await self._call("readline", size)  # type: ignore[no-any-return]

    async def readlines(self, hint: int = -1) -> list[AnyStr]:
        """Read the lines that are left, or as many as have more than `hint` bytes or characters."""
        return await self._call("readlines", hint)  # type: ignore[no-any-return]

    async def __aiter__(self) -> AsyncIterator[AnyStr]:
        while line := await self.readline():
            yield line

    @overload
    async def write(self: AsyncFile[bytes], b: ReadableBuffer) -> int: ...
    @overload
    async def write(self: AsyncFile[str], b: str) -> int: ...
    async def write(self, b: ReadableBuffer | str) -> int:
        """Write all of it, and return its length in bytes or characters."""
        return await self._call("write", b)  # type: ignore[no-any-return]

    @overload
    async def writelines(self: AsyncFile[bytes], lines: Iterable[ReadableBuffer]) -> None: ...
    @overload
    async def writelines(self: AsyncFile[str], lines: Iterable[str]) -> None: ...
    async def writelines(self, lines: Iterable[ReadableBuffer] | Iterable[str]) -> None:
        """Write them one after the other, with nothing in between."""
        await self._call("writelines", lines)

    async def seek(self, offset: int, whence: int = 0) -> int:
        """Move the position, and return it."""
        return await self._call("seek", offset, whence)  # type: ignore[no-any-return]

    async def tell(self) -> int:
        """Return the position."""
        return await self._call("tell")  # type: ignore[no-any-return]

    async def truncate(self, size: int | None = None) -> int:
        """Set the size, by default to the position, and return it."""
        return await self._call("truncate", size)  # type: ignore[no-any-return]


@overload
async def open_file(
    file: File,
    mode: OpenBinaryMode,
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
    limiter: CapacityLimiter | None = None,
) -> AsyncFile[bytes]: ...
@overload
async def open_file(
    file: File,
    mode: OpenTextMode = "r",
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
    limiter: CapacityLimiter | None = None,
) -> AsyncFile[str]: ...
async def open_file(
    file: File,
    mode: str = "r",
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
    limiter: CapacityLimiter | None = None,
) -> AsyncFile[Any]:
    """Open a file as `pacedio.open` does, with its arguments, results and errors.

    limiter
        An anyio.CapacityLimiter for the file's calls; by default up to 32 calls of all such files use a thread at once.
    """

    def call() -> AsyncFile[Any]:
        opened: Any = _files.open(
            file,
            mode,
            buffering,
            encoding,
            errors,
            newline,
            closefd,
            opener,
            pacing=pacing,
            sync=sync,
            atomic=atomic,
        )
        return AsyncFile(opened, limiter=limiter)

    return await _in_thread(call, limiter, undo=_leave)


def _leave(file: AsyncFile[Any]) -> None:
    """Close a file that nobody got to see."""
    wrapped = file.wrapped
    if isinstance(wrapped, (PacedWriter, PacedTextWriter)):
        wrapped.discard()
    else:
        wrapped.close()


def wrap_file(
    file: IO[AnyStr],
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    limiter: CapacityLimiter | None = None,
) -> AsyncFile[AnyStr]:
    """Make a file's calls awaitable: one of `pacedio.open`, or a binary file as `open` returns it, which is then
    written through `pacedio.wrap` with `pacing` and `sync`, and left open. Files that are only read are taken as they
    are.
    """
    wrapped: Any = file
    if not isinstance(file, (PacedWriter, PacedTextWriter)) and file.writable():
        wrapped = _files.wrap(file, pacing, sync=sync)  # type: ignore[arg-type]
    return AsyncFile(wrapped, limiter=limiter)


# ---- copies -----------------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends a copy that was cancelled; nobody waits for what it raises."""


async def _copy(copy: Callable[[Callable[[int], None]], _T], limiter: CapacityLimiter | None) -> _T:
    """Run a copy that tells of its progress, and end it when it is cancelled."""
    stopped = threading.Event()

    def progress(_: int) -> None:
        if stopped.is_set():
            raise _Stopped

    await checkpoint_if_cancelled()
    return await _in_thread(partial(copy, progress), limiter, stop=stopped.set)


async def copyfile(
    src: Path,
    dst: Path,
    *,
    follow_symlinks: bool = True,
    pacing: Pacing | None = None,
    sync: bool = True,
    limiter: CapacityLimiter | None = None,
) -> Path:
    """Copy a file's content as `pacedio.copying.copyfile` does. Cancelled, it ends after the window under way, and what
    was copied so far stays.
    """

    def copy(progress: Callable[[int], None]) -> Path:
        _copying._copyfile(src, dst, None, follow_symlinks, pacing, sync, progress=progress)
        return dst

    return await _copy(copy, limiter)


async def copytree(
    src: Path,
    dst: Path,
    symlinks: bool = False,
    ignore: Callable[[str, list[str]], Iterable[str]] | None = None,
    ignore_dangling_symlinks: bool = False,
    dirs_exist_ok: bool = False,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    limiter: CapacityLimiter | None = None,
) -> Path:
    """Copy a directory tree as `pacedio.copying.copytree` does, with metadata. Cancelled, it ends after the window
    under way, and what was copied so far stays.
    """

    def copy(progress: Callable[[int], None]) -> Path:
        def copy_one(source: str, target: str, batch: Batch) -> None:
            progress(0)
            _copying._copyfile(source, target, copystat, True, pacing, sync, batch=batch, progress=progress)

        _copying._copytree(src, dst, symlinks, ignore, copy_one, ignore_dangling_symlinks, dirs_exist_ok, sync=sync)
        return dst

    return await _copy(copy, limiter)
