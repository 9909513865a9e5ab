from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator

import pytest
from machine import KINDS, FileSystem, Machine

# A shell starts what runs in its background with SIGINT ignored, and all that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with Machine(tmp_path_factory.getbasetemp()) as made:
        yield made


class Mounts(contextlib.ExitStack):
    """One file system of each kind a session, mounted when first asked for."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._mounted: dict[str, FileSystem] = {}
        self._number = 0

    @contextlib.contextmanager
    def directory(self, kind: str) -> Iterator[FileSystem]:
        """A new directory in it, removed afterwards with all that is in it."""
        if kind not in self._mounted:
            self._mounted[kind] = self.enter_context(self._machine.mounted(kind))
        self._number += 1
        inside = self._mounted[kind].within(f"test-{self._number}")
        inside.directory.mkdir()
        try:
            yield inside
        finally:
            shutil.rmtree(inside.directory)


@pytest.fixture(scope="session")
def mounts(machine: Machine) -> Iterator[Mounts]:
    with Mounts(machine) as made:
        yield made


@pytest.fixture(params=KINDS)
def file_system(request: pytest.FixtureRequest, mounts: Mounts) -> Iterator[FileSystem]:
    """Each kind of file system in turn."""
    with mounts.directory(request.param) as made:
        yield made


@pytest.fixture
def ext4(mounts: Mounts) -> Iterator[FileSystem]:
    with mounts.directory("ext4") as made:
        yield made


@pytest.fixture
def overlayfs(mounts: Mounts) -> Iterator[FileSystem]:
    with mounts.directory("overlayfs") as made:
        yield made
