"""Runs CPython's own tests with pacedio in place of what they test:  python tests/stdlib/run.py [MODULE...]

Each module is run twice, in processes of their own: as it is, and with the stdlib's names replaced by pacedio's. What
fails only then is compared with the expectations below; each says why it is a deliberate difference. A module whose
tests did not go through pacedio at all fails as well.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import io
import json
import subprocess
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = ("test_shutil", "test_tarfile", "test_zipfile", "test_gzip", "test_bz2", "test_lzma")
SECONDS = 600

# Which tests may fail, by a part of their id, and why.
EXPECTED: dict[str, dict[str, str]] = {
    "test_shutil": {
        "TestCopyFile.test_w_": "puts an open of its own into shutil's namespace, where ours is not looked up",
        "TestZeroCopySendfile.": "counts calls of os.sendfile, which cannot be paced and is not used",
        "test_rmtree_fails_on_close": "counts calls of os.close, of which the look for big files makes some",
    },
    "test_tarfile": {},
    "test_zipfile": {},
    "test_gzip": {},
    "test_bz2": {},
    "test_lzma": {},
}

uses: collections.Counter[str] = collections.Counter()


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        uses[name] += 1
        return function(*arguments, **named)

    call.__name__ = call.__qualname__ = name
    call.__dict__.update(vars(function))
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


class Proxy(types.ModuleType):
    """A module with some of its names replaced, for those who look them up here; setting one sets the module's."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.__dict__["_module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_module"], name)


def paced_open(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
    import pacedio

    return pacedio.open(file, mode, *arguments, **named, **({} if mode in ("r", "rb") else {"sync": False}))


def replace(name: str, module: types.ModuleType) -> None:
    opened = counted("open", paced_open)
    if name == "test_shutil":
        import shutil

        from pacedio import copying

        names = ("copyfileobj", "copyfile", "copy", "copy2", "copytree", "move", "rmtree")
        functions = {each: counted(each, getattr(copying, each)) for each in names}
        functions["copy2"] = copying.copy2  # which copytree compares its argument with
        module.shutil = Proxy(shutil, **functions)  # type: ignore[attr-defined]
        if hasattr(module, "rmtree"):
            module.rmtree = functions["rmtree"]
    elif name == "test_tarfile":
        import tarfile

        tarfile.bltn_open = opened  # type: ignore[attr-defined]
    elif name == "test_zipfile":
        import zipfile

        zipfile.io = Proxy(io, open=opened)  # type: ignore[attr-defined]
    elif name == "test_bz2":
        import bz2

        bz2._builtin_open = opened  # type: ignore[attr-defined]
    else:
        compression = importlib.import_module(name.removeprefix("test_"))
        import builtins

        compression.builtins = Proxy(builtins, open=opened)  # type: ignore[attr-defined]


def run_here(name: str, paced: bool) -> dict[str, Any]:
    """Run the module's tests in this process."""
    module = importlib.import_module(f"test.{name}")
    modules = [module]
    if hasattr(module, "__path__"):  # a package of tests since Python 3.12
        modules = [importlib.import_module(f"test.{name}.test_core")]
    if paced:
        for each in modules:
            replace(name, each)
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromModule(each) for each in modules)
    ids = names(suite)
    result = unittest.TextTestRunner(io.StringIO(), verbosity=0).run(suite)
    bad = {test.id(): text for test, text in [*result.failures, *result.errors]}
    for each in result.unexpectedSuccesses:
        bad[each.id()] = "unexpected success"
    return {"run": result.testsRun, "ids": ids, "bad": bad, "uses": dict(uses)}


def names(tests: Any) -> list[str]:
    return [name for each in tests for name in (names(each) if isinstance(each, unittest.TestSuite) else [each.id()])]


def run(name: str, paced: bool) -> dict[str, Any]:
    """Run them in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--here", name, *(["--paced"] if paced else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, stdin=subprocess.DEVNULL
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{name}: the tests ended with {done.returncode}\n{done.stdout}\n{done.stderr}") from None
    return found


def judge(name: str) -> tuple[str, list[str]]:
    """A line that says what was run, and what is wrong."""
    plain, paced = run(name, False), run(name, True)
    wrong = []
    if sum(paced["uses"].values()) == 0:
        wrong.append("nothing went through pacedio")
    if paced["run"] != plain["run"]:
        wrong.append(f"{paced['run']} tests were run instead of {plain['run']}")
    met = set()
    for test, text in paced["bad"].items():
        if test in plain["bad"]:
            continue
        reason = next((part for part in EXPECTED[name] if part in test), None)
        if reason is None:
            wrong.append(f"{test}\n{text}")
        met.add(reason)
    here = [part for part in EXPECTED[name] if any(part in test for test in paced["ids"])]  # in this Python's version
    wrong += [f"expected to fail, and does not: {part}" for part in here if part not in met]
    line = f"{name}: {paced['run']} tests, {len(met - {None})} deliberate differences, went through {paced['uses']}"
    return line, wrong


def main() -> int:
    if sys.argv[1:2] == ["--here"]:
        name, paced = sys.argv[2], sys.argv[3:] == ["--paced"]
        with contextlib.redirect_stdout(sys.stderr):
            found = run_here(name, paced)
        print(json.dumps(found), flush=True)
        return 0
    if importlib.util.find_spec("test.test_shutil") is None:
        print("this Python has no test package (Debian, Ubuntu: apt-get install libpython3-testsuite)", file=sys.stderr)
        return 1
    failed = False
    for name in sys.argv[1:] or MODULES:
        line, wrong = judge(name)
        print(line)
        for each in wrong:
            print(f"  {each}")
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    sys.exit(main())
