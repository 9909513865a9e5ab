"""design.md: imports and includes go only down the list, never sideways or up, and each boundary has one door."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "pacedio"
CSRC = ROOT / "csrc"

# A module may import those of an earlier set. The package itself comes before the commands, which use it as anybody
# does; within cli, the commands share what is not one.
LAYERS = [
    {"exceptions", "pacing"},
    {"_native", "_buffered"},
    {"observe"},
    {"writer", "reader"},
    {"files", "_contents"},
    {"_batch"},
    {"copying"},
    {"aio", "archives", "handlers", "filesystem"},
    {"__init__"},
    {"cli", "cli.quoting", "cli.options", "cli.signals"},
    {"cli.display"},
    {"cli.*"},
]

# What a file of C may include of ours, beside its own header.
INCLUDES = {
    "pacedio.h": {"pacedio.cdef.h"},
    "sys": {"pacedio.h"},
    "window": {"pacedio.h"},
    "control": {"pacedio.h"},
    "disk": {"pacedio.h", "sys.h"},
    "share": {"pacedio.h", "sys.h", "control.h"},
    "device": {"pacedio.h", "sys.h", "control.h", "disk.h", "share.h"},
    "engine": {"pacedio.h", "sys.h"},
    "resident": {"pacedio.h", "sys.h"},
    "reader": {"pacedio.h", "sys.h"},
    "prealloc": {"pacedio.h", "sys.h"},
    "writer": {"pacedio.h", "sys.h", "window.h", "control.h", "device.h", "engine.h", "prealloc.h"},
    "copy": {"pacedio.h", "sys.h", "writer.h"},
}

# What an object file may leave to the C library, beside threads and locks. All else is a system call, or may make one.
PURE = {"memchr", "memcpy", "memmove", "memset", "memcmp", "__stack_chk_fail", "_GLOBAL_OFFSET_TABLE_"}
MEMORY = {"malloc", "calloc", "realloc", "posix_memalign", "free", "snprintf", "sigfillset"}
MEMORY |= {"strlen", "strstr", "strtoll", "strtoul", "strtoull"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
C_FILES = sorted([*CSRC.glob("*.c"), *CSRC.glob("*.h")])


def layer(module: str) -> int:
    names = {module, "cli.*"} if module.startswith("cli.") else {module}
    return next(number for number, modules in enumerate(LAYERS) if modules & names)


def imports(tree: ast.Module, package: list[str], known: set[str]) -> set[str]:
    """The modules of ours that are imported by one in `package`, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                found.add(whole if whole.removeprefix("pacedio.") in known else source)
    ours = {name.removeprefix("pacedio").removeprefix(".") for name in found if name.split(".")[0] == "pacedio"}
    return {name or "__init__" for name in ours}


def imports_of(module: str) -> set[str]:
    path = MODULES[module]
    package = ["pacedio", *path.relative_to(PACKAGE).parts[:-1]]
    return imports(ast.parse(path.read_text(encoding="utf-8")), package, {*MODULES, "_ffi"})


def test_the_parser_sees_every_form_of_import() -> None:
    source = """
import pacedio.writer, os
import pacedio
from pacedio import reader, open
from pacedio.files import wrap
from . import pacing, Pacing
from .exceptions import SourceError
def f():
    from ._ffi import lib
"""
    known = {"writer", "reader", "pacing", "files", "_ffi"}
    assert imports(ast.parse(source), ["pacedio"], known) == {
        *("writer", "__init__", "reader", "files", "pacing", "exceptions", "_ffi")
    }
    source = "from . import display; from .. import files; from ..pacing import Pacing"
    assert imports(ast.parse(source), ["pacedio", "cli"], {*known, "cli.display"}) == {"cli.display", "files", "pacing"}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_layer(module: str) -> None:
    assert layer(module) >= 0


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    targets = imports_of(module) - {"_ffi"}
    assert {target for target in targets if layer(target) >= layer(module)} == set()


def test_only_native_imports_the_extension() -> None:
    assert [module for module in MODULES if "_ffi" in imports_of(module)] == ["_native"]


def includes_of(path: Path) -> tuple[set[str], set[str]]:
    """Of ours, of the system."""
    text = path.read_text(encoding="utf-8")
    return (
        set(re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE)),
        set(re.findall(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>", text, re.MULTILINE)),
    )


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_includes_go_down_only(path: Path) -> None:
    ours, _ = includes_of(path)
    allowed = INCLUDES.get(path.name) or INCLUDES.get(path.stem, set()) | {f"{path.stem}.h"} - {path.name}
    assert ours <= allowed


@pytest.mark.parametrize("name", ["window", "control"])
def test_pure_files_include_no_header_of_system_calls(name: str) -> None:
    for path in (CSRC / f"{name}.c", CSRC / f"{name}.h"):
        if path.exists():
            assert includes_of(path)[1] <= {"stdint.h", "stddef.h", "string.h", "stdbool.h", "limits.h"}


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="needs cc and nm (binutils)")
@pytest.mark.parametrize("path", [path for path in C_FILES if path.suffix == ".c"], ids=lambda path: path.name)
def test_only_sys_makes_system_calls(path: Path, tmp_path: Path) -> None:
    """The compiled file is asked, not the source: what it needs from elsewhere is ours or harmless."""
    object_file = tmp_path / "x.o"
    subprocess.run(["cc", "-std=gnu11", "-O2", f"-I{CSRC}", "-c", path, "-o", object_file], check=True)
    output = subprocess.run(["nm", "-u", object_file], check=True, capture_output=True, text=True).stdout
    needed = {line.split()[-1] for line in output.splitlines()}
    # With _FORTIFY_SOURCE memcpy becomes __memcpy_chk.
    others = {re.sub(r"^__(\w+)_chk$", r"\1", name) for name in needed if not name.startswith("pio_")}
    if path.name == "sys.c":
        assert "fdatasync" in others
    elif path.name in ("window.c", "control.c"):
        assert others <= PURE
        assert "pio_sys_table" not in needed
    else:
        assert {name for name in others if not name.startswith("pthread_")} <= PURE | MEMORY
