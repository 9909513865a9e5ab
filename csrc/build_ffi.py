"""Declares the extension `pacedio._ffi` to setuptools (through cffi's `cffi_modules`)."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent

# Paths relative to the project's root, where setuptools builds; absolute ones would end up in the sdist.
SOURCES = [
    "csrc/sys.c",
    "csrc/window.c",
    "csrc/control.c",
    "csrc/disk.c",
    "csrc/share.c",
    "csrc/device.c",
    "csrc/engine.c",
    "csrc/prealloc.c",
    "csrc/writer.c",
    "csrc/resident.c",
    "csrc/reader.c",
    "csrc/copy.c",
]

ffibuilder = FFI()
ffibuilder.cdef((HERE / "pacedio.cdef.h").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "pacedio._ffi",
    '#include "pacedio.h"',
    sources=SOURCES,
    include_dirs=["csrc"],
    libraries=["pthread"],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
