"""docs/dask.md: several worker processes of a cluster share one budget for a disk, as seen from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Machine, needs_cachestat, observed

for module in ("dask", "distributed", "fsspec", "numpy"):
    pytest.importorskip(module)

MIB = 1 << 20
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "dask.md"


@needs_cachestat
def test_the_example_has_one_budget(machine: Machine, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    with machine.slow_disk() as slow:
        paths = [slow.directory / f"part-{part}.npy" for part in range(6)]
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
        assert all(path.stat().st_size > 64 * MIB for path in paths)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    assert len({process for process, _, _ in lines}) > 1
    assert {share for _, share, _ in lines} == {"host"}
    # Three that do not share would have three times as much.
    assert 0 < seen["most"] <= max(int(limit) for _, _, limit in lines) + MIB


def test_tables(tmp_path: Path) -> None:
    for module in ("pandas", "pyarrow", "dask.dataframe"):
        pytest.importorskip(module)
    script = """
import sys, dask.dataframe, distributed, pandas
if __name__ == "__main__":
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster):
            frame = dask.dataframe.from_pandas(pandas.DataFrame({"a": range(10_000)}), npartitions=4)
            options = {"limit": "2MiB", "atomic": True, "auto_mkdir": True}
            for protocol in ("file", "paced"):
                kept = options if protocol == "paced" else {"auto_mkdir": True}
                frame.to_parquet(f"{protocol}://{sys.argv[1]}/{protocol}", storage_options=kept)
            frame.to_csv(f"paced://{sys.argv[1]}/csv-*.csv", index=False, storage_options=options)
            for read in (
                dask.dataframe.read_parquet(f"paced://{sys.argv[1]}/paced"),
                dask.dataframe.read_csv(f"paced://{sys.argv[1]}/csv-*.csv"),
            ):
                assert read["a"].compute().tolist() == list(range(10_000))
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    subprocess.run([sys.executable, "script.py", tmp_path], cwd=tmp_path, check=True)
    made = [sorted((tmp_path / name).iterdir()) for name in ("file", "paced")]
    assert len(made[0]) >= 4
    assert [path.name for path in made[0]] == [path.name for path in made[1]]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]
