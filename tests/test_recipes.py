"""Every block of docs/recipes.md, run as a program of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

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
        self.wfile.write(CONTENT)

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


def test_there_are_recipes() -> None:
    assert len(recipes()) == 10
    assert all("assert" in code for code in recipes().values())


@pytest.mark.parametrize("title", recipes())
def test_a_recipe_runs(title: str, tmp_path: Path, url: str) -> None:
    for module in NEEDED.get(title, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    (tmp_path / "content").write_bytes(CONTENT)
    given = f"URL = {url!r}\nCONTENT = open('content', 'rb').read()\n"
    # What is left open in a recipe's own checks is the interpreter's to close.
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", given + recipes()[title]]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
