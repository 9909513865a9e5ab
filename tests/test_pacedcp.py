"""pacedcp beside the real cp: the same messages, exit status and files; and what pacedcp promises beyond that."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pty
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import FileSystem, Machine

from pacedio.cli.pacedcp import _Settings
from pacedio.pacing import POLITE

PACEDCP = os.path.join(os.path.dirname(sys.executable), "pacedcp")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "POSIXLY_CORRECT"} | {"LC_ALL": "C.UTF-8"}
MIB = 1 << 20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

Outcome = tuple[int, bytes, bytes]


def run(*words: str | bytes | Path, cwd: Path, env: dict[str, str] | None = None, umask: int = 0o022) -> Outcome:
    done = subprocess.run(
        words, cwd=cwd, env=ENVIRONMENT | (env or {}), umask=umask, capture_output=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def pacedcp(*words: str | bytes | Path, cwd: Path, env: dict[str, str] | None = None) -> Outcome:
    return run(PACEDCP, *words, cwd=cwd, env=env)


def tree(root: Path) -> dict[bytes, tuple[object, ...]]:
    """What cp is to reproduce of a directory: not the times, which tests of -p look at."""
    found: dict[bytes, tuple[object, ...]] = {}
    for directory, names, files in os.walk(os.fsencode(root)):
        for name in names + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as f:
                    content = hashlib.sha256(f.read()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            identity = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size)
            found[os.path.relpath(path, os.fsencode(root))] = (*identity, content)
    return found


# ---- beside the real cp -----------------------------------------------------------------------------------------


def populate(root: Path) -> None:
    (root / "a").write_bytes(b"the content of a\n")
    (root / "b").write_bytes(b"another content, and a longer one\n")
    (root / "big").write_bytes(hashlib.sha256(b"big").digest() * (3 * MIB // 32))
    (root / "empty").touch()
    (root / "executable").write_bytes(b"#!/bin/sh\n")
    (root / "executable").chmod(0o755)
    (root / "secret").write_bytes(b"secret\n")
    (root / "secret").chmod(0o600)
    (root / "setuid").write_bytes(b"")
    (root / "setuid").chmod(0o6755)
    (root / "readonly").write_bytes(b"old\n")
    (root / "readonly").chmod(0o444)
    (root / "d").mkdir()
    (root / "d2").mkdir()
    (root / "d2" / "a").write_bytes(b"d2/a\n")
    (root / "d3" / "a").mkdir(parents=True)
    (root / "to-d").symlink_to("d")
    (root / "to-a").symlink_to("a")
    (root / "also-to-a").symlink_to("a")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    os.link(root / "a", root / "a-linked")
    (root / "it's").write_bytes(b"it's\n")
    (root / "two\nlines").write_bytes(b"two\nlines\n")
    with open(os.fsencode(root) + b"/\xff\xfe", "wb") as f:
        f.write(b"not UTF-8\n")
    (root / "é").write_bytes(b"accent\n")
    with open(root / "sparse", "wb") as f:
        f.seek(MIB)
        f.write(b"in the middle")
        f.truncate(4 * MIB)
    for name in ("a", "b", "executable", "secret"):
        os.utime(root / name, ns=(1_000_000_000_123_456_789, 1_100_000_000_987_654_321))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories with the same in them, one for each command."""
    roots = tmp_path / "cp", tmp_path / "pacedcp"
    for root in roots:
        root.mkdir()
        populate(root)
    return roots


def comparable(stderr: bytes) -> bytes:
    """Newer releases also name the file that is no directory."""
    return re.sub(rb"(cannot overwrite directory .* with non-directory) '.*'\n", rb"\1\n", stderr)


def assert_same(
    pair: tuple[Path, Path],
    arguments: Sequence[str | bytes],
    *,
    prefix: Sequence[str] = (),
    env: dict[str, str] | None = None,
    umask: int = 0o022,
) -> Outcome:
    theirs, ours = pair
    status, stdout, stderr = run(*prefix, "cp", *arguments, cwd=theirs, env=env, umask=umask)
    expected = (status, stdout, comparable(re.sub(rb"(?m)^cp: |(?<=')cp(?= --help)", rename, stderr)))
    found = run(*prefix, PACEDCP, *arguments, cwd=ours, env=env, umask=umask)
    assert found == expected
    assert tree(ours) == tree(theirs)
    return found


def rename(match: re.Match[bytes]) -> bytes:
    return match[0].replace(b"cp", b"pacedcp")


CASES = """
a new
a b
big new
empty new
empty b
sparse new
sparse b
executable new
secret new
setuid new
secret b
a executable
a d
a d/
a d//
a d/new
a to-d
a b d
a b d/
a/ new
to-a new
a to-a
a a
a a-linked
a to-a
to-a a
to-a also-to-a
a a-linked d
a ./a
a d/../a
a dangling
dangling new
loop new
a loop
-f a loop
-fv a loop
-f a a
-f a dangling
-v a new
-v a b d
-v a nosuch b d
-t d a b
-td a b
-vtd a b
--target-directory=d a b
--target-directory d a b
--target=d a
-t nosuch a
-t b a
-t d -t d a
-t d
-t
-T a d
-T a new
-T a b
-T a b d
-T -t d a
-T a new/
-T a
--no-target a new
a -T new
a new -v
a d --target-directory=d2
-- a new
-- -v new
a
d new
d a
d d2
d a d2
/ new
. d
a d3
d2/a a d
a d2/a d
a a d
a ./a d
a d2/../a d
a nosuch d
nosuch new
nosuch d
a nosuch/
a nosuch/new
a b/
a b/new
a b nosuch
a b a
a b b/new
/dev/null new
/dev/null b
a /dev/null
a /dev/full
big /dev/full
/proc/self/status/x new
it's new
it's it's
it's d/nosuch/x
é d/nosuch/x
é new
--x
--x=y a
-X
-vX a new
--s a new
--no a new
--ver
--verbose=1 a b
--target-directory
--help=x
""".strip().split("\n")


@pytest.mark.parametrize("arguments", CASES)
def test_same_as_cp(pair: tuple[Path, Path], arguments: str) -> None:
    assert_same(pair, arguments.split(" "))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["", "new"],
        ["a", ""],
        ["a", "b", ""],
        ["-t", "", "a"],
        ["two\nlines", "d"],
        ["-v", "two\nlines", "d/new\tname"],
        ["two\nlines", "two\nlines"],
        ["nosuch\nline", "d"],
        [b"\xff\xfe", "d"],
        ["-v", b"\xff\xfe", b"d/\xfe"],
        [b"\xff\xfe", b"\xff\xfe"],
        [b"\xfe", "d"],
        ["-v", b"\xff\xfe", "two\nlines", "it's", "é", "d"],
    ],
)
def test_same_with_strange_names(pair: tuple[Path, Path], arguments: list[str | bytes]) -> None:
    assert_same(pair, arguments)


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077, 0o777])
@pytest.mark.parametrize("option", ["-v", "-p"])
def test_mode_and_umask(pair: tuple[Path, Path], umask: int, option: str) -> None:
    if umask == 0o777 and os.geteuid() != 0:
        pytest.skip("only root may compare files of mode 000")
    names = ["a", "executable", "secret", "setuid", "readonly"]
    assert_same(pair, [option, *names, "d"], umask=umask)


def test_default_acl(pair: tuple[Path, Path]) -> None:
    if not shutil.which("setfacl"):
        pytest.skip("setfacl is not installed")
    for root in pair:
        if subprocess.run(["setfacl", "-d", "-m", "u::rwx,g::r-x,o::---", root / "d"], check=False).returncode:
            pytest.skip("no ACLs here")
    assert_same(pair, ["a", "executable", "d"], umask=0o000)


@pytest.mark.parametrize("target", ["new", "b", "readonly"])
def test_preserve(pair: tuple[Path, Path], target: str) -> None:
    outcomes = []
    for command, root in zip(["cp", PACEDCP], pair, strict=True):
        if os.geteuid() == 0:
            os.chown(root / "secret", 1234, 2345)
        outcome = run(command, "-p", "secret", target, cwd=root)
        copy = (root / target).stat()
        outcome = (*outcome[:2], re.sub(rb"(?m)^cp: ", b"pacedcp: ", outcome[2]))
        outcomes.append((outcome, copy.st_mode, copy.st_uid, copy.st_gid, copy.st_atime_ns, copy.st_mtime_ns))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][-2:] == (1_000_000_000_123_456_789, 1_100_000_000_987_654_321)


def test_times_are_new_without_preserve(pair: tuple[Path, Path]) -> None:
    assert pacedcp("a", "new", cwd=pair[1])[0] == 0
    assert (pair[1] / "new").stat().st_mtime_ns > 1_600_000_000_000_000_000


@pytest.mark.parametrize(
    "arguments",
    [
        "secret new",
        "a readonly",
        "-f a readonly",
        "-fv a readonly",
        "a closed/new",
        "a closed",
        "-f a closed/b",
        "-fv a closed/b",
        "closed/b new",
        "-p foreign new",
        "-p foreign b",
        "foreign new",
    ],
)
@as_root
def test_without_privileges(pair: tuple[Path, Path], arguments: str) -> None:
    """Root without capabilities: permission bits hold, and chown is refused."""
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is not installed")
    for root in pair:
        (root / "secret").chmod(0o000)
        (root / "closed").mkdir()
        (root / "closed" / "b").write_bytes(b"b\n")
        (root / "closed" / "b").chmod(0o444)
        (root / "closed").chmod(0o555)
        (root / "foreign").write_bytes(b"foreign\n")
        (root / "foreign").chmod(0o6755)
        os.chown(root / "foreign", 1234, 2345)
    assert_same(pair, arguments.split(" "), prefix=["setpriv", "--bounding-set=-all", "--inh-caps=-all"])


@as_root
def test_preserve_as_a_user(pair: tuple[Path, Path]) -> None:
    """Only root is told that the owner could not be kept; the set-ID bits are dropped then."""
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is not installed")
    for root in pair:
        os.chown(root / "setuid", 1234, 2345)
        (root / "d").chmod(0o777)
    # Who may read everything, because the interpreter may lie where only root can look.
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    user += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    assert_same(pair, ["-p", "setuid", "d"], prefix=user)
    assert (pair[1] / "d" / "setuid").stat().st_uid == 65534


def test_posixly_correct(pair: tuple[Path, Path]) -> None:
    posix = {"POSIXLY_CORRECT": "1"}
    assert_same(pair, ["a", "dangling"], env=posix)
    assert (pair[1] / "nowhere").read_bytes() == (pair[1] / "a").read_bytes()
    assert_same(pair, ["a", "-v", "d"], env=posix)


def test_target_directory_through_a_dangling_link(pair: tuple[Path, Path]) -> None:
    for root in pair:
        (root / "d" / "a").symlink_to("../nowhere")
    assert_same(pair, ["a", "d"])
    assert_same(pair, ["a", "d"], env={"POSIXLY_CORRECT": "1"})
    assert (pair[1] / "nowhere").read_bytes() == (pair[1] / "a").read_bytes()


def test_fifo_is_read(pair: tuple[Path, Path]) -> None:
    for root in pair:
        os.mkfifo(root / "fifo")

        def feed(path: Path = root / "fifo") -> None:
            with open(path, "wb") as f:
                f.write(b"through a pipe " * 10_000)

        threading.Thread(target=feed, daemon=True).start()
    assert_same(pair, ["fifo", "new"])
    assert (pair[1] / "new").read_bytes() == b"through a pipe " * 10_000


def test_socket_is_refused(pair: tuple[Path, Path]) -> None:
    import socket

    for root in pair:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(root / "socket"))
    assert_same(pair, ["socket", "new"])


def test_proc_file_of_size_0_is_read_to_its_end(tmp_path: Path) -> None:
    assert os.stat("/proc/version").st_size == 0
    assert pacedcp("/proc/version", "new", cwd=tmp_path) == (0, b"", b"")
    assert (tmp_path / "new").read_text() == Path("/proc/version").read_text()


def test_holes_are_kept(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as f:
        f.seek(200 * MIB)
        f.write(b"x" * MIB)
        f.truncate(400 * MIB)
    if (tmp_path / "sparse").stat().st_blocks * 512 > 10 * MIB:
        pytest.skip("no holes here")
    assert pacedcp("sparse", "new", cwd=tmp_path) == (0, b"", b"")
    copy = (tmp_path / "new").stat()
    assert copy.st_size == 400 * MIB
    assert copy.st_blocks * 512 <= 2 * MIB
    assert subprocess.run(["cmp", "sparse", "new"], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("arguments", ["-v a new", "--help", "--version", "nosuch new", "a new"])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_closed_and_full_outputs(pair: tuple[Path, Path], arguments: str, redirection: str) -> None:
    theirs, ours = pair
    script = f'"$0" {arguments} {redirection}'
    status, stdout, stderr = run("sh", "-c", script, "cp", cwd=theirs)
    found = run("sh", "-c", script, PACEDCP, cwd=ours)
    assert (found[0], found[2]) == (status, stderr.replace(b"cp:", b"pacedcp:"))
    assert found[1] == stdout or arguments in ("--help", "--version")
    assert tree(ours) == tree(theirs)


@pytest.mark.parametrize(
    "arguments",
    [
        "/dev/stdin new <&-",
        "/dev/stdin a <&-",
        "/dev/stdin /dev/stdin a <&-",
        "a /dev/stdout >&-",
        "-f a /dev/stdout >&-",
        "a b /dev/stdout >&-",
    ],
)
def test_what_is_closed_is_no_file(pair: tuple[Path, Path], arguments: str) -> None:
    assert_same(pair, [], prefix=["sh", "-c", f'"$0" {arguments}'])


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("arguments", ["-v a new", "--help", "big /dev/stdout", "nosuch new"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_broken_pipe(pair: tuple[Path, Path], arguments: str, stream: str) -> None:
    outcomes = []
    for command, root in zip(["cp", PACEDCP], pair, strict=True):
        with pipe_without_reader() as broken:
            stdout, stderr = (broken, subprocess.DEVNULL) if stream == "stdout" else (subprocess.DEVNULL, broken)
            words = [command, *arguments.split()]
            done = subprocess.run(words, cwd=root, env=ENVIRONMENT, stdout=stdout, stderr=stderr, check=False)
            outcomes.append(done.returncode)
    assert outcomes[0] == outcomes[1]


def test_nothing_is_said_of_a_broken_pipe(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    with pipe_without_reader() as broken:
        words = [PACEDCP, "-v", "a", "new"]
        done = subprocess.run(words, cwd=tmp_path, stdout=broken, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
    assert os.listdir(tmp_path) == ["a"]


# ---- what is pacedcp's own --------------------------------------------------------------------------------------


def test_runs_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    assert run(sys.executable, "-m", "pacedio.cli.pacedcp", "a", "new", cwd=tmp_path) == (0, b"", b"")
    assert (tmp_path / "new").read_bytes() == b"bytes"


def test_help_and_version(tmp_path: Path) -> None:
    status, stdout, stderr = pacedcp("--help", cwd=tmp_path)
    assert (status, stderr) == (0, b"")
    assert stdout.startswith(b"Usage: pacedcp [OPTION]... [-T] SOURCE DEST\n")
    assert max(map(len, stdout.split(b"\n"))) <= 80
    import pacedio

    assert pacedcp("--version", cwd=tmp_path) == (0, f"pacedcp (pacedio) {pacedio.__version__}\n".encode(), b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "12 parsecs"], "not a size: '12 parsecs'"),
        (["--limit=-1"], "'-1'"),
        (["--limit="], "''"),
        (["--limit=0"], "'0'"),
        (["--window=1000"], "'1000'"),
        (["--window=2M", "--limit=1M"], "'2M' > '1M'"),
        (["--window=99999999999999999999"], "'99999999999999999999'"),
        (["--rate", "fast"], "not a rate: 'fast'"),
        (["--rate=0"], "'0'"),
        (["--engine=diesel"], "'diesel'"),
        (["--engine=two\nlines"], "'two\\nlines'"),
    ],
)
def test_bad_values(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "a").write_bytes(b"a")
    status, stdout, stderr = pacedcp(*arguments, "a", "new", cwd=tmp_path)
    assert (status, stdout) == (1, b"")
    assert re.fullmatch(rf"pacedcp: .*{re.escape(message)}.*\n", stderr.decode())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["-r", "--recursive", "--preserve=all", "-b", "-a", "--sparse=never"])
def test_options_of_cp_that_are_missing(tmp_path: Path, option: str) -> None:
    (tmp_path / "a").write_bytes(b"a")
    status, stdout, stderr = pacedcp(option, "a", "new", cwd=tmp_path)
    assert (status, stdout) == (1, b"")
    assert re.fullmatch(rb"pacedcp: cp's option '--?[a-z]+' is not supported\nTry .*\n", stderr)
    assert not (tmp_path / "new").exists()


def test_nothing_is_said_when_all_is_well(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * MIB)
    assert pacedcp("--no-sync", "--keep-cache", "a", "new", cwd=tmp_path) == (0, b"", b"")
    assert (tmp_path / "new").read_bytes() == b"a" * MIB


def test_stats(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(8 * MIB))
    (tmp_path / "two\nlines").write_bytes(b"x")
    (tmp_path / "d").mkdir()
    options = ["--stats", "--limit=1MiB", "--window=256KiB", "--engine=datasync"]
    status, stdout, stderr = pacedcp(*options, "a", "two\nlines", "d", cwd=tmp_path)
    assert (status, stdout) == (0, b"")
    number = r"[\d.]+( [KMGT]i?B| B)"
    line = (
        rf"{number} in \d+\.\d+ s, {number}/s, at most (?P<most>{number}) in flight \(limit 1 MiB\), "
        r"stalled \d+\.\d+ s, "
        r"final sync \d+\.\d+ s, engine (?P<engine>\w+)( \((?P<reason>.+)\))?"
    )
    first, second = stderr.decode().splitlines()
    found = re.fullmatch(rf"'d/a': {line}", first)
    assert found
    assert found["engine"] in ("datasync", "none")
    assert found["reason"]
    assert re.fullmatch(rf"'d/two'\$'\\n''lines': {line}", second)


@pytest.mark.parametrize("options", [[], ["--limit=auto", "--window=auto"], ["--limit=auto", "--window=64KiB"]])
@pytest.mark.parametrize("polite", [True, False])
def test_a_limit_that_follows_the_device(tmp_path: Path, ext4: FileSystem, options: list[str], polite: bool) -> None:
    """The small file has no part in that."""
    content = os.urandom(24 * MIB)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"x")
    if polite:
        options = [*options, "--polite"]
    status, stdout, stderr = pacedcp("--stats", *options, "a", "b", str(ext4.directory), cwd=tmp_path)
    assert (status, stdout) == (0, b"")
    assert (ext4.directory / "a").read_bytes() == content
    size, time = r"[\d.]+ [KMG]?i?B", r"[\d.]+ m?s"
    big, small = stderr.decode().splitlines()
    assert re.search(
        rf"at most {size} in flight( \(limit now {size} by (device|cgroup)(: {size}/s, {time})?\))?, stalled", big
    )
    assert re.search(r"at most [\d.]+ KiB in flight, stalled", small)


def test_polite_is_the_idle_class_and_gives_way() -> None:
    settings = _Settings()
    assert settings.read(["--polite", "a", "b"]) is None
    assert settings.pacing() == POLITE


@pytest.mark.parametrize("engine", ["auto", "uncached", "range", "advise", "datasync", "none"])
def test_engines(tmp_path: Path, engine: str) -> None:
    content = os.urandom(5 * MIB + 17)
    (tmp_path / "a").write_bytes(content)
    assert pacedcp("--engine", engine, "a", "new", cwd=tmp_path) == (0, b"", b"")
    assert (tmp_path / "new").read_bytes() == content


@pytest.mark.parametrize("more", range(9))
def test_few_descriptors(tmp_path: Path, more: int) -> None:
    (tmp_path / "a").write_bytes(os.urandom(3 * MIB))
    script = f"""
import resource, sys
from pacedio.cli.pacedcp import main
resource.setrlimit(resource.RLIMIT_NOFILE, ({3 + more},) * 2)
sys.exit(main())
"""
    status, _, stderr = run(sys.executable, "-c", script, "--progress", "a", "new", cwd=tmp_path)
    if status == 0:
        assert (tmp_path / "new").read_bytes() == (tmp_path / "a").read_bytes()
    else:
        assert (status, stderr.count(b"\n")) == (1, 1)
        assert stderr.startswith(b"pacedcp: ")
        assert stderr.endswith(b"Too many open files\n")
        assert os.listdir(tmp_path) == ["a"]
    assert status == 0 or more < 8


def test_source_that_cannot_be_read(pair: tuple[Path, Path]) -> None:
    """What cp leaves of a new file then, we remove."""
    theirs, ours = pair
    before = tree(ours)
    status, _, stderr = run("cp", "/proc/self/mem", "new", cwd=theirs)
    assert pacedcp("/proc/self/mem", "new", cwd=ours) == (status, b"", b"paced" + stderr) == (1, b"", b"paced" + stderr)
    assert tree(ours) == before


@as_root
def test_full_disk(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(8 * MIB))
    (tmp_path / "small").write_bytes(b"small")
    with machine.mounted("tmpfs", 4 * MIB) as full:
        status, stdout, stderr = pacedcp("big", "small", full.directory, cwd=tmp_path)
        assert (status, stdout) == (1, b"")
        name = f"{full.directory}/big"
        assert stderr.decode() == f"pacedcp: error writing '{name}': {os.strerror(errno.ENOSPC)}\n"
        assert sorted(os.listdir(full.directory)) == ["small"]


@as_root
def test_full_disk_leaves_an_old_file_where_it_is(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(8 * MIB))
    with machine.mounted("tmpfs", 4 * MIB) as full:
        (full.directory / "big").write_bytes(b"old")
        assert pacedcp("big", full.directory, cwd=tmp_path)[0] == 1
        assert os.listdir(full.directory) == ["big"]


@as_root
def test_disk_that_fails_under_writeback(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(40 * MIB))
    with machine.failing_disk() as failing:
        status, _, stderr = pacedcp("big", failing.directory, cwd=tmp_path)
        assert status == 1
        assert re.match(rb"pacedcp: error (writing|syncing) '.*/big': .+\n$", stderr)
        assert not (failing.directory / "big").exists()


@as_root
def test_copy_survives_a_power_cut(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(5 * MIB))
    (tmp_path / "b").write_bytes(b"b")
    os.utime(tmp_path / "b", (1, 1))
    (tmp_path / "b").chmod(0o640)
    copy = tmp_path / "disk"
    with machine.mounted("ext4") as disk:
        (disk.directory / "d").mkdir()
        os.sync()
        assert pacedcp("-p", "a", "b", disk.directory / "d", cwd=tmp_path) == (0, b"", b"")
        disk.cut_power(copy)
    with machine.remounted("ext4", copy) as disk:
        assert (disk.directory / "d" / "a").read_bytes() == (tmp_path / "a").read_bytes()
        b = disk.directory / "d" / "b"
        assert (b.read_bytes(), stat.S_IMODE(b.stat().st_mode), b.stat().st_mtime) == (b"b", 0o640, 1)


@pytest.mark.parametrize("option", ["--no-sync", "--keep-cache"])
def test_what_is_synced(tmp_path: Path, option: str) -> None:
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    (tmp_path / "a").write_bytes(os.urandom(MIB))
    trace = ["strace", "-f", "-o", "trace", "-e", "trace=fsync,fdatasync,sync,syncfs"]
    assert run(*trace, PACEDCP, option, "a", "target", cwd=tmp_path) == (0, b"", b"")
    calls = re.findall(r"\b(fsync|fdatasync|sync|syncfs)\(", (tmp_path / "trace").read_text())
    assert calls == ([] if option == "--no-sync" else ["fdatasync", "fsync"])


# ---- signals ----------------------------------------------------------------------------------------------------


@contextmanager
def slow_copy(root: Path, *arguments: str, **how: object) -> Iterator[subprocess.Popen[bytes]]:
    """A copy of `source` that takes minutes, and has begun to write `target`."""
    if not (root / "source").exists():
        (root / "source").write_bytes(os.urandom(64 * MIB))
    words = [PACEDCP, "--rate=1MB/s", *arguments, "source", "target"]
    process = subprocess.Popen(words, cwd=root, env=ENVIRONMENT, stderr=subprocess.PIPE, **how)  # type: ignore[call-overload]
    try:
        wait_for(lambda: process.poll() is not None or has_begun(root / "target"))
        yield process
    finally:
        process.kill()
        process.communicate()


def has_begun(target: Path) -> bool:
    return target.exists() and target.stat().st_size >= 512 << 10


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_removes_what_the_copy_created(tmp_path: Path, number: signal.Signals) -> None:
    with slow_copy(tmp_path) as process:
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (-number, b"")
    assert os.listdir(tmp_path) == ["source"]


def test_signal_leaves_a_file_that_existed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    inode = (tmp_path / "target").stat().st_ino
    with slow_copy(tmp_path) as process:
        process.terminate()
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (-signal.SIGTERM, b"")
    assert (tmp_path / "target").stat().st_ino == inode
    with open(tmp_path / "source", "rb") as source:
        assert source.read((tmp_path / "target").stat().st_size) == (tmp_path / "target").read_bytes()


def test_signal_leaves_a_file_that_took_the_name_meanwhile(tmp_path: Path) -> None:
    with slow_copy(tmp_path) as process:
        (tmp_path / "other").write_bytes(b"not the copy's")
        os.replace(tmp_path / "other", tmp_path / "target")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
    assert (tmp_path / "target").read_bytes() == b"not the copy's"


def test_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with slow_copy(tmp_path, preexec_fn=ignore) as process:
        process.send_signal(signal.SIGHUP)
        size = (tmp_path / "target").stat().st_size
        wait_for(lambda: process.poll() is not None or (tmp_path / "target").stat().st_size > size + MIB // 2)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
    assert os.listdir(tmp_path) == ["source"]


def test_signal_while_waiting_for_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    process = subprocess.Popen([PACEDCP, "fifo", "target"], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    with process:
        # Opening it for writing returns when the command has it open for reading.
        with open(tmp_path / "fifo", "wb"):
            wait_for((tmp_path / "target").exists)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (-signal.SIGINT, b"")
    assert os.listdir(tmp_path) == ["fifo"]


@pytest.mark.parametrize("size", [4096, 16 * MIB])  # a single piece, and several
def test_signal_while_the_source_hangs(machine: Machine, tmp_path: Path, size: int) -> None:
    with machine.hanging_file(size) as source:
        process = subprocess.Popen([PACEDCP, source, "target"], cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            wait_for((tmp_path / "target").exists)
            time.sleep(0.2)  # so that it hangs; that it does not yet would not make the test fail
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
            assert (process.returncode, stderr) == (-signal.SIGINT, b"")
        finally:
            process.kill()
            process.communicate()
    assert os.listdir(tmp_path) == []


@as_root
def test_signal_to_the_first_process_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(4 * MIB))
    # Which is spared the signals that it does not handle. There it is process 1; it tells us which one it is here.
    script = 'readlink /proc/self >&2; exec "$0" --rate=1MB/s source target'
    words = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script, PACEDCP]
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE) as unshare:
        try:
            wait_for(lambda: has_begun(tmp_path / "target"))
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGINT)
            unshare.communicate(timeout=60)
        finally:
            unshare.kill()
        assert unshare.returncode == 128 + signal.SIGINT
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("module", ["pacedio", "pacedio._ffi", "pacedio.files", "pacedio.cli.display"])
def test_signal_during_start_up(tmp_path: Path, module: str) -> None:
    hook = f"""
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    found = pacedcp(
        "sitecustomize.py", "new", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert found == (-signal.SIGINT, b"", b"")
    assert os.listdir(tmp_path) == ["sitecustomize.py"]


def test_signal_during_start_up_that_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    script = """
import os, signal, sys
from _pacedio_commands import pacedcp
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.addaudithook(lambda event, arguments: event == "import" and os.kill(os.getpid(), signal.SIGINT))
sys.exit(pacedcp())
"""
    assert run(sys.executable, "-c", script, "a", "new", cwd=tmp_path) == (0, b"", b"")
    assert (tmp_path / "new").read_bytes() == b"bytes"


# ---- progress ---------------------------------------------------------------------------------------------------


def in_terminal(root: Path, *arguments: str, columns: int = 80) -> tuple[int, str]:
    """Exit status, and what appeared on a terminal that is standard error."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment["TERM"] = "xterm"
    process = subprocess.Popen([PACEDCP, *arguments], cwd=root, env=environment, stderr=follower)
    os.close(follower)
    shown = b""
    with process, open(leader, "rb", buffering=0) as terminal:
        while True:
            try:
                shown += terminal.read(65536)
            except OSError:  # EIO: the last one that had it open is gone
                break
    return process.returncode, shown.decode()


@pytest.mark.parametrize("columns", [80, 120, 20])
def test_progress_in_a_terminal(tmp_path: Path, columns: int) -> None:
    (tmp_path / "a\nb").write_bytes(os.urandom(2 * MIB))
    status, shown = in_terminal(tmp_path, "--progress", "a\nb", "target", columns=columns)
    assert status == 0
    if columns >= 80:
        assert "'target'" in shown
        assert "100% of 2 MiB" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert max(len(part) for part in re.split(r"[\r\n]+", plain)) <= columns
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is hidden and comes back


def test_progress_makes_way_for_messages(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(MIB))
    (tmp_path / "b").write_bytes(os.urandom(MIB))
    (tmp_path / "d").mkdir()
    status, shown = in_terminal(tmp_path, "--progress", "--stats", "a", "nosuch", "b", "d")
    assert status == 1
    lines = [line.rpartition("\x1b[2K")[2] for line in re.split(r"\r*\n", shown)]
    assert any(line.endswith("pacedcp: cannot stat 'nosuch': No such file or directory") for line in lines)
    assert sum("'d/a': 1 MiB in" in line for line in lines) == 1
    assert re.search(r"total .*100% of all 2 MiB", shown)


def test_no_bar_for_a_quick_copy_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    assert in_terminal(tmp_path, "a", "target") == (0, "")


def test_bar_appears_by_itself_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(4 * MIB))
    status, shown = in_terminal(tmp_path, "--rate=2MiB/s", "a", "target")
    assert status == 0
    assert "100% of 4 MiB" in shown


def test_signal_gives_the_terminal_back(tmp_path: Path) -> None:
    with slow_copy(tmp_path, "--progress") as process:
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_bar_that_cannot_be_drawn_is_no_error(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "a").write_bytes(os.urandom(MIB))
    assert run("sh", "-c", f'"$0" --progress a target {redirection}', PACEDCP, cwd=tmp_path) == (0, b"", b"")
    assert (tmp_path / "target").read_bytes() == (tmp_path / "a").read_bytes()


def test_progress_is_what_has_left_flight(tmp_path: Path) -> None:
    """Into a pipe rich draws the last state only: all of it, since by then all is durable."""
    (tmp_path / "a").write_bytes(os.urandom(3 * MIB))
    status, _, stderr = pacedcp("--progress", "a", "target", cwd=tmp_path)
    assert status == 0
    assert "100% of 3 MiB" in stderr.decode()
