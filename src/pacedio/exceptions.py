"""What the kernel's refusals are called. Both are `OSError`, with `errno` and `filename`; a misuse is `ValueError` or
`TypeError` instead.
"""

from __future__ import annotations


class WritebackError(OSError):
    """Bytes accepted earlier did not reach the device.

    The kernel reports such an error at a later start, wait or sync, and only once for a descriptor (fsync(2)), so the
    writer remembers it: it has *failed*, and every later call but `close` raises the error again. Nothing retries a
    failed sync, because the kernel has marked the lost pages clean and would report success.
    """


class SourceError(OSError):
    """Reading the source of a copy failed; an error of the target is any other `OSError`."""
