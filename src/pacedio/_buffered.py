"""What PacedReader and PacedWriter share: a binary file that hands its calls to one of io's own buffers.

Small reads and writes must cost what they cost in `io`, so the buffer over the raw file is one of io's, and its
methods are what callers call: an instance shadows the hot methods of its class with the buffer's bound methods,
and `f.read(n)` is then a C call with no Python frame in between. The methods of the class do the same for
subclasses' `super().read()`, for documentation and for type checkers.

The whole is no subclass of io.BufferedReader, io.BufferedWriter or io.FileIO: numpy takes those as leave to go
around their methods through the descriptor.

Whoever holds only the buffer (an iterator, a bound method taken from a file that was not kept) must be able to
go on. So a file that is garbage collected does not close its buffer; the buffer, collected after it, closes
itself.
"""

from __future__ import annotations

import io

TYPE_CHECKING = False  # typing is too slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO, ClassVar, NoReturn

    Buffer = io.BufferedReader[Any] | io.BufferedWriter[Any] | io.BufferedRandom

    class _Base(io.BufferedIOBase, BinaryIO):  # typeshed's io classes are both
        pass
else:
    _Base = io.BufferedIOBase


class _Buffered(_Base):
    """A binary file over `buffer`, which is over `raw`. Subclasses name in `_hot` the methods that instances take
    over from the buffer, and define every one of them as a plain delegate.
    """

    _hot: ClassVar[tuple[str, ...]] = ()
    _taken: ClassVar[tuple[str, ...]] = ()
    _finalizing = False  # IOBase's finalizer sets it before it calls close

    closed = False  # a plain attribute: io.TextIOWrapper reads it at each call

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A method that a further subclass overrides must be the one that is called.
        owner = next(base for base in cls.__mro__ if "_hot" in vars(base))
        cls._taken = tuple(name for name in cls._hot if getattr(cls, name) is getattr(owner, name))

    def __init__(self, raw: io.RawIOBase, buffer: Buffer) -> None:
        self._bind(raw, buffer)

    def _bind(self, raw: io.RawIOBase, buffer: Buffer) -> None:
        self._raw = raw
        self._buffer = buffer
        for name in self._taken:
            setattr(self, name, getattr(buffer, name))

    @property
    def raw(self) -> io.RawIOBase:
        """The unbuffered file below, an io.FileIO of the same descriptor."""
        return self._raw

    @property
    def name(self) -> Any:
        """The path or descriptor that the file was opened with."""
        return self._buffer.name

    @property
    def mode(self) -> str:
        """The mode of the unbuffered file, as io gives it."""
        return self._buffer.mode

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._buffer.fileno()

    def isatty(self) -> bool:
        """Return whether the file is a terminal."""
        return self._buffer.isatty()

    def readable(self) -> bool:
        """Return whether the file was opened for reading."""
        return self._buffer.readable()

    def writable(self) -> bool:
        """Return whether the file was opened for writing."""
        return self._buffer.writable()

    def seekable(self) -> bool:
        """Return whether the file can seek."""
        return self._buffer.seekable()

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._buffer.tell()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the position to `offset` bytes from the start (`whence` 0), the position (1) or the end (2), and
        return it.
        """
        return self._buffer.seek(offset, whence)

    def flush(self) -> None:
        """Hand the user-space buffer to the kernel; on a reader, nothing."""
        self._buffer.flush()

    def truncate(self, pos: int | None = None, /) -> int:
        """Set the size to `pos` bytes, by default the position, and return it."""
        return self._buffer.truncate(pos)

    def detach(self) -> io.RawIOBase:
        """Separate the unbuffered file and return it; this object is unusable afterwards."""
        return self._buffer.detach()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if not self._finalizing:
            self.closed = True
            self._buffer.close()

    def _dealloc_warn(self, source: object, /) -> None:
        # io.TextIOWrapper asks for its ResourceWarning here.
        self._buffer._dealloc_warn(source)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[bytes]:
        """Return an iterator over the lines."""
        if "readline" in self._taken and type(self).__next__ is io.BufferedIOBase.__next__:
            return iter(self._buffer)
        return super().__iter__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __repr__(self) -> str:
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        try:
            return f"<{kind} name={self.name!r}>"
        except (AttributeError, ValueError):  # a descriptor's wrapper without a name; detached
            return f"<{kind}>"
