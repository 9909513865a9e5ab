"""From a descriptor to a paced file."""

from __future__ import annotations

import errno

from pacedio._native import error, ffi, lib
from pacedio.exceptions import SourceError
from pacedio.writer import keep_cap

TYPE_CHECKING = False  # typing is too slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from pacedio.writer import PacedWriter

# Threads that read ahead. One read at a time leaves the device idle between two of them; more than a few only queue.
_READERS = 4


def copy_contents(
    source: int,
    target: PacedWriter,
    *,
    source_name: object = None,
    progress: Callable[[int], object] | None = None,
    sparse: bool = True,
) -> int:
    """Copy what the descriptor `source` holds, from its beginning to its end, to the position of `target`.

    Reading runs ahead of the paced writing in threads, and leaves the source's pages in the page cache as they were:
    those that were resident stay, no others are left behind. Where the kernel does not tell which were (mincore(2)
    answers only who owns the file or may write it), none are released.

    :param source: a descriptor open for reading. Its position afterwards is unspecified.
    :param target: not synced by this. It must not be closed or moved by another thread meanwhile.
    :param source_name: what to name in a `SourceError`.
    :param progress: called with the number of bytes that the copy moved on, holes included, at most one window or one
        hole at a time. What it raises ends the copy.
    :param sparse: leave holes where the source has some (lseek(2), SEEK_DATA) and where `target` has no bytes yet.
    :returns: the bytes copied, holes included.
    :raises SourceError: reading failed. What precedes the failure in the source was written.
    :raises OSError: writing failed; `WritebackError` where bytes accepted earlier were lost.

    Where `target` allocates ahead (`Pacing`, `preallocate`), the blocks of what is to be copied are allocated at once,
    holes excepted, and what is left over is released at the end.

    The source is opened again for reading, and closed: that releases the fcntl(2) record locks that this process holds
    on it, as closing any descriptor of a file does.

    A source that shrinks meanwhile ends the copy early. One that grows is followed, as long as it grew by at most half
    of what was copied meanwhile: at most twice the size found at the beginning is copied. Pipes, devices and files of
    size 0 (as in /proc) are read until they end.
    """
    handle = ffi.gc(lib.pio_copy_new(source, target._native_writer(), _READERS, sparse), lib.pio_copy_free)
    if handle == ffi.NULL:
        raise MemoryError
    copied = 0
    try:
        while True:
            keep_cap()
            moved = int(lib.pio_copy_step(handle))
            if moved > 0:
                copied += moved
                if progress is not None:
                    progress(moved)
            elif moved == 0:
                return copied
            elif lib.pio_copy_source_failed(handle):
                raise error(moved, source_name, SourceError)
            elif moved != -errno.EINTR:  # before the next step Python runs the signal's handler
                target._raw.refuse(moved)
    finally:
        ffi.release(handle)
        target._raw.catch_up()
