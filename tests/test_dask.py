"""docs/dask.md: several worker processes of a cluster share one budget for a disk, as seen from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Machine, needs_cachestat, observed

pytest.importorskip("distributed")
pytest.importorskip("dask")

MIB = 1 << 20
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "dask.md"


@needs_cachestat
def test_the_example_has_one_budget(machine: Machine, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    with machine.slow_disk() as slow:
        paths = [slow.directory / f"part-{part}" for part in range(6)]
        for path in paths:
            path.touch()
        with observed(*paths) as seen:
            done = subprocess.run(
                [sys.executable, "example.py"],
                cwd=tmp_path,
                env={**os.environ, "TARGET": str(slow.directory)},
                capture_output=True,
                text=True,
                check=True,
            )
        assert all(path.stat().st_size == 64 * MIB for path in paths)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    assert len({process for process, _, _ in lines}) > 1
    assert {share for _, share, _ in lines} == {"host"}
    # Three that do not share would have three times as much.
    assert 0 < seen["most"] <= max(int(limit) for _, _, limit in lines) + MIB
