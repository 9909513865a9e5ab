"""The built extension, as far as type checkers can know it: see csrc/pacedio.cdef.h."""

from typing import Any

ffi: Any
lib: Any
