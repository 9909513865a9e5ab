"""pacedio.filesystem, through fsspec and those who write through it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import gzip
import os
import pickle
import re
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import SameFileError, SpecialFileError
from typing import Any

import pytest
from machine import FileSystem, Machine, descriptors, needs_cachestat, observed, system_calls

import pacedio
from pacedio import Pacing

fsspec = pytest.importorskip("fsspec")
url_to_fs = pytest.importorskip("fsspec.core").url_to_fs
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
    fs, path = url_to_fs(f"paced://{tmp_path}/file", limit="2MiB", polite=True)
    assert (type(fs), path) == (filesystem.PacedFileSystem, f"{tmp_path}/file")
    assert fs.pacing == Pacing(limit="2MiB", polite=True)
    assert fs.cat(path) == b"x" * MIB
    assert fs.cat_file(path, start=-10) == b"x" * 10
    assert fs.unstrip_protocol(path) == f"paced://{tmp_path}/file"


def test_paths_are_those_of_local_files() -> None:
    local, paced = fsspec.get_filesystem_class("file"), filesystem.PacedFileSystem
    for path in ("/a/b", "a/b", "./a", "a/", "/", "~/a", ".", Path("/a")):
        assert paced._strip_protocol(path) == local._strip_protocol(path)
    for path in ("/a/b", "a/b", "", "/"):
        assert paced._strip_protocol(f"paced://{path}") == local._strip_protocol(f"file://{path}")
    assert paced._strip_protocol("paced:/a") == "/a"


def test_the_installed_package_says_what_paced_is() -> None:
    script = "import fsspec; print(fsspec.get_filesystem_class('paced'))"
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert told == f"{filesystem.PacedFileSystem}\n"


def test_a_reader_can_be_sent_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with fsspec.filesystem("paced").open(f"{tmp_path}/file") as f:
        f.seek(4)
        with pickle.loads(pickle.dumps(f)) as again:
            assert (again.read(), again.size, f.read(1)) == (b"456789", 10, b"4")


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


# ---- files that replace others ----


def test_atomic(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced", atomic=True)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for mode, options in (("wb", {}), ("w", {}), ("wb", {"compression": "gzip"}), ("w", {"compression": "bz2"})):
        with pytest.raises(KeyError), fs.open(str(path), mode, **options) as f:  # noqa: PT012
            f.write("new" if mode == "w" else b"new")
            raise KeyError
        assert path.read_bytes() == b"old"
        del f
    with fs.open(str(path), "wb") as f:
        f.write(b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "source").write_bytes(b"x" * MIB)
    with pytest.raises(ZeroDivisionError):
        fs.put_file(f"{tmp_path}/source", str(path), callback=Callback(fails=True))
    assert path.read_bytes() == b"new"
    fs.put_file(f"{tmp_path}/source", str(path))
    assert path.read_bytes() == b"x" * MIB
    with pytest.raises(SameFileError):
        fs.cp_file(str(path), str(path))
    fs.put(f"{tmp_path}/source", f"{tmp_path}/other")
    assert (tmp_path / "other").read_bytes() == b"x" * MIB
    assert sorted(os.listdir(tmp_path)) == ["file", "other", "source"]


@pytest.mark.parametrize("compression", ["gzip", "bz2", "xz", "zip"])
@pytest.mark.parametrize("options", [{}, {"atomic": True}])
def test_what_is_compressed_is_closed_with_what_compresses(
    compression: str, options: dict[str, Any], tmp_path: Path
) -> None:
    fs = fsspec.filesystem("paced", **options)
    path = f"{tmp_path}/file"
    with fs.open(path, "wb", compression=compression) as f:
        f.write(b"a\nb\n" * 1000)
    assert f.paced.closed
    assert f.stats.sync_seconds > 0
    with fs.open(path, "rb", compression=compression) as f:
        assert (f.readline(), f.read()) == (b"a\n", b"b\n" + b"a\nb\n" * 999)
    assert f.paced.closed
    with fs.open(path, "w", compression=compression, encoding="utf-8", newline="") as f:
        f.write("ä\r\n")
    with fs.open(path, compression=compression) as f:
        assert f.read() == "ä\r\n".encode()


def test_what_is_compressed_and_fails(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced")
    with pytest.raises(KeyError), fs.open(f"{tmp_path}/file", "w", compression="gzip") as f:  # noqa: PT012
        f.write("what was written stays")
        raise KeyError
    with fs.open(f"{tmp_path}/file", "r", compression="gzip") as f:
        assert f.read() == "what was written stays"
    with pytest.raises(LookupError):
        fs.open(f"{tmp_path}/file", "r", compression="gzip", encoding="none of them")
    with pytest.raises(OSError, match=re.escape("[Errno 28]")), fs.open("/dev/full", "wb", compression="gzip") as f:
        f.write(os.urandom(MIB))
    assert f.paced.closed


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_garbage_replaces_nothing(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced", atomic=True)
    for mode in ("wb", "w"):
        fs.open(f"{tmp_path}/file", mode, compression="gzip").write("x" if mode == "w" else b"x")
        gc.collect()
    fs.open(f"{tmp_path}/file", "wb", autocommit=False).write(b"x")
    filesystem.PacedFileSystem.clear_instance_cache()
    del fs
    gc.collect()
    assert os.listdir(tmp_path) == []


# ---- transactions ----


def test_a_transaction(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced")
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o640)
    os.symlink("a", tmp_path / "link")
    with fs.transaction:
        for name in ("link", "b"):
            with fs.open(f"{tmp_path}/{name}", "wb") as f:
                f.write(b"new")
                assert (f.tell(), f.seek(0)) == (3, 0)
            with pytest.raises(ValueError, match="closed"):
                f.write(b"x")
        with fs.open(f"{tmp_path}/a.gz", "wt", compression="gzip", encoding="utf-8") as f:
            f.write("packed")
        with fsspec.open(f"paced://{tmp_path}/c.gz", "wt", compression="infer") as f:
            f.write("packed")
        fs.put_file(f"{tmp_path}/a", f"{tmp_path}/copy")
        fs.open(f"{tmp_path}/open", "wb").write(b"not closed")
        assert fs.cat(f"{tmp_path}/a") == b"old"
        assert {name for name in os.listdir(tmp_path) if not name.startswith(".")} == {"a", "link"}
        with pytest.raises(ValueError, match="whole files"):
            fs.open(f"{tmp_path}/a", "ab")
        with pytest.raises(ValueError, match="whole files"):
            fs.open(f"{tmp_path}/a", "r+b")
        with fs.open(f"{tmp_path}/a", "r") as f:
            assert f.read() == "old"
    names = ["a", "a.gz", "b", "c.gz", "copy", "link", "open"]
    assert sorted(os.listdir(tmp_path)) == names
    assert [(tmp_path / name).read_bytes() for name in ("a", "b", "copy")] == [b"new", b"new", b"old"]
    assert [gzip.decompress((tmp_path / name).read_bytes()) for name in ("a.gz", "c.gz")] == [b"packed"] * 2
    assert (tmp_path / "open").read_bytes() == b"not closed"
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    with pytest.raises(KeyError), fs.transaction:  # noqa: PT012
        fs.pipe({f"{tmp_path}/{name}": b"never" for name in "abx"})
        fs.open(f"{tmp_path}/y", "wb").write(b"never")
        raise KeyError
    assert sorted(os.listdir(tmp_path)) == names
    assert (tmp_path / "a").read_bytes() == b"new"
    fs.pipe(f"{tmp_path}/a", b"after")
    assert (tmp_path / "a").read_bytes() == b"after"


def test_a_transaction_without_a_block(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced")
    fs.start_transaction()
    fs.pipe(f"{tmp_path}/a", b"a")
    fs.end_transaction()
    assert os.listdir(tmp_path) == ["a"]
    one, other = (fs.open(f"{tmp_path}/{name}", "wb", autocommit=False) for name in "bc")
    one.write(b"b")
    other.write(b"c")
    other.close()
    one.commit()
    other.discard()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "b").read_bytes() == b"b"


def test_a_file_is_left_out_of_its_transaction(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced")
    with fs.transaction:
        fs.pipe(f"{tmp_path}/a", b"a")
        for mode in ("wb", "w"):
            with contextlib.suppress(KeyError), fs.open(f"{tmp_path}/b", mode) as f:
                f.write("b" if mode == "w" else b"b")
                raise KeyError
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_that_is_there_by_then(tmp_path: Path) -> None:
    fs = fsspec.filesystem("paced")
    with pytest.raises(FileExistsError, match=re.escape(f"{tmp_path}/b'")), fs.transaction:  # noqa: PT012
        with fs.open(f"{tmp_path}/a", "xb") as f:
            f.write(b"a")
        with fs.open(f"{tmp_path}/b", "xb") as f:
            f.write(b"b")
        (tmp_path / "b").write_bytes(b"another's")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "b").read_bytes() == b"another's"
    with fs.transaction, pytest.raises(FileExistsError):
        fs.open(f"{tmp_path}/a", "xb")


@pytest.mark.parametrize("sync", [True, False])
def test_a_transaction_has_more_files_than_may_be_open(sync: bool, file_system: FileSystem) -> None:
    fs = fsspec.filesystem("paced", auto_mkdir=True, sync=sync)
    names = [f"{file_system.directory}/{i % 7}/{i}" for i in range(600)]

    def write(name: str) -> None:
        with fs.open(name, "wb") as f:
            f.write(name.encode())

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        with fs.transaction, concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(write, names))
            assert fs.find(str(file_system.directory)) != names
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(fs.find(str(file_system.directory))) == sorted(names)
    assert all(fs.cat(name) == name.encode() for name in names)


@pytest.mark.parametrize("caught", [True, False])
def test_nothing_of_a_transaction_that_could_not_be_written(caught: bool, machine: Machine) -> None:
    with machine.failing_disk() as disk:
        fs = fsspec.filesystem("paced")

        def write(path: str) -> None:
            with contextlib.closing(fs.open(path, "wb")) as f:  # which closes it as pandas does, whatever happened
                for _ in range(64):
                    f.write(os.urandom(MIB))

        with pytest.raises(OSError, match=re.escape(f"{disk.directory}/big")) as raised, fs.transaction:  # noqa: PT012
            fs.pipe(f"{disk.directory}/small", b"x")
            with contextlib.suppress(OSError) if caught else contextlib.nullcontext():
                write(f"{disk.directory}/big")
        assert raised.value.errno in (errno.EIO, errno.ENOSPC)
        assert set(os.listdir(disk.directory)) <= {"lost+found"}


COMMITS = """
import os, sys
from pacedio.filesystem import PacedFileSystem
directory = sys.argv[1]
fs = PacedFileSystem()
with fs.transaction:
    fs.pipe({f"{directory}/{i}": b"x" for i in range(3)})
    open(os.path.join(directory, "begin"), "w").close()
"""


def test_all_is_durable_before_the_first_has_its_name(ext4: FileSystem, tmp_path: Path) -> None:
    calls = system_calls(COMMITS, ext4.directory, log=tmp_path / "log")
    kinds = [call.split("(")[0] for call in calls]
    calls = [kind for kind in kinds if kind in ("fdatasync", "fsync", "rename")]
    assert calls == ["fdatasync"] * 3 + ["rename"] * 3 + ["fsync"]


def test_a_forked_child_leaves_a_transaction_to_its_parent(tmp_path: Path) -> None:
    script = """
import os, sys, fsspec
from pacedio.filesystem import PacedFileSystem
directory = sys.argv[1]
fs = PacedFileSystem()
with fs.transaction:
    fs.pipe(f"{directory}/a", b"a")
    f = fs.open(f"{directory}/b", "wb")
    f.write(b"b")
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        assert not os.path.exists(f"{directory}/a")
        f.write(b"b")
        f.close()
assert child or sorted(name[0] for name in os.listdir(directory)) == ["."]
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "b").read_bytes() == b"bb"


# ---- copies, moves, removals ----


class Callback(fsspec.Callback):  # type: ignore[misc]
    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        if self.fails:
            raise ZeroDivisionError


def test_copies_moves_and_removals(tmp_path: Path, ext4: FileSystem) -> None:
    fs = fsspec.filesystem("paced", auto_mkdir=True)
    content = os.urandom(MIB)
    (tmp_path / "tree" / "below").mkdir(parents=True)
    (tmp_path / "tree" / "below" / "file").write_bytes(content)
    top = str(ext4.directory / "new" / "tree")
    fs.put(f"{tmp_path}/tree/", top, recursive=True)
    assert (ext4.directory / "new/tree/below/file").read_bytes() == content
    fs.get(f"{top}/below/file", str(tmp_path / "got"))
    fs.get(f"{top}/", str(tmp_path / "all"), recursive=True)
    fs.cp(f"{top}/below/file", f"{top}/copied")
    fs.mv(f"{top}/copied", str(tmp_path / "moved"))
    with open(tmp_path / "object", "wb") as f:
        fs.get_file(f"{top}/below/file", f)
    with open(tmp_path / "object", "rb") as f:
        fs.put_file(f, f"{tmp_path}/from-object")
    for name in ("got", "moved", "object", "from-object", "all/below/file"):
        assert (tmp_path / name).read_bytes() == content
    with pytest.raises(ValueError, match="recursive"):
        fs.rm(top)
    fs.rm([f"{top}/below/file", top], recursive=True)
    assert not os.path.exists(top)
    with pytest.raises(FileNotFoundError, match=re.escape(f"{top}/none")):
        fs.rm(f"{top}/none")
    with pytest.raises(FileNotFoundError, match=re.escape(f"{top}/none")):
        fs.cp_file(f"{top}/none", str(tmp_path / "x"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SpecialFileError, match="fifo"):
        fs.cp_file(str(tmp_path / "fifo"), str(tmp_path / "x"))
    with pytest.raises(SpecialFileError, match="/dev/zero"):
        fs.cp_file("/dev/zero", str(tmp_path / "x"))
    fs.rm_file(str(tmp_path / "got"))
    assert not (tmp_path / "got").exists()
    os.symlink(tmp_path / "tree", tmp_path / "link")
    fs.rm(str(tmp_path / "link"))
    assert (tmp_path / "tree" / "below").is_dir()
    here = os.getcwd()
    os.chdir(tmp_path / "tree")
    try:
        with pytest.raises(ValueError, match="current working directory"):
            fs.rm(str(tmp_path / "tree"), recursive=True)
    finally:
        os.chdir(here)


def test_progress_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * MIB))
    for fs in (fsspec.filesystem("paced"), fsspec.filesystem("paced", atomic=True)):
        callback = Callback()
        fs.put_file(f"{tmp_path}/a", f"{tmp_path}/b", callback=callback)
        assert (callback.size, callback.value) == (3 * MIB, 3 * MIB)


PUTS = """
import os, sys
from pacedio.filesystem import PacedFileSystem
source, target, atomic = sys.argv[1:]
fs = PacedFileSystem(atomic=atomic == "True")
open(os.path.join(target, "begin"), "w").close()
fs.put(source + "/", target, recursive=True)
"""


@pytest.mark.parametrize("atomic", [True, False])
def test_many_are_made_durable_together(atomic: bool, ext4: FileSystem, tmp_path: Path) -> None:
    (tmp_path / "source" / "below").mkdir(parents=True)
    for name in ("a", "b", "c", "below/d", "below/e"):
        (tmp_path / "source" / name).write_bytes(b"x" * 5000)
    calls = system_calls(PUTS, tmp_path / "source", ext4.directory, atomic, log=tmp_path / "log")
    kinds = [call.split("(")[0] for call in calls]
    assert [kind for kind in kinds if kind in ("fdatasync", "fsync")] == ["fdatasync"] * 5 + ["fsync"] * 2
    assert (ext4.directory / "below" / "e").read_bytes() == b"x" * 5000


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


def test_directories_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become nobody")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as top:
        os.chown(top, 65534, -1)
        os.chmod(top, 0o300)
        os.seteuid(65534)
        try:
            fsspec.filesystem("paced").makedirs(f"{top}/a/b")
            assert os.path.isdir(f"{top}/a/b")
        finally:
            os.seteuid(0)


# ---- those who write through it ----

ROWS = 4_000_000  # 64 MiB, which no codec makes smaller


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


def test_pandas_in_a_transaction(frame: Any, tmp_path: Path) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise KeyError

    (tmp_path / "a.csv").write_bytes(b"old")
    fs = fsspec.filesystem("paced")
    with pytest.raises(KeyError), fs.transaction:  # noqa: PT012
        frame["c"] = frame["c"].astype(object)
        frame.loc[100_000, "c"] = Unprintable()
        frame.to_csv(f"paced://{tmp_path}/a.csv")
    assert (tmp_path / "a.csv").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.csv"]
    with fs.transaction:
        frame[["a"]].to_csv(f"paced://{tmp_path}/a.csv")
    assert (tmp_path / "a.csv").read_bytes() == frame[["a"]].to_csv().encode()


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
    parquet = pytest.importorskip("pyarrow.parquet")
    handler = pytest.importorskip("pyarrow.fs")
    paced = fsspec.filesystem("paced", auto_mkdir=True)
    fs = handler.PyFileSystem(handler.FSSpecHandler(paced))
    table = pa.Table.from_pandas(frame)
    dataset.write_dataset(table, f"{tmp_path}/set", format="parquet", filesystem=fs, partitioning=["b"])
    assert dataset.dataset(f"{tmp_path}/set", filesystem=fs, partitioning=["b"]).count_rows() == len(frame)
    parquet.write_table(table, tmp_path / "plain.parquet")
    parquet.write_table(table, f"{tmp_path}/paced.parquet", filesystem=paced)
    assert (tmp_path / "paced.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()
    fs.copy_file(f"{tmp_path}/paced.parquet", f"{tmp_path}/copy.parquet")
    fs.move(f"{tmp_path}/copy.parquet", f"{tmp_path}/moved.parquet")
    assert parquet.read_table(f"{tmp_path}/moved.parquet", filesystem=paced) == table
    fs.delete_dir(f"{tmp_path}/set")
    assert sorted(os.listdir(tmp_path)) == ["moved.parquet", "paced.parquet", "plain.parquet"]


def zarr_store(zarr: Any, directory: str, **options: Any) -> Any:
    if int(zarr.__version__.split(".")[0]) >= 3:
        return zarr.storage.FsspecStore.from_url(directory, storage_options={"auto_mkdir": True, **options})
    return zarr.storage.FSStore(directory, auto_mkdir=True, **options)


def test_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="2")
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(10**6).reshape(1000, 1000)
    made = {}
    for name, store in (("plain", f"{tmp_path}/plain"), ("paced", zarr_store(zarr, f"paced://{tmp_path}/paced"))):
        z = zarr.open(store=store, mode="w", shape=array.shape, chunks=(500, 500), dtype=array.dtype)
        z[:] = array
        top = tmp_path / name
        made[name] = {path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    assert len(made["paced"]) >= 5
    assert made["paced"] == made["plain"]
    assert (zarr.open(store=zarr_store(zarr, f"paced://{tmp_path}/paced"), mode="r")[:] == array).all()


def by_fsspec(url: str) -> None:
    with fsspec.open(url, "wb", limit="2MiB") as f:
        for _ in range(64):
            f.write(os.urandom(MIB))


def by_copying(url: str) -> None:
    fs, path = url_to_fs(url, limit="2MiB")
    with tempfile.NamedTemporaryFile() as source:
        for _ in range(64):
            source.write(os.urandom(MIB))
        source.flush()
        fs.put(source.name, path)


def by_numpy(url: str) -> None:
    numpy = pytest.importorskip("numpy")
    with fsspec.open(url, "wb", limit="2MiB") as f:
        numpy.save(f, numpy.random.default_rng(1).random(2 * ROWS))


def by_pandas(url: str) -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    random = numpy.random.default_rng(1).random
    frame = pandas.DataFrame({name: random(ROWS) for name in "ab"})
    frame.to_parquet(url, storage_options={"limit": "2MiB"}, compression=None)


def by_pyarrow(url: str) -> None:
    numpy, pa = pytest.importorskip("numpy"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    fs, path = url_to_fs(url, limit="2MiB")
    table = pa.table({name: numpy.random.default_rng(1).random(ROWS) for name in "ab"})
    parquet.write_table(table, path, filesystem=fs, use_dictionary=False)


def by_zarr(url: str) -> None:
    zarr, numpy = pytest.importorskip("zarr", minversion="3"), pytest.importorskip("numpy")
    store = zarr_store(zarr, url.removesuffix("/c/0"), limit="2MiB")
    z = zarr.create_array(store=store, shape=(2 * ROWS,), chunks=(2 * ROWS,), dtype="f8", compressors=None)
    z[:] = numpy.random.default_rng(1).random(2 * ROWS)


@needs_cachestat
@pytest.mark.parametrize("write", [by_fsspec, by_copying, by_numpy, by_pandas, by_pyarrow, by_zarr])
def test_what_is_in_flight_is_bounded(write: Callable[[str], None], ext4: FileSystem) -> None:
    path = ext4.directory / "file" / "c" / "0"  # the one chunk of zarr's array
    path.parent.mkdir(parents=True)
    with observed(path) as seen:
        write(f"paced://{path}")
    assert path.stat().st_size >= 60 * MIB
    assert 0 < seen["most"] <= 2 * MIB + 64 * KIB
