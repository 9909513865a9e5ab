"""PacedReader: reads ahead, and leaves the page cache as it found it."""

from __future__ import annotations

import errno
import io
import os

from pacedio import _native
from pacedio._buffered import _Buffered

TYPE_CHECKING = False  # typing is too slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar

_ffi = _native.ffi
_lib = _native.lib

_CHARS = _ffi.typeof("char[]")

# Bytes. Whole windows are recorded, read ahead and dropped; a device's own readahead is seldom more than 128 KiB.
_WINDOW = 512 * 1024
_AHEAD = 4 * _WINDOW

# Larger than the 4 KiB of io's default, since a refill costs a Python frame more than in io; smaller than what malloc
# hands out as a mapping of its own.
_BUFFER = 32 * 1024


class RawReader(io.FileIO):
    """The unbuffered file under a PacedReader: io.FileIO in mode "rb", whose reads go through the C library.

    Every method that reads does, so also this file reads ahead and drops behind by itself.
    """

    def __init__(
        self,
        file: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int,
        closefd: bool = True,
        opener: Callable[[Any, int], int] | None = None,
    ) -> None:
        io.FileIO.__init__(self, file, "rb", closefd, opener)
        reader = _lib.pio_reader_new(self.fileno(), _WINDOW, _AHEAD)
        if not reader:
            super().close()
            raise MemoryError
        # Freed only when no call is left that uses it, in whatever thread.
        self._reader = _ffi.gc(reader, _lib.pio_reader_free)

    def readinto(self, buffer: Any, /) -> int | None:
        """Read into `buffer` once and return how many bytes were read: 0 at the end, None if a non-blocking file has
        none yet.

        Raises OSError with the file's name.
        """
        try:
            view = _ffi.from_buffer(_CHARS, buffer, True)
        except (BufferError, TypeError, ValueError):
            raise TypeError(
                f"readinto() argument must be read-write bytes-like object, not {type(buffer).__name__}"
            ) from None
        while True:
            got: int = _lib.pio_read(self._reader, view, len(view))
            if got >= 0:
                return got
            if got == -errno.EAGAIN:
                return None
            if got == -errno.EINTR:
                continue  # Python runs the signal handlers before it goes round
            if self.closed:
                raise ValueError("I/O operation on closed file")
            raise _native.error(got, self.name)

    read = io.RawIOBase.read  # type: ignore[assignment]  # FileIO's reads around readinto

    def readall(self) -> bytes:
        """Read up to the end; None, as io has it, if a non-blocking file has nothing yet."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        # One byte more than is left finds the end: of a regular file, one short read is proof enough.
        left: int = _lib.pio_left(self._reader)
        if 0 < left < _BUFFER:
            data = self.read(left + 1)
            return data if len(data) <= left else data + self.readall()
        # BytesIO hands out the bytes that it was filled with, uncopied.
        target = io.BytesIO(bytes(left + 1 if left else _BUFFER))
        filled = 0
        while True:
            whole = target.getbuffer()
            room = len(whole) - filled
            got = self.readinto(whole[filled:])
            del whole  # BytesIO cannot be resized while somebody holds its buffer
            if got is None and filled == 0:
                return None  # type: ignore[return-value]
            filled += got or 0
            if not got or filled == left:
                break
            if got == room:
                target.seek(0, io.SEEK_END)
                target.write(bytes(filled))
        target.truncate(filled)
        return target.getvalue()

    def close(self) -> None:
        """Drop what was read ahead and close the descriptor, unless it is the caller's (`closefd`).

        Waits for what is still being read ahead. A second call does nothing.
        """
        # After a constructor that failed the file is closed, and there is no reader.
        if not self.closed:
            _lib.pio_reader_close(self._reader)
        io.FileIO.close(self)


class PacedReader(_Buffered):
    """A binary file for reading that reads ahead and leaves the page cache as it found it.

    Pages that were not resident before are dropped from the page cache behind the position, and those that were read
    ahead but not used when the file is closed; pages that were resident stay. At most 2.5 MiB are read ahead. Where
    the kernel does not say which pages are resident (a file that the caller neither owns nor may write; mincore(2)),
    and on anything but a regular file, reads are plain and nothing is dropped.

    Behaves as the io.BufferedReader that `open(file, "rb")` returns, and is none: see io.BufferedIOBase.

    Parameters as for `open`: `buffering` is the size of the user-space buffer in bytes, -1 for the default of 32 KiB.

    Raises OSError, with the file's name, for what the kernel says, and ValueError for a closed file.
    """

    _hot: ClassVar[tuple[str, ...]] = ("read", "read1", "readinto", "readline", "seek", "tell")
    _buffer: io.BufferedReader

    def __init__(
        self,
        file: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int,
        buffering: int = -1,
        *,
        closefd: bool = True,
        opener: Callable[[Any, int], int] | None = None,
    ) -> None:
        raw = RawReader(file, closefd, opener)
        try:
            buffer = io.BufferedReader(raw, _BUFFER if buffering < 0 else buffering)
        except BaseException:
            raw.close()
            raise
        super().__init__(raw, buffer)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes, fewer only at the end; up to the end for -1."""
        return self._buffer.read(size)

    def read1(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes with at most one system call, what is buffered first."""
        return self._buffer.read1(size)

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` and return how many bytes were read, fewer than it holds only at the end."""
        return self._buffer.readinto(buffer)

    def readinto1(self, buffer: Any, /) -> int:
        """Read into `buffer` with at most one system call and return how many bytes were read."""
        return self._buffer.readinto1(buffer)

    def peek(self, size: int = 0, /) -> bytes:
        """Return buffered bytes without moving the position, after at most one system call."""
        return self._buffer.peek(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read up to and with the next line feed, `size` bytes at most."""
        return self._buffer.readline(size)

    def readlines(self, hint: int = -1, /) -> list[bytes]:
        """Read lines up to the end, or until they hold `hint` bytes together."""
        return self._buffer.readlines(hint)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the position to `offset` bytes from the start (`whence` 0), the position (1) or the end (2), and
        return it.
        """
        return self._buffer.seek(offset, whence)

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._buffer.tell()
