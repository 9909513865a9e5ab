"""The part of the build that pyproject.toml cannot say: the cffi extension, one abi3 build for Python 3.10 and
later, and one clear line where the compiler or a header is missing.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext


def _check() -> None:
    """Stops with what to install before the extension can be built."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    missing = None
    if not shutil.which(compiler):
        missing = f"a C compiler, {compiler} (Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc)"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python's headers (Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)"
    if missing:
        raise SystemExit(f"pacedio: to build its extension, install {missing}")


class Build(build):
    """The check comes first, so that pip does not bury its line below the whole build's."""

    def run(self) -> None:
        _check()
        super().run()


class BuildExt(build_ext):
    """An editable install runs this one only."""

    def run(self) -> None:
        _check()
        super().run()


setup(
    cffi_modules=["csrc/build_ffi.py:ffibuilder"],
    cmdclass={"build": Build, "build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
