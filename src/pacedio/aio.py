"""Paced files for asyncio and trio, over anyio.

Every call on a file runs in a worker thread, so the event loop never waits for a disk. A thread is used for as long as
a call takes: a thousand open files need none while nobody writes. The calls of one file run one after the other, in the
order in which they were made.

Cancelling does not stop a thread in a system call. So a call that has begun is waited for, whatever is cancelled
meanwhile (also by asyncio's own cancellation, as its timeouts do); one that has not begun never will. Either way the
file is what the completed calls made it.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import IO, TYPE_CHECKING, Any, AnyStr, Generic, TypeVar, overload

from anyio import CancelScope, CapacityLimiter, Lock, from_thread, get_cancelled_exc_class, to_thread
from anyio.abc import AsyncResource
from anyio.lowlevel import RunVar

from pacedio import copying as _copying
from pacedio import files as _files
from pacedio.writer import PacedTextWriter, PacedWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from types import TracebackType

    from _typeshed import OpenBinaryMode, OpenTextMode, ReadableBuffer, WriteableBuffer

    from pacedio._batch import Batch
    from pacedio.files import File, Opener
    from pacedio.pacing import Pacing
    from pacedio.writer import WriteStats

__all__ = ["AsyncFile", "copyfile", "copytree", "open_file", "wrap_file"]

_T = TypeVar("_T")
_P = TypeVar("_P", str, os.PathLike[str])

# ---- calls in threads -------------------------------------------------------------------------------------------

# More calls at once make no disk faster; but one that is stuck should not hold up all others.
_THREADS = 32
_default_limiter: RunVar[CapacityLimiter] = RunVar("pacedio")
_no_limiter: RunVar[CapacityLimiter] = RunVar("pacedio, no limit")


def _of_this_loop(limiter: RunVar[CapacityLimiter], tokens: float) -> CapacityLimiter:
    try:
        return limiter.get()
    except LookupError:
        made = CapacityLimiter(tokens)
        limiter.set(made)
        return made


def _check_limiter(limiter: CapacityLimiter | None) -> None:
    if limiter is not None and not isinstance(limiter, CapacityLimiter):
        raise TypeError(f"limiter must be an anyio.CapacityLimiter or None, not {type(limiter).__name__}")


async def _in_thread(
    function: Callable[[], _T], limiter: CapacityLimiter | None, *, stop: Callable[[], object] | None = None
) -> _T:
    """Call it in a thread, or never if this is cancelled before it begins. One that has begun has ended when this
    returns or raises.

    anyio's shield holds off the scopes, trio's and its own, but not `asyncio.Task.cancel`. That is raised here, after
    `stop`, which may make the call end soon, was called and the call has ended; what it returned or raised is lost.
    """
    if limiter is None:
        limiter = _of_this_loop(_default_limiter, _THREADS)
    # anyio itself would give the token back as soon as asyncio cancels, and let another call begin beside this one.
    async with limiter:
        call: Future[None] = Future()
        try:
            return await to_thread.run_sync(_run, call, function, limiter=_of_this_loop(_no_limiter, math.inf))
        except get_cancelled_exc_class():
            if not (call.cancel() or call.done()):
                if stop is not None:
                    stop()
                await _ended(call)
            raise


def _run(call: Future[None], function: Callable[[], _T]) -> _T:
    if not call.set_running_or_notify_cancel():
        raise CancelledError  # which nobody waits for
    try:
        return function()
    finally:
        call.set_result(None)


async def _ended(call: Future[None]) -> None:
    """Wait for a call's end, however often asyncio cancels meanwhile."""
    import asyncio

    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[None]) -> None:
        try:
            loop.call_soon_threadsafe(ended.set)
        except RuntimeError:  # it is closed, and nobody waits any more
            pass

    call.add_done_callback(tell)
    with CancelScope(shield=True):  # or a scope that is cancelled would wake this up all the time
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                pass


async def _surely(function: Callable[[], object], limiter: CapacityLimiter | None, lock: Lock) -> None:
    """Call it in a thread, whatever is cancelled. Raise what it raises, else what interrupted the wait, if anything."""
    raised: list[BaseException | None] = []
    cancelled: BaseException | None = None

    def run() -> None:
        try:
            function()
        except BaseException as error:  # not lost with a cancellation
            raised.append(error)
        else:
            raised.append(None)

    with CancelScope(shield=True):
        while not raised:
            try:
                async with lock:
                    await _in_thread(run, limiter)
            except (get_cancelled_exc_class(), KeyboardInterrupt) as error:  # trio raises the latter where it waits
                cancelled = error
    try:
        if (told := raised[0] or cancelled) is not None:
            raise told
    finally:
        # An exception whose traceback holds it would keep the file until it is collected.
        raised.clear()
        del cancelled, told


# ---- files ------------------------------------------------------------------------------------------------------

# What a file has and would do in the event loop's thread.
_BLOCKING = frozenset({"close", "detach", "reconfigure"})


class AsyncFile(AsyncResource, Generic[AnyStr]):
    """A file whose methods are awaited: the interface of anyio's AsyncFile, and `peek`, `sync`, `discard` and `stats`.

    What needs no disk is the file's own and not awaited: `name`, `mode`, `closed`, `fileno()` and the like.

    Leaving its `async with` block closes it as leaving the file's own `with` block does: an atomic file that an
    exception or a cancellation leaves is not committed, and no error of that close hides what left the block.

    A cancelled call either had begun, and is completed first, or changes nothing. It raises the cancellation if it had
    not begun, or if asyncio itself cancels (`asyncio.timeout`, `Task.cancel`); otherwise the next `await` does.
    """

    def __init__(self, file: IO[AnyStr], *, limiter: CapacityLimiter | None = None) -> None:
        _check_limiter(limiter)
        self._file: Any = file
        self._limiter = limiter
        self._lock = Lock()
        self._stats: WriteStats | None = getattr(file, "stats", None)

    def __getattr__(self, name: str) -> Any:
        if name in _BLOCKING:
            instead = "await aclose()" if name == "close" else f"call wrapped.{name} in a thread"
            raise AttributeError(f"{name!r} of {self._file!r} would block the event loop: {instead}")
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
        """What the last call that completed left as `PacedWriter.stats`: those of now would wait for the one under way.

        Raises `AttributeError` for a file that is not written.
        """
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

        Raises the error that made the writer fail, as `PacedWriter.close` does. The descriptor is released in any case.
        """
        await self._close(self._file.close)

    async def discard(self) -> None:
        """Close and leave what is not written, as `PacedWriter.discard`, whatever is cancelled meanwhile."""
        await self._close(self._file.discard)

    async def _close(self, close: Callable[[], object]) -> None:
        await _surely(partial(self._run, close), self._limiter, self._lock)

    async def sync(self) -> None:
        """Make all that was written durable, the name of a new file included, as `PacedWriter.sync`.

        Raises `WritebackError` if bytes accepted earlier did not reach the device.
        """
        await self._call("sync")

    async def flush(self) -> None:
        """Hand the user-space buffer to the kernel. This says nothing about the disk: see `sync`."""
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

    async def peek(self: AsyncFile[bytes], size: int = 0) -> bytes:
        """Return bytes ahead without moving the position, after at most one read(2)."""
        return await self._call("peek", size)  # type: ignore[no-any-return]

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
        """Write all of it, and return its length in bytes or characters.

        Raises `OSError`; `WritebackError` if bytes accepted earlier were lost. After either the file has failed, and
        every later call raises it again.
        """
        return await self._call("write", b)  # type: ignore[no-any-return]

    @overload
    async def writelines(self: AsyncFile[bytes], lines: Iterable[ReadableBuffer]) -> None: ...
    @overload
    async def writelines(self: AsyncFile[str], lines: Iterable[str]) -> None: ...
    async def writelines(self, lines: Iterable[ReadableBuffer] | Iterable[str]) -> None:
        """Write them one after the other, with nothing in between. An iterator is asked for them in the thread."""
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
@overload
async def open_file(
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
    limiter: CapacityLimiter | None = None,
) -> AsyncFile[Any]: ...
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
    """Open a file as `pacedio.open` does, with its arguments and errors.

    limiter
        An anyio.CapacityLimiter for this and all calls on the file. By default, at most 32 of an event loop's calls
        without one of their own use a thread at once.
    """
    opened: list[Any] = []

    def call() -> None:
        opened.append(
            _files.open(
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
        )

    _check_limiter(limiter)
    try:
        await _in_thread(call, limiter)
    except get_cancelled_exc_class():
        if opened:  # which nobody got to see
            unseen = opened[0]
            leave = unseen.discard if isinstance(unseen, (PacedWriter, PacedTextWriter)) else unseen.close
            await _surely(leave, limiter, Lock())
        raise
    return AsyncFile(opened[0], limiter=limiter)


def wrap_file(
    file: IO[AnyStr],
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    limiter: CapacityLimiter | None = None,
) -> AsyncFile[AnyStr]:
    """Make a file's calls awaitable: one of `pacedio.open`, or a binary file as `open` returns it, which is then
    written through `pacedio.wrap` with `pacing` and `sync`, and left open. What is only read is taken as it is.

    What is still in the buffer of a file that `pacedio.wrap` takes is written at once, in the caller's thread: flush it
    before, in another, if that is to be ruled out.

    Raises as `pacedio.wrap`, and `ValueError` for `pacing` that would not be used, since the file has its own.
    """
    wrapped: Any = file
    if isinstance(file, (PacedWriter, PacedTextWriter)):
        if pacing is not None:
            raise ValueError(f"pacing is to be given to pacedio.open, which opened {file.name!r}")
    elif not hasattr(file, "writable") or file.writable():
        wrapped = _files.wrap(file, pacing, sync=sync)  # type: ignore[arg-type]
    return AsyncFile(wrapped, limiter=limiter)


# ---- copies -----------------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends a copy that asyncio's own cancellation left; nobody waits for what it raises."""


async def _copy(copy: Callable[[Callable[[int], None]], object], limiter: CapacityLimiter | None) -> None:
    """Run a copy that tells of its progress, and end it when it is cancelled."""
    left = threading.Event()

    def progress(_: int) -> None:
        if left.is_set():
            raise _Stopped
        from_thread.check_cancelled()

    _check_limiter(limiter)
    await _in_thread(partial(copy, progress), limiter, stop=left.set)


async def copyfile(
    src: str | os.PathLike[str],
    dst: _P,
    *,
    follow_symlinks: bool = True,
    pacing: Pacing | None = None,
    sync: bool = True,
    limiter: CapacityLimiter | None = None,
) -> _P:
    """Copy a file's content as `pacedio.copying.copyfile` does. Returns `dst`.

    Cancelled, it ends after the window under way, and what was copied so far stays. A sync under way is waited for.
    """

    def copy(progress: Callable[[int], None]) -> None:
        _copying._copyfile(src, dst, None, follow_symlinks, pacing, sync, progress=progress)

    await _copy(copy, limiter)
    return dst


async def copytree(
    src: str | os.PathLike[str],
    dst: _P,
    symlinks: bool = False,
    ignore: Callable[[str, list[str]], Iterable[str]] | None = None,
    copy_function: Callable[[str, str], object] = _copying.copy2,
    ignore_dangling_symlinks: bool = False,
    dirs_exist_ok: bool = False,
    *,
    pacing: Pacing | None = None,
    sync: bool = True,
    limiter: CapacityLimiter | None = None,
) -> _P:
    """Copy a directory tree as `pacedio.copying.copytree` does, with its arguments and errors. Returns `dst`.

    Cancelled, it ends after the window under way, and what was copied so far stays. A sync under way is waited for, and
    so is a `copy_function` that is none of `pacedio.copying`'s. `ignore` and `copy_function` are called in the thread.
    """
    metadata: dict[Any, Any] = {
        _copying.copy2: shutil.copystat,
        _copying.copy: shutil.copymode,
        _copying.copyfile: None,
    }

    def copy(progress: Callable[[int], None]) -> None:
        def copy_one(source: str, target: str, batch: Batch) -> None:
            progress(0)
            if copy_function in metadata:
                _copying._copyfile(
                    source, target, metadata[copy_function], True, pacing, sync, batch=batch, progress=progress
                )
            else:
                copy_function(source, target)

        _copying._copytree(src, dst, symlinks, ignore, copy_one, ignore_dangling_symlinks, dirs_exist_ok, sync=sync)

    await _copy(copy, limiter)
    return dst
