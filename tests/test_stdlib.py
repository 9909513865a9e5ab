"""CPython's own tests, with pacedio in place of what they test (tests/stdlib)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent / "stdlib" / "run.py"


@pytest.mark.parametrize("module", ["shutil", "tarfile", "zipfile", "gzip", "bz2", "lzma"])
def test_the_standard_librarys_own_tests(module: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("test") is None or importlib.util.find_spec("test.test_shutil") is None:
        pytest.skip("this Python has no test package")
    done = subprocess.run(
        [sys.executable, RUN, f"test_{module}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
