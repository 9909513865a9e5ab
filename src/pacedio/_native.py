"""The only importer of the built extension: buffers in, `OSError` out."""

from __future__ import annotations

import os

try:
    from pacedio._ffi import ffi, lib
except ImportError as _error:  # a source tree without its build, or a build for something else
    raise ImportError(f"pacedio's extension is not built for this Python: {_error}; install pacedio with pip") from None

from pacedio.exceptions import WritebackError

__all__ = ["error", "ffi", "lib"]


def error(code: int, name: object = None, kind: type[OSError] = OSError) -> OSError:
    """The exception for a negative errno that the C side returned for the file `name`: `OSError` picks the subclass
    that goes with it, `WritebackError` and `SourceError` stay what they are.
    """
    message = os.strerror(-code)
    if kind is WritebackError:
        message += " (an earlier write did not reach the device)"
    return kind(-code, message) if name is None else kind(-code, message, name)
