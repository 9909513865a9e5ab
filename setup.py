"""The part of the build that pyproject.toml cannot say: the cffi extension, one abi3 build for Python 3.10 and
later, and one clear line where the compiler or a header is missing.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext


def _missing() -> str | None:
    """What to install before the extension can be built, or None."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not any(shutil.which(name) for name in (compiler, "cc", "gcc", "clang")):
        return "a C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)"
    return None


class BuildExt(build_ext):
    def run(self) -> None:
        missing = _missing()
        if missing:
            raise SystemExit(f"pacedio: to build its extension, install {missing}")
        super().run()


setup(
    cffi_modules=["csrc/build_ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
