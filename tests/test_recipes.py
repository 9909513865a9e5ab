"""Every block of docs/recipes.md, run as a program of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from machine import FileSystem, needs_cachestat, observed

MIB = 1 << 20
RECIPES = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
CONTENT = os.urandom(3_000_000)
NEEDED = {"numpy": ["numpy"], "pandas, pyarrow, Dask, zarr": ["pandas", "fsspec"]}


def recipes() -> dict[str, str]:
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", RECIPES.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    blocks = {title: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for title, text in found}
    return {title: "\n".join(code) for title, code in blocks.items()}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: -1 if self.path == "/cut" else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def database(path: Path, rows: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as made, made:
        made.execute("create table numbers (bytes blob)")
        made.executemany("insert into numbers values (?)", [(os.urandom(100_000),) for _ in range(rows)])


def run(title: str, directory: Path, url: str) -> tuple[int, str]:
    """The recipe's exit status, and what it said."""
    given = f"URL = {url!r}\nCONTENT = open('content', 'rb').read()\n"
    # What is left open in a recipe's own checks is the interpreter's to close.
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", given + recipes()[title]]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_there_are_recipes() -> None:
    assert len(recipes()) == 12
    assert all("assert" in code for code in recipes().values())


@pytest.mark.parametrize("title", recipes())
def test_a_recipe_runs(title: str, tmp_path: Path, url: str) -> None:
    for module in NEEDED.get(title, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    (tmp_path / "content").write_bytes(CONTENT)
    database(tmp_path / "app.db", 10)
    assert run(title, tmp_path, url) == (0, "")


def test_a_download_that_ends_early(tmp_path: Path, url: str) -> None:
    (tmp_path / "content").write_bytes(CONTENT)
    (tmp_path / "download").write_bytes(b"old")
    status, said = run("Downloads", tmp_path, f"{url}cut")
    assert status == 1
    assert said.endswith(f"EOFError: {url}cut ended 1 bytes early\n")
    assert (tmp_path / "download").read_bytes() == b"old"


@needs_cachestat
def test_a_database_is_dirty_a_step_at_a_time(ext4: FileSystem, url: str) -> None:
    (ext4.directory / "content").write_bytes(b"")
    database(ext4.directory / "app.db", 1000)
    with observed(ext4.directory / "big.db") as seen:
        assert run("sqlite3", ext4.directory, url) == (0, "")
    assert (ext4.directory / "big.db").stat().st_size > 90 * MIB
    assert 0 < seen["most"] <= 4 * MIB
