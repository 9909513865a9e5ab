"""`import pacedio` is cheap because of what it does not load; how long it takes is measured in benchmarks/."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    *("anyio", "rich", "argparse", "logging", "cffi"),
    *("asyncio", "collections", "concurrent", "contextlib", "ctypes", "dataclasses", "datetime", "enum", "functools"),
    *("inspect", "json", "pathlib", "random", "re", "shutil", "signal", "socket", "subprocess", "tempfile"),
    *("threading", "typing", "typing_extensions", "weakref"),
}


def loaded(code: str) -> set[str]:
    code = f"{code}\nimport sys\nprint(*sys.modules)"
    output = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True).stdout
    return {name.split(".")[0] for name in output.split()}


def test_import_loads_nothing_heavy() -> None:
    # What the interpreter and the environment's .pth files load is not ours.
    ours = loaded("import pacedio") - loaded("")
    assert "pacedio" in ours
    assert ours & HEAVY == set()


@pytest.mark.parametrize("module", ["exceptions", "pacing"])
def test_lowest_layer_loads_nothing_at_all(module: str) -> None:
    # The package's __init__ comes first; it must not be what loaded a module that these would need.
    code = f"""
import importlib.util, os, sys
path = os.path.join(importlib.util.find_spec("pacedio").submodule_search_locations[0], "{module}.py")
spec = importlib.util.spec_from_file_location("{module}", path)
before = set(sys.modules)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
assert set(sys.modules) - before <= {{"__future__"}}, set(sys.modules) - before
"""
    loaded(code)


def test_import_warns_of_nothing() -> None:
    subprocess.run([sys.executable, "-I", "-W", "error", "-c", "import pacedio"], check=True)
