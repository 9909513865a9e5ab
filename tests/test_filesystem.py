"""pacedio.filesystem, through fsspec and those who write through it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import FileSystem, Machine, descriptors, needs_cachestat, observed, system_calls

import pacedio
from pacedio import Pacing

fsspec = pytest.importorskip("fsspec")
filesystem = pytest.importorskip("pacedio.filesystem")

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture(autouse=True)
def registered(tmp_path: Path) -> Iterator[None]:
    """As the installed package's entry point does."""
    fsspec.register_implementation("paced", filesystem.PacedFileSystem, clobber=True)
    filesystem.PacedFileSystem.clear_instance_cache()
    yield
    assert [opened for opened in descriptors() if str(tmp_path) in opened] == []


def test_a_url_is_a_file(tmp_path: Path) -> None:
    with fsspec.open(f"paced://{tmp_path}/file", "wb") as f:
        f.write(b"x" * MIB)
    assert (tmp_path / "file").read_bytes() == b"x" * MIB
    with fsspec.open(f"paced://{tmp_path}/file.gz", "wt", compression="infer", encoding="utf-8") as f:
        f.write("ä")
    with fsspec.open(f"paced://{tmp_path}/file.gz", "rt", compression="infer", encoding="utf-8") as f:
        assert f.read() == "ä"
    fs, path = fsspec.url_to_fs(f"paced://{tmp_path}/file", limit="2MiB", polite=True)
    assert (type(fs), path) == (filesystem.PacedFileSystem, f"{tmp_path}/file")
    assert fs.pacing == Pacing(limit="2MiB", polite=True)
    assert fs.cat(path) == b"x" * MIB
    assert fs.cat_file(path, start=-10) == b"x" * 10
    assert fs.unstrip_protocol(path) == f"paced://{tmp_path}/file"


def test_what_is_opened_is_pacedios(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced", limit="1MiB")
    with fs.open(f"{tmp_path}/file", "wb") as f:
        assert isinstance(f, pacedio.PacedWriter)
        f.write(bytes(8 * MIB))
    assert f.stats.most_in_flight <= MIB
    assert f.stats.sync_seconds > 0
    with fs.open(f"{tmp_path}/file", "rb") as f:
        assert isinstance(f, pacedio.PacedReader)
        assert f.size == 8 * MIB
    with fs.open(f"{tmp_path}/file", "ab") as f:
        f.write(b"y")
    with fs.open(f"{tmp_path}/file", "r+b") as f:
        f.write(b"z")
    assert (tmp_path / "file").read_bytes() == b"z" + bytes(8 * MIB - 1) + b"y"
    with fsspec.filesystem("paced", sync=False).open(f"{tmp_path}/other", "wb") as f:
        f.write(b"x")
    assert f.stats.sync_seconds == 0


def test_options() -> None:
    pacing = Pacing(rate="10MB/s")
    assert fsspec.filesystem("paced", pacing=pacing).pacing == pacing
    assert fsspec.filesystem("paced").pacing is None
    with pytest.raises(ValueError, match="not both: limit"):
        fsspec.filesystem("paced", pacing=pacing, limit="2MiB")
    with pytest.raises(TypeError, match="must be a Pacing"):
        fsspec.filesystem("paced", pacing="fast")
    with pytest.raises(ValueError, match="many"):
        fsspec.filesystem("paced", limit="many")
    again = pickle.loads(pickle.dumps(fsspec.filesystem("paced", limit="2MiB", sync=False)))
    assert (again.pacing, again.sync) == (Pacing(limit="2MiB"), False)


def test_atomic(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced", atomic=True)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), fs.open(str(path), "wb") as f:  # noqa: PT012
        f.write(b"new")
        raise KeyError
    assert path.read_bytes() == b"old"
    with fs.open(str(path), "wb") as f:
        f.write(b"new")
    assert path.read_bytes() == b"new"


def test_transactions(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced")
    (tmp_path / "a").write_bytes(b"old")
    with fs.transaction:
        for name in ("a", "b"):
            with fs.open(f"{tmp_path}/{name}", "wb") as f:
                f.write(b"new")
                assert (f.tell(), f.seek(0)) == (3, 0)
            with pytest.raises(ValueError, match="closed"):
                f.write(b"x")
        assert (tmp_path / "a").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["a"]
        with pytest.raises(ValueError, match="whole files"):
            fs.open(f"{tmp_path}/a", "ab")
    assert [(tmp_path / name).read_bytes() for name in "ab"] == [b"new", b"new"]
    with pytest.raises(KeyError), fs.transaction:  # noqa: PT012
        with fs.open(f"{tmp_path}/a", "wb") as f:
            f.write(b"never")
        raise KeyError
    assert (tmp_path / "a").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_copies_moves_and_removals(tmp_path: Path, ext4: FileSystem) -> None:
    fs = fsspec.filesystem("paced", auto_mkdir=True)
    (tmp_path / "tree" / "below").mkdir(parents=True)
    (tmp_path / "tree" / "below" / "file").write_bytes(os.urandom(MIB))
    top = str(ext4.directory / "new" / "tree")
    fs.put(f"{tmp_path}/tree/", top, recursive=True)
    assert (ext4.directory / "new/tree/below/file").read_bytes() == (tmp_path / "tree/below/file").read_bytes()
    fs.get(f"{top}/below/file", str(tmp_path / "got"))
    fs.cp(f"{top}/below/file", f"{top}/copied")
    fs.mv(f"{top}/copied", str(tmp_path / "moved"))
    with open(tmp_path / "object", "wb") as f:
        fs.get_file(f"{top}/below/file", f)
    for name in ("got", "moved", "object"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "tree/below/file").read_bytes()
    with pytest.raises(ValueError, match="recursive"):
        fs.rm(top)
    fs.rm([f"{top}/below/file", top], recursive=True)
    assert not os.path.exists(top)
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{top}/none")
    with pytest.raises(FileNotFoundError):
        fs.cp_file(f"{top}/none", str(tmp_path / "x"))
    fs.rm_file(str(tmp_path / "got"))
    assert not (tmp_path / "got").exists()


MAKES = """
import os, sys, fsspec
from pacedio.filesystem import PacedFileSystem
directory = sys.argv[1]
fs = PacedFileSystem(auto_mkdir=True)
open(os.path.join(directory, "begin"), "w").close()
with fs.open(directory + "/a/b/c/file", "wb") as f:
    f.write(b"x")
"""


def test_directories_that_are_made_are_durable(ext4: FileSystem, tmp_path: Path) -> None:
    calls = system_calls(MAKES, ext4.directory, log=tmp_path / "log")
    # The names a, b and c, each in the one above, and the file's own.
    assert len([call for call in calls if call.startswith("fsync(")]) == 4


@needs_cachestat
def test_what_is_in_flight_is_bounded(machine: Machine) -> None:
    with machine.mounted("ext4") as disk:
        path = disk.directory / "file"
        path.touch()
        with observed(path) as seen, fsspec.open(f"paced://{path}", "wb", limit="2MiB") as f:
            for _ in range(64):
                f.write(os.urandom(MIB))
        assert 0 < seen["most"] <= 2 * MIB + 64 * KIB


# ---- those who write through it ----


@pytest.fixture
def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    numpy = pytest.importorskip("numpy")
    choose = numpy.random.default_rng(1)
    columns = {"a": choose.random(200_000), "b": choose.integers(0, 9, 200_000), "c": ["x", "y"] * 100_000}
    return pandas.DataFrame(columns)


def test_pandas(frame: Any, tmp_path: Path) -> None:
    import pandas as pd

    frame.to_csv(tmp_path / "plain.csv")
    frame.to_csv(f"paced://{tmp_path}/paced.csv")
    assert (tmp_path / "paced.csv").read_bytes() == (tmp_path / "plain.csv").read_bytes()
    frame.to_csv(f"paced://{tmp_path}/paced.csv.gz", storage_options={"limit": "2MiB"})
    assert len(pd.read_csv(f"paced://{tmp_path}/paced.csv.gz")) == len(frame)
    frame.to_pickle(f"paced://{tmp_path}/paced.pickle")
    pd.testing.assert_frame_equal(pd.read_pickle(f"paced://{tmp_path}/paced.pickle"), frame)


# pyarrow leaves it to the garbage collector to close what it reads.
leaves_open = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@leaves_open
def test_parquet(frame: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    frame.to_parquet(tmp_path / "plain.parquet")
    frame.to_parquet(f"paced://{tmp_path}/paced.parquet")
    assert (tmp_path / "paced.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()
    pd.testing.assert_frame_equal(pd.read_parquet(f"paced://{tmp_path}/paced.parquet"), frame)


@leaves_open
def test_pyarrow(frame: Any, tmp_path: Path) -> None:
    pa, dataset = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.dataset")
    handler = pytest.importorskip("pyarrow.fs")
    fs = handler.PyFileSystem(handler.FSSpecHandler(fsspec.filesystem("paced", auto_mkdir=True)))
    table = pa.Table.from_pandas(frame)
    dataset.write_dataset(table, f"{tmp_path}/set", format="parquet", filesystem=fs, partitioning=["b"])
    assert dataset.dataset(f"{tmp_path}/set", filesystem=fs, partitioning=["b"]).count_rows() == len(frame)


def test_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="2")
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(10**6).reshape(1000, 1000)
    if int(zarr.__version__.split(".")[0]) >= 3:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        fs = AsyncFileSystemWrapper(fsspec.filesystem("paced", auto_mkdir=True), asynchronous=True)
        store: Any = zarr.storage.FsspecStore(fs, path=f"{tmp_path}/z")
    else:
        store = zarr.storage.FSStore(f"paced://{tmp_path}/z", auto_mkdir=True)
    made = zarr.open(store=store, mode="w", shape=array.shape, chunks=(500, 500), dtype=array.dtype)
    made[:] = array
    assert (zarr.open(store=store, mode="r")[:] == array).all()
    assert (tmp_path / "z").is_dir()
