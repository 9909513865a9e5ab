"""PacedWriter, the file object that writes paced, and WriteStats, what it has to tell.

A PacedWriter is made of three files, of which the callers see the outermost:

    PacedWriter           an io.BufferedIOBase: failure, sync, commit, statistics
      io.BufferedWriter   collects small writes, keeps order between threads (its lock)
        _PacedFile        an io.FileIO whose write() is pio_write, in C without the GIL

Two things need care.

Signals. Python runs signal handlers after a C call has returned, so a handler may raise when pio_write has written
and before its result is known to the BufferedWriter. That would write the same bytes once more. _PacedFile.write
therefore asks the C side what was taken, and tells the BufferedWriter when it comes again.

Forks. A child gets a copy of everything: the parent's bytes in the buffer, its ranges in flight, its failure. None of
these are the child's. So the child's copies of all open writers are given a new buffer and a new C writer, and what is
left of the old ones can write nothing. The descriptor is shared, as with any file, and the child may write to it.
"""

from __future__ import annotations

import errno
import io
import os
from _weakref import ref

from pacedio import _native
from pacedio._buffered import _Buffered
from pacedio._native import ffi, lib
from pacedio.exceptions import WritebackError
from pacedio.observe import limit_cap
from pacedio.pacing import BALANCED, Pacing, format_seconds, format_size

TYPE_CHECKING = False  # typing is too slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any, ClassVar, NoReturn, Protocol

    from _typeshed import ReadableBuffer as Buffer
    from _typeshed import WriteableBuffer

    class Entry(Protocol):
        """What becomes of the name of a file that is written (see files.py)."""

        atomic: bool

        def sync(self, fd: int) -> None: ...
        def commit(self, fd: int, *, durable: bool) -> None: ...
        def discard(self) -> None: ...


CHUNK = 128 * 1024  # the buffer of small writes: large enough for large folios, and to make pio_write's cost vanish

_ENGINES = {
    "auto": lib.PIO_AUTO,
    "uncached": lib.PIO_UNCACHED,
    "range": lib.PIO_RANGE,
    "advise": lib.PIO_ADVISE,
    "datasync": lib.PIO_DATASYNC,
    "none": lib.PIO_NONE,
}
_ENGINE_NAMES = {number: name for name, number in _ENGINES.items()} | {lib.PIO_UNDECIDED: "undecided"}
_PREALLOCATE = {"off": 0, "auto": lib.PIO_AHEAD}
_IO_PRIORITIES = {None: 0, "best-effort": 2 << 13 | 4, "idle": 3 << 13}  # ioprio_set(2): class << 13 | level
_REASONS = {
    lib.PIO_BEST: None,
    lib.PIO_ASKED: "asked for",
    lib.PIO_CALL_FAILED: "the better engine's call failed",
    lib.PIO_STACKED: "written pages are cached in another file's mapping",
    lib.PIO_STAYED_DIRTY: "the better engine's wait leaves pages dirty here",
    lib.PIO_KNOWN_TYPE: "the file system's type decided",
    lib.PIO_KEEP_CACHE: "the better engine cannot keep pages cached",
    lib.PIO_NO_MAPPING: "the better engine has to read the file",
    lib.PIO_MEMORY: "the file system is memory, nothing to pace",
    lib.PIO_NOT_A_FILE: "not a regular file, nothing to pace",
    lib.PIO_DIRECT: "O_DIRECT, nothing to pace",
    lib.PIO_WRITTEN_THROUGH: "written pages are clean at once, somebody else caches them",
}


_LIMITED_BY = {
    lib.PIO_BY_NOTHING: None,
    lib.PIO_BY_DEVICE: "device",
    lib.PIO_BY_CGROUP: "cgroup",
    lib.PIO_BY_CONFIGURATION: "configuration",
    lib.PIO_BY_ENGINE: "engine",
}


class WriteStats:
    """What a writer did so far: a frozen snapshot.

    bytes
        Accepted by the kernel. What is still in the user-space buffer is not counted.
    windows
        Started.
    engine
        "uncached", "range", "advise", "datasync", "none", or "undecided" while no window was filled.
    reason
        Why the engine is not the best one, or None.
    limit, in_flight, most_in_flight
        Bytes, counted in whole pages. An automatic limit is the one that holds now for all writers of the device
        together.
    limited_by
        Why the limit is what it is: "device" (more would only wait in its queue), "cgroup" (a quarter of the background
        threshold that applies to this process's memory cgroup, or to the machine), "configuration" (the caller named
        it), "engine" (`datasync` does not tell when a window completed, so the limit is fixed at 2 MiB or, if that is
        more, a window; `none` has no limit), or None: not found out yet.
    base_delay_seconds, delivery_rate
        Of the device, as an automatic limit has it: the least time of late from the start of a small window (64 KiB),
        with no other under writeback, to its completion, and the most bytes a second of late; None where not known.
    share
        Whom an automatic limit is shared with: all processes of this user on the "host", or only this "process".
    stalls, stall_seconds, longest_stall_seconds
        Waits for a window that really blocked the caller (50 microseconds or more), outside of `sync`: its own or, in a
        shared budget, that of another writer. The time until it is its turn, or the rate admits more, is no stall.
    sync_seconds
        Spent in `sync`, including its starts and waits; 0 if nothing was synced.
    verified_dirty_pages
        The most dirty pages that were seen when the engine was verified, or None if this writer had no need to.
    error
        The first error of the data, or None.
    """

    __slots__ = (
        "base_delay_seconds",
        "bytes",
        "delivery_rate",
        "engine",
        "error",
        "in_flight",
        "limit",
        "limited_by",
        "longest_stall_seconds",
        "most_in_flight",
        "reason",
        "share",
        "stall_seconds",
        "stalls",
        "sync_seconds",
        "verified_dirty_pages",
        "windows",
    )

    bytes: int
    windows: int
    engine: str
    reason: str | None
    limit: int
    limited_by: str | None
    base_delay_seconds: float | None
    delivery_rate: int | None
    share: str
    in_flight: int
    most_in_flight: int
    stalls: int
    stall_seconds: float
    longest_stall_seconds: float
    sync_seconds: float
    verified_dirty_pages: int | None
    error: OSError | None

    def __init__(self, **values: object) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, values[name])

    def as_dict(self) -> dict[str, object]:
        """All of it by name, fit for JSON: the error as its message."""
        values: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        values["error"] = None if self.error is None else str(self.error)
        return values

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_stats, ({name: getattr(self, name) for name in self.__slots__},)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("WriteStats is frozen")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("WriteStats is frozen")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriteStats):
            return NotImplemented
        return self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.as_dict().values()))

    def __repr__(self) -> str:
        return f"WriteStats({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"

    def __str__(self) -> str:
        parts = [f"{format_size(self.bytes)} written"]
        if self.windows:
            parts.append(format_in_flight(self))
            if self.stalls:
                parts.append(
                    f"{self.stalls} stall{'s' if self.stalls > 1 else ''} of {format_seconds(self.stall_seconds)}"
                )
                parts.append(f"longest {format_seconds(self.longest_stall_seconds)}")
            else:
                parts.append("no stall")
        parts.append(f"sync {format_seconds(self.sync_seconds)}" if self.sync_seconds else "not synced")
        parts.append(f"engine {self.engine}" + (f" ({self.reason})" if self.reason else ""))
        if self.error is not None:
            parts.append(f"FAILED: {self.error}")
        return ", ".join(parts)


def format_in_flight(stats: WriteStats) -> str:
    """The most that was in flight, with the limit and where that comes from, as people read it."""
    text = f"at most {format_size(stats.most_in_flight)} in flight"
    if stats.limited_by is None:
        return text
    limit = f"limit {format_size(stats.limit)}"
    if stats.limited_by in ("device", "cgroup"):
        limit = f"limit now {format_size(stats.limit)} by {stats.limited_by}"
        if stats.delivery_rate and stats.base_delay_seconds:
            limit += f": {format_size(stats.delivery_rate)}/s, {format_seconds(stats.base_delay_seconds)}"
    elif stats.limited_by == "engine":
        limit += " by engine"
    return f"{text} ({limit})"


def _restore_stats(values: dict[str, object]) -> WriteStats:
    """What pickle and copy call, because they pass no keyword arguments."""
    return WriteStats(**values)


def _options(pacing: Pacing) -> Any:
    return ffi.new(
        "pio_options *",
        {
            "window": 0 if pacing.window == "auto" else pacing.window,
            "limit": 0 if pacing.limit == "auto" else pacing.limit,
            "rate": pacing.rate or 0,
            "polite": pacing.polite,
            "share": pacing.share == "host",
            "engine": _ENGINES[pacing.engine],
            "drop_cache": pacing.drop_cache,
            "io_priority": _IO_PRIORITIES[pacing.io_class],
            "preallocate": _PREALLOCATE[pacing.preallocate]
            if isinstance(pacing.preallocate, str)
            else pacing.preallocate,
        },
    )


_BALANCED_OPTIONS = _options(BALANCED)


def keep_cap() -> None:
    """Tell the C side what may be in flight before the kernel itself stops the writers of this process.

    It is a matter of the memory cgroup and of what others have dirty, and changes while a big file is written.
    """
    lib.pio_set_cap(limit_cap() or 0)


_pio_write = lib.pio_write  # looked up once: they are called for every small file
_from_buffer = ffi.from_buffer
_EINTR = -errno.EINTR


class _PacedFile(io.FileIO):
    """The unbuffered file: the descriptor, and the C writer that paces it.

    The C writer is made when it is first needed. The one write of a small file, at its close, does not need it.
    """

    pacing: Pacing
    buffer_size = CHUNK
    owner: ref[PacedWriter] | None = None
    ignores_writes = False  # takes and forgets what is written
    is_parents = False  # the descriptor has a new owner in this process

    is_closing = False  # without a sync: what is written now is the last
    native_writer: Any = None
    _error: OSError | None = None  # of a write without a C writer
    unsettled = 0  # the length of a write() whose result nobody was told...
    _unsettled_at: object = None  # ...and the address of its data, if they were exactly a buffer's worth
    _accepted = 0  # bytes that pio_write took and the caller was told of

    def paced(self) -> Any:
        """The C writer."""
        if self.native_writer is None:
            options = _BALANCED_OPTIONS if self.pacing is BALANCED else _options(self.pacing)
            pointer = lib.pio_writer_new(self.fileno(), options)
            if not pointer:
                raise MemoryError
            # Another thread may come here at the same time, and one of the two counts.
            self.__dict__.setdefault("native_writer", ffi.gc(pointer, lib.pio_writer_free))
        return self.native_writer

    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        # Python runs signal handlers at calls and jumps only: what is assigned in a row here is assigned together.
        if self.unsettled:
            taken = self.raw_stats().bytes - self._accepted
            if not self._is_offered_again(data):
                # A caller's own, who knows by the handler's exception that an unknown part was written.
                self._accepted += taken
                self.unsettled = 0
            elif taken:
                self._accepted += taken
                self.unsettled = 0
                return taken  # type: ignore[no-any-return]
        writer = self.native_writer
        if writer is None and self.is_closing and self.pacing.rate is None and self._is_within_a_window():
            return self._write_all_there_is(data)
        view = _from_buffer(data)
        if self.ignores_writes:
            return len(view)
        if writer is None:
            writer = self.paced()
        if self._accepted + len(view) > CHUNK:  # from where on the C writer follows the device
            keep_cap()
        try:
            if len(view) == self.buffer_size:
                self._unsettled_at = ffi.cast("char *", view)
            self.unsettled = len(view)
            code = _pio_write(writer, view, len(view))
            while code == _EINTR:
                code = _pio_write(writer, view, len(view))
        except BaseException:
            # The BufferedWriter's memory must not be kept by a traceback: Python 3.10 crashes when it outlives it.
            del data, view
            raise
        if code < 0:
            self.unsettled = 0
            del data, view
            if code == -errno.EAGAIN:
                return None
            self.refuse(code)
        self._accepted += code
        self.unsettled = 0
        return code  # type: ignore[no-any-return]

    def _is_within_a_window(self) -> bool:
        window = self.pacing.window
        return isinstance(window, str) or self.buffer_size < window

    def _is_offered_again(self, data: Buffer) -> bool:
        """Is `data` the BufferedWriter's next attempt at the unsettled write, which then was its own?

        More than a buffer's worth goes from a caller straight to the file, less never. Exactly as much may come either
        way (Python 3.13), but only the BufferedWriter offers the same memory again: callers who go on after an
        exception ask where they are, and `settle` comes first.
        """
        if self.unsettled == self.buffer_size:
            view = _from_buffer(data)
            return len(view) == self.unsettled and view == self._unsettled_at
        return self.unsettled < self.buffer_size

    def settle(self, buffer: io.BufferedIOBase) -> None:
        """Tell the BufferedWriter how far an interrupted write came."""
        buffer.flush()
        if self.unsettled:  # not the BufferedWriter's, or it would have been offered again
            accepted = self.raw_stats().bytes
            self._accepted = accepted
            self.unsettled = 0

    def _write_all_there_is(self, data: Buffer) -> int | None:
        try:
            written = super().write(data)
        except OSError as error:
            del data
            error.filename = self.name
            self._error = error.with_traceback(None)
            raise
        self._accepted += written or 0
        return written

    def truncate(self, size: int | None = None, /) -> int:
        if size is None:
            size = self.tell()
        self.check(lib.pio_truncate(self.paced(), size))
        return size

    def sync(self) -> None:
        self.check(_uninterrupted(lib.pio_sync, self.paced()))

    def start_rest(self) -> None:
        if self.native_writer is not None:
            self.check(_uninterrupted(lib.pio_start_rest, self.native_writer))

    def wait_rest(self) -> None:
        if self.native_writer is not None:
            self.check(_uninterrupted(lib.pio_wait_rest, self.native_writer))

    def release(self) -> None:
        """Give back what is allocated ahead: nothing more will be written."""
        if self.native_writer is not None:
            lib.pio_release(self.native_writer)

    def close(self) -> None:
        """Start what was not started, and release the descriptor. Raise what made the writer fail."""
        if self.is_parents or self.closed:
            return
        code = 0
        try:
            if self.native_writer is not None:
                code = lib.pio_writer_close(self.native_writer)
        finally:
            super().close()
        if code < 0 and not self.ignores_writes:
            self.refuse(code)

    def catch_up(self) -> None:
        """Others wrote through the C writer, and were told what it took."""
        self._accepted = self.raw_stats().bytes

    @property
    def wrote(self) -> bool:
        return self.raw_stats().bytes > 0  # type: ignore[no-any-return]

    def raw_stats(self) -> Any:
        stats = ffi.new("pio_stats *")
        if self.native_writer is not None:
            lib.pio_writer_stats(self.native_writer, stats)
        else:
            stats.bytes = self._accepted
            if self.pacing.limit != "auto":
                stats.limit = self.pacing.limit
                stats.limited_by = lib.PIO_BY_CONFIGURATION
            stats.verified_dirty_pages = -1
        return stats

    def check(self, code: int) -> None:
        if code < 0:
            self.refuse(code)

    def refuse(self, code: int) -> NoReturn:
        """Raise the error that the C side returned; if the writer failed with it, let every later call find out."""
        if self.raw_stats().error:
            owner = self.owner() if self.owner is not None else None
            if owner is not None:
                owner._has_failed()
            raise self.error()
        if self.closed:
            raise ValueError("I/O operation on closed file")
        raise _native.error(code, self.name)

    def error(self) -> OSError:
        stats = self.raw_stats()
        return _native.error(-stats.error, self.name, WritebackError if stats.late else OSError)

    def stats(self) -> WriteStats:
        raw = self.raw_stats()
        reason = _REASONS[raw.reason]
        if raw.engine == lib.PIO_UNDECIDED:
            reason = "no window was filled"
        elif raw.reason_errno:
            reason = f"{reason}: {os.strerror(raw.reason_errno)}"
        return WriteStats(
            bytes=raw.bytes,
            windows=raw.windows,
            engine=_ENGINE_NAMES[raw.engine],
            reason=reason,
            limit=raw.limit,
            limited_by=_LIMITED_BY[raw.limited_by],
            base_delay_seconds=raw.base_delay_ns / 1e9 if raw.base_delay_ns else None,
            delivery_rate=raw.delivery_rate or None,
            share="host" if raw.shared else "process",
            in_flight=raw.in_flight,
            most_in_flight=raw.most_in_flight,
            stalls=raw.stalls,
            stall_seconds=raw.stall_ns / 1e9,
            longest_stall_seconds=raw.longest_stall_ns / 1e9,
            sync_seconds=raw.sync_ns / 1e9,
            verified_dirty_pages=None if raw.verified_dirty_pages < 0 else raw.verified_dirty_pages,
            error=self.error() if raw.error else self._error,
        )


def _uninterrupted(call: Any, writer: Any) -> int:
    """Python runs the handlers of signals between two attempts."""
    while (code := call(writer)) == _EINTR:
        pass
    return code  # type: ignore[no-any-return]


class PacedWriter(_Buffered):
    """A binary file that is written paced. `pacedio.open` and `pacedio.wrap` make them.

    It behaves as the io.BufferedWriter that `open` returns, and in addition

    - never has more than `limit` bytes in flight (together with those it shares an automatic limit with), and blocks in
      `write` only while it would exceed them or its rate;
    - syncs when it is closed, unless it was opened with `sync=False`; an exception that leaves its `with` block is
      never hidden by an error of that close;
    - fails for good with the first error of the data: every later call raises it again, `close` once more;
    - tells in `stats` what it did.

    It may be used from several threads, as io.BufferedWriter. A forked child's copy starts empty: what the parent had
    not written yet is the parent's to write.
    """

    _hot: ClassVar[tuple[str, ...]] = ("write",)
    _buffer_kind: type[io.BufferedWriter | io.BufferedRandom] = io.BufferedWriter
    _raw: _PacedFile

    _failed = False
    _inherited = False  # from the parent of this process
    _collected = False  # an outer file is garbage, and closes this one
    _releasing = False
    _unbuffered = False
    _entry_synced = False
    _text: ref[PacedTextWriter] | None = None
    _keep: object = None  # the caller's file object, whose descriptor this writes to

    def __init__(
        self,
        raw: _PacedFile,
        pacing: Pacing,
        *,
        sync: bool = True,
        entry: Entry | None = None,
        unbuffered: bool = False,
        keep: object = None,
    ) -> None:
        raw.pacing = pacing
        self._sync = sync
        self._entry = entry
        if unbuffered:
            self._unbuffered = True
            self._taken = ()  # type: ignore[misc]  # write has more to do than the buffer's
        if keep is not None:
            self._keep = keep
        raw.owner = _open_writers[id(self)] = ref(self)
        self._bind(raw, self._buffer_kind(raw, raw.buffer_size))

    @property
    def stats(self) -> WriteStats:
        """What was done so far, at any time, also after `close`."""
        return self._raw.stats()

    def write(self, data: Buffer, /) -> int:
        """Write all of `data`, a contiguous buffer of any type, and return its length in bytes."""
        self._check()
        written = self._buffer.write(data)
        if self._unbuffered:
            self._buffer.flush()
        return written

    def flush(self) -> None:
        """Hand the user-space buffer to the kernel. This says nothing about the disk: see `sync`."""
        self._check()
        self._buffer.flush()

    def sync(self) -> None:
        """Make all that was written durable, the name of a new file included.

        Raises `WritebackError` if bytes accepted earlier did not reach the device.
        """
        self.flush()
        self._raw.sync()
        if self._entry is not None and not self._entry_synced:
            self._entry.sync(self._raw.fileno())
            self._entry_synced = True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the position to `offset` bytes from the start (`whence` 0), the position (1) or the end (2), and
        return it.
        """
        self._check()
        if self._raw.unsettled:
            self._raw.settle(self._buffer)
        return self._buffer.seek(offset, whence)

    def tell(self) -> int:
        """Return the position in bytes."""
        self._check()
        if self._raw.unsettled:
            self._raw.settle(self._buffer)
        return self._buffer.tell()

    def truncate(self, pos: int | None = None, /) -> int:
        """Set the size to `pos` bytes, by default the position, and return it."""
        self._check()
        return self._buffer.truncate(pos)

    def detach(self) -> io.RawIOBase:
        """Separate the unbuffered file and return it; this object is unusable afterwards. The file is neither synced
        nor, if atomic, committed.
        """
        self._check()
        raw = self._buffer.detach()
        self._forget()
        if self._entry is not None:
            self._entry.discard()
        return raw

    def close(self) -> None:
        """Sync (unless opened with `sync=False`), commit an atomic file, and close. A second call does nothing.

        Raises the error that made the writer fail once more. The descriptor is released in any case.
        """
        if self.closed:
            return
        atomic = self._entry is not None and self._entry.atomic
        # Garbage promises nothing: its bytes go to the kernel as those of io's files do.
        garbage = self._finalizing or self._collected or self._releasing or self._buffer.closed
        if (garbage and atomic) or self._raw.ignores_writes:
            self._abandon()
            return
        if garbage or not (self._sync or atomic):
            if self._finalizing:  # the buffer is collected next
                self._forget()
            else:
                self._raw.is_closing = True
                self._release()
            return
        try:
            self._buffer.flush()
            self._raw.release()
            if self._sync and (not self._inherited or self._raw.wrote):
                self.sync()
            if self._entry is not None:
                self._entry.commit(self._raw.fileno(), durable=self._sync)
                self._entry = None
        except BaseException:
            self._abandon()
            raise
        self._release()

    def discard(self) -> None:
        """Close without a sync; what is still in the user-space buffer is lost, and an atomic file leaves no trace: the
        target stays as it was. After `close`, nothing.
        """
        if not self.closed:
            self._abandon()

    def _abandon(self) -> None:
        self._raw.ignores_writes = True
        try:
            self._release()
        finally:
            if self._entry is not None:
                self._entry.discard()

    def _release(self) -> None:
        try:
            if not self._releasing:
                self._releasing = True
                self._buffer.close()
        finally:
            # A handler may have raised before the buffer came to it; then close may also be called again.
            if not self._raw.closed:
                self._raw.close()
            self._forget()

    def _forget(self) -> None:
        self.closed = True
        if self._text is not None and (text := self._text()) is not None:
            text.closed = True
        _open_writers.pop(id(self), None)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._entry is not None and self._entry.atomic:
            self.discard()
        else:
            try:
                self.close()
            except OSError:
                pass  # the exception under way is the one to tell; stats.error keeps this one

    def _dealloc_warn(self, source: object, /) -> None:
        self._collected = True
        super()._dealloc_warn(source)

    def _check(self) -> None:
        if self._failed and not self.closed:
            raise self._raw.error()

    def _has_failed(self) -> None:
        self._failed = True
        for name in self._taken:
            self.__dict__.pop(name, None)

    # What `Batch` does in place of `close`, with many files.

    def _complete(self) -> None:
        """Nothing more will be written: what remains to be done to the file changes none of its times."""
        self.flush()
        self._raw.release()

    def _start_rest(self) -> None:
        self._complete()
        self._raw.start_rest()

    def _sync_contents(self) -> None:
        self.flush()
        self._raw.sync()

    def _close_synced(self) -> None:
        self._sync = False
        self.close()

    def _native_writer(self) -> Any:
        """The C writer, with nothing left in the user-space buffer, for those who write through it directly."""
        self.flush()
        return self._raw.paced()

    def _start_anew(self) -> None:
        """Make this the child's file."""
        if self.closed or self._raw.closed:
            return
        parents = self._raw
        parents.ignores_writes = parents.is_parents = True
        # A thread that does not exist here may hold the old buffer's lock: it is never touched again.
        _left_to_the_parent.append(self._buffer)

        # On a descriptor, "w" does not truncate, and "a" would move the parent's position.
        raw = _PacedFile(parents.fileno(), "rb+" if parents.readable() else "wb", closefd=parents.closefd)
        raw.name = parents.name
        raw.pacing, raw.buffer_size, raw.owner = parents.pacing, parents.buffer_size, parents.owner
        self._inherited = True
        self._failed = False
        if self._entry is not None and self._entry.atomic:
            self._entry = None  # the parent's to commit or discard
        self._bind(raw, self._buffer_kind(raw, raw.buffer_size))

        text = self._text() if self._text is not None else None
        if text is not None:
            raw.ignores_writes = True
            text.flush()
            raw.ignores_writes = False


class PacedRandom(PacedWriter):
    """A PacedWriter that also reads: what the modes with "+" return, as io.BufferedRandom. Reading is not paced."""

    _hot = ("write", "peek", "read", "read1", "readinto", "readinto1", "readline", "readlines")
    _buffer_kind = io.BufferedRandom
    _buffer: io.BufferedRandom

    def __iter__(self) -> Iterator[bytes]:
        """Return an iterator over the lines."""
        self._check()
        return super().__iter__()

    def peek(self, size: int = 0, /) -> bytes:
        """Return bytes ahead without moving the position."""
        self._check()
        return self._buffer.peek(size)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes, by default all that is left."""
        self._check()
        return self._buffer.read(size)

    def read1(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes with at most one read of the file."""
        self._check()
        return self._buffer.read1(size)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read into `buffer` and return the number of bytes."""
        self._check()
        return self._buffer.readinto(buffer)

    def readinto1(self, buffer: WriteableBuffer, /) -> int:
        """Read into `buffer` with at most one read of the file, and return the number of bytes."""
        self._check()
        return self._buffer.readinto1(buffer)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line, at most `size` bytes of it."""
        self._check()
        return self._buffer.readline(size)

    def readlines(self, hint: int = -1, /) -> list[bytes]:
        """Read the lines that are left, about `hint` bytes of them."""
        self._check()
        return self._buffer.readlines(hint)


class PacedTextWriter(io.TextIOWrapper):
    """The io.TextIOWrapper over a PacedWriter that text modes return, with the writer's `stats` and `sync`."""

    buffer: PacedWriter
    closed = False  # a plain attribute, as in PacedWriter: it is read at each write

    def __init__(self, buffer: PacedWriter, **arguments: Any) -> None:
        self.closed = True  # for the finalizer of one whose arguments are refused
        super().__init__(buffer, **arguments)
        self.closed = False
        buffer._text = ref(self)

    @property
    def stats(self) -> WriteStats:
        """What was done so far, at any time, also after `close`."""
        return self.buffer.stats

    def sync(self) -> None:
        """Make all that was written durable, as `PacedWriter.sync`."""
        self.flush()
        self.buffer.sync()

    def discard(self) -> None:
        """Close and leave what is not written, as `PacedWriter.discard`."""
        self.buffer.discard()
        self.close()

    def close(self) -> None:
        """Write, sync, commit and close, as `PacedWriter.close`."""
        if not self.closed:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self.buffer._entry is not None and self.buffer._entry.atomic:
            self.discard()
            return
        try:
            self.close()
        except OSError:
            if kind is None:
                raise
            # else the exception under way is the one to tell; stats.error keeps this one


_open_writers: dict[int, ref[PacedWriter]] = {}
_left_to_the_parent: list[object] = []


def _after_fork_in_child() -> None:
    for reference in list(_open_writers.values()):
        writer = reference()
        if writer is not None:
            writer._start_anew()


os.register_at_fork(after_in_child=_after_fork_in_child)
