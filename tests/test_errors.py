"""Every failure branch, through the system call table: what is retried, what moves the writer to the next engine, and
what is an error of the data, which is never forgotten and never tried again.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel import OVERLAYFS, PAGE, START, TMPFS, ZFS, Kernel, always, at, every_other, simulated, since
from machine import descriptors

import pacedio
from pacedio import Pacing, WritebackError

MIB = 1 << 20
NOT_HERE = [errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE]
SUBMITS = ("write", "write_uncached", "sync_file_range", "fdatasync", "fadvise", "ftruncate")
DATA = os.urandom(3 * MIB + 12345)
LIMIT = 2 * MIB


def paced(**how: Any) -> Pacing:
    """With a limit of its own: where windows and calls are counted, the device is to have no say."""
    return Pacing(**{"limit": LIMIT, **how})


FIXED = paced()
ALONE = paced(preallocate="off")  # else ENOSPC and EDQUOT may be tried once more, see test_preallocate.py

names = [errno.errorcode[code] for code in NOT_HERE]
not_here = pytest.mark.parametrize("code", NOT_HERE, ids=names)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with simulated() as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write(path: Path, pacing: Pacing = FIXED, mode: str = "wb", data: bytes = DATA, **how: Any) -> Any:
    """Writes it all in pieces of no particular size and closes; the closed file."""
    with pacedio.open(path, mode, pacing=pacing, **how) as f:
        for off in range(0, len(data), 100_003):
            f.write(data[off : off + 100_003])
    assert f.closed
    return f


def check_written(path: Path, kernel: Kernel, f: Any, engine: str, data: bytes = DATA) -> None:
    """The right bytes, by this engine, and never more of them in flight than the limit."""
    assert path.read_bytes() == data
    assert f.stats.engine == engine
    assert f.stats.error is None
    assert f.stats.most_in_flight <= f.stats.limit
    assert kernel.most <= f.stats.limit
    assert not kernel.dirty
    assert not kernel.writeback


def raised_by(call: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as e:  # noqa: PT011
        call()
    return e.value


# ---- what is retried ----


@pytest.mark.parametrize("engine", ["auto", "uncached", "advise", "datasync", "none"])
def test_the_simulated_kernel_is_right_when_nothing_fails(kernel: Kernel, path: Path, engine: str) -> None:
    f = write(path, paced(engine=engine))
    expected = "range" if engine == "auto" else engine
    if engine == "none":
        assert kernel.most > LIMIT
        kernel.most = 0
    check_written(path, kernel, f, expected)
    assert kernel.count("fdatasync") >= 1


@pytest.mark.parametrize("engine", ["auto", "uncached", "advise", "datasync"])
@pytest.mark.parametrize("shortest", [4097, 100_001, PAGE])
def test_short_writes_are_continued(kernel: Kernel, path: Path, engine: str, shortest: int) -> None:
    kernel.shortest = shortest
    f = write(path, paced(engine=engine))
    check_written(path, kernel, f, "range" if engine == "auto" else engine)


def test_writes_of_a_single_byte_are_continued(kernel: Kernel, path: Path) -> None:
    kernel.shortest = 1
    data = DATA[:20_000]
    f = write(path, paced(window=PAGE, limit=2 * PAGE), data=data)
    check_written(path, kernel, f, "range", data)
    assert kernel.count("write") == len(data)


@pytest.mark.parametrize("call", ["write", "sync_file_range", "fdatasync"])
def test_eintr_is_retried(kernel: Kernel, path: Path, call: str) -> None:
    kernel.faults[call] = every_other(errno.EINTR)
    f = write(path)
    check_written(path, kernel, f, "range")
    assert kernel.count(call) > 1
    assert kernel.count(call) % 2 == 0


def test_eintr_at_fadvise_is_retried(kernel: Kernel, path: Path) -> None:
    kernel.faults["fadvise"] = every_other(errno.EINTR)
    check_written(path, kernel, write(path, paced(engine="advise")), "advise")


@pytest.mark.parametrize("code", [errno.EINTR, None], ids=["EINTR", "slept"])
def test_eintr_at_the_sleep_of_a_rate(kernel: Kernel, path: Path, code: int | None) -> None:
    if code:
        kernel.faults["sleep"] = every_other(code)
    begin = kernel.now()
    f = write(path, paced(rate=MIB))
    assert kernel.now() - begin >= (len(DATA) - MIB // 25) * 10**9 // MIB
    check_written(path, kernel, f, "range")


def test_a_signal_handler_may_raise_during_the_sleep(path: Path) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("from the handler")

    before = signal.signal(signal.SIGALRM, raises)
    f = pacedio.open(path, "wb", pacing=paced(rate="100kB/s"))
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(RuntimeError, match="from the handler"):
            f.write(DATA)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 5
    assert f.stats.error is None
    f.discard()
    assert DATA.startswith(path.read_bytes())


def test_eagain_is_the_callers(kernel: Kernel, path: Path) -> None:
    kernel.faults["write"] = at(2, code=errno.EAGAIN)
    with pacedio.open(path, "wb", buffering=0) as f:
        f.write(b"a")
        with pytest.raises(BlockingIOError):
            f.write(b"b")
        assert f.stats.error is None
        f.flush()
        f.write(b"c")
    assert path.read_bytes() == b"abc"


def test_a_sync_covers_all_windows_that_were_started(kernel: Kernel, path: Path) -> None:
    f = write(path, paced(engine="datasync"), data=DATA * 4)
    check_written(path, kernel, f, "datasync", DATA * 4)
    assert kernel.count("fdatasync") <= 4 * len(DATA) // (LIMIT - f.stats.limit // 4) + 1


# ---- errors of the data ----


def check_failed_for_ever(f: Any, kernel: Kernel, code: int, late: bool, before: set[str]) -> None:
    """Every later call raises it again, none makes a system call, and closing releases the descriptor."""
    made = kernel.count(*SUBMITS)
    again = [lambda: f.write(b"x"), lambda: f.write(DATA), f.flush, f.sync, lambda: f.seek(0), f.tell]
    again.append(lambda: f.truncate(0))
    if f.readable():
        again += [f.read, lambda: f.read(10), lambda: f.readinto(bytearray(3)), f.readline, f.peek, f.readlines]
        again += [f.read1, lambda: f.readinto1(bytearray(3)), lambda: next(f), lambda: list(f)]
    for call in [*again, *again]:
        e = raised_by(call)
        assert e.errno == code
        assert e.filename == f.name
        assert isinstance(e, WritebackError) == late
    assert f.stats.error is not None
    assert f.stats.error.errno == code
    assert isinstance(f.stats.error, WritebackError) == late
    assert not f.closed
    assert descriptors() != before
    e = raised_by(f.close)
    assert e.errno == code
    assert f.closed
    assert descriptors() == before
    f.close()
    assert f.stats.error.errno == code
    assert "FAILED" in str(f.stats)
    with pytest.raises(ValueError, match="closed"):
        f.write(b"x")
    assert kernel.count(*SUBMITS) == made


def write_until_it_fails(f: Any) -> OSError:
    def write() -> None:
        for _ in range(10):
            f.write(DATA)
        f.sync()

    return raised_by(write)


@pytest.mark.parametrize("mode", ["wb", "w+b", "ab", "xb"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no sync"])
@pytest.mark.parametrize("when", [1, 5])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO], ids=errno.errorcode.get)
def test_an_error_of_a_write(kernel: Kernel, path: Path, mode: str, sync: bool, code: int, when: int) -> None:
    kernel.faults["write"] = at(when, code=code)
    before = descriptors()
    f = pacedio.open(path, mode, sync=sync, pacing=ALONE)
    e = write_until_it_fails(f)
    assert (e.errno, e.filename) == (code, str(path))
    assert not isinstance(e, WritebackError)
    assert kernel.count("write") == when
    check_failed_for_ever(f, kernel, code, False, before)


def fail_at(kernel: Kernel, step: str, code: int) -> None:
    """At the start of the third window, its wait, or the sync."""
    if step == "sync":
        kernel.faults["fdatasync"] = always(code)
        return
    real, seen = kernel.sync_file_range, itertools.count(1)

    def sync_file_range(fd: int, off: int, length: int, flags: int) -> int:
        if (flags == START) == (step == "start") and next(seen) == 3:
            return -code
        return real(fd, off, length, flags)

    kernel.replace("sync_file_range", sync_file_range)


@pytest.mark.parametrize("mode", ["wb", "w+b"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["start", "wait", "sync"])
def test_a_late_error(kernel: Kernel, path: Path, mode: str, step: str, code: int, sync: bool) -> None:
    fail_at(kernel, step, code)
    before = descriptors()
    f = pacedio.open(path, mode, sync=sync)
    e = write_until_it_fails(f)
    assert isinstance(e, WritebackError)
    assert (e.errno, e.filename) == (code, str(path))
    assert "an earlier write" in str(e)
    # A later fsync would succeed, and say nothing of what was lost.
    assert kernel.count("fdatasync") == (step == "sync")
    check_failed_for_ever(f, kernel, code, True, before)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENOSYS], ids=errno.errorcode.get)
def test_an_error_of_a_window_that_is_synced_is_met_once(kernel: Kernel, path: Path, code: int) -> None:
    kernel.faults["fdatasync"] = at(2, code=code)
    before = descriptors()
    f = pacedio.open(path, "wb", pacing=paced(engine="datasync"))
    e = write_until_it_fails(f)
    assert isinstance(e, WritebackError)
    assert e.errno == code
    assert kernel.count("fdatasync") == 2
    check_failed_for_ever(f, kernel, code, True, before)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_sync_that_fails_when_patience_ends_is_met_once(kernel: Kernel, path: Path, code: int) -> None:
    kernel.mapped_by_others = True
    kernel.faults["msync"] = always(code)
    before = descriptors()
    f = pacedio.open(path, "wb", pacing=paced(engine="advise"))
    assert write_until_it_fails(f).errno == code
    assert kernel.count("msync") == 1
    assert kernel.count("fdatasync") == 0
    check_failed_for_ever(f, kernel, code, True, before)


@pytest.mark.parametrize("step", ["start", "wait", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_the_close_after_which_nobody_looks_raises_it(kernel: Kernel, path: Path, step: str, code: int) -> None:
    fail_at(kernel, step, code)
    before = descriptors()
    f = pacedio.open(path, "wb", pacing=FIXED)
    try:
        f.write(DATA[: 2 * MIB - 1])
    except WritebackError:
        assert step == "start"
    assert raised_by(f.close).errno == code
    assert f.closed
    assert descriptors() == before
    assert f.stats.error is not None
    f.close()


def test_a_late_error_at_the_starts_of_a_close_without_sync(kernel: Kernel, path: Path) -> None:
    before = descriptors()
    f = pacedio.open(path, "wb", sync=False)
    f.write(DATA[: MIB + 10])
    f.flush()
    kernel.faults["sync_file_range"] = always(errno.EIO)
    e = raised_by(f.close)
    assert isinstance(e, WritebackError)
    assert descriptors() == before


def test_what_leaves_a_with_block_is_not_masked(kernel: Kernel, path: Path) -> None:
    kernel.faults["fdatasync"] = always(errno.EIO)
    before = descriptors()
    with pytest.raises(KeyError, match="mine"), pacedio.open(path, "wb") as f:  # noqa: PT012
        f.write(DATA)
        raise KeyError("mine")
    assert f.closed
    assert f.stats.error is not None
    assert f.stats.error.errno == errno.EIO
    assert descriptors() == before


def test_text(kernel: Kernel, path: Path) -> None:
    kernel.faults["write"] = always(errno.ENOSPC)
    before = descriptors()
    f = pacedio.open(path, "w")
    assert raised_by(lambda: f.write("x" * MIB)).errno == errno.ENOSPC
    assert raised_by(f.flush).errno == errno.ENOSPC
    assert raised_by(f.close).errno == errno.ENOSPC
    assert f.closed
    assert descriptors() == before


@pytest.mark.parametrize("code", [errno.EIO, errno.EPERM, errno.ENOSYS, errno.EINTR], ids=errno.errorcode.get)
def test_a_drop_is_never_fatal(kernel: Kernel, path: Path, code: int) -> None:
    kernel.faults["fadvise"] = always(code)
    f = write(path)
    assert kernel.count("fadvise") > 0
    check_written(path, kernel, f, "range")
    assert f.stats.reason is None


# ---- engines move down ----


@not_here
@pytest.mark.parametrize("first", [1, 3])
def test_sync_file_range_that_does_not_work_here(kernel: Kernel, path: Path, code: int, first: int) -> None:
    kernel.faults["sync_file_range"] = since(first, code)
    f = write(path)
    check_written(path, kernel, f, "advise")
    assert os.strerror(code) in f.stats.reason
    assert kernel.count("sync_file_range") == first
    # Known for the next writer on this mount, which does not try.
    kernel.cached.clear()
    f = write(path)
    check_written(path, kernel, f, "advise")
    assert os.strerror(code) in f.stats.reason
    assert kernel.count("sync_file_range") == first


@not_here
@pytest.mark.parametrize("first", [1, 3])
def test_where_pages_are_to_be_kept_advice_is_no_way(kernel: Kernel, path: Path, code: int, first: int) -> None:
    kernel.faults["sync_file_range"] = since(first, code)
    f = write(path, paced(drop_cache=False))
    check_written(path, kernel, f, "datasync")
    assert "cannot keep pages cached" in f.stats.reason
    assert kernel.count("fadvise") == 0
    assert len(kernel.cached) == -(-len(DATA) // PAGE)


@not_here
@pytest.mark.parametrize("first", [1, 3])
def test_pwritev2_that_does_not_work_here(kernel: Kernel, path: Path, code: int, first: int) -> None:
    kernel.faults["write_uncached"] = since(first, code)
    f = write(path, paced(engine="uncached"))
    check_written(path, kernel, f, "range")
    assert os.strerror(code) in f.stats.reason
    assert kernel.count("write_uncached") == first


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_an_error_of_an_uncached_write(kernel: Kernel, path: Path, code: int) -> None:
    kernel.faults["write_uncached"] = at(2, code=code)
    before = descriptors()
    f = pacedio.open(path, "wb", pacing=paced(engine="uncached", preallocate="off"))
    assert write_until_it_fails(f).errno == code
    check_failed_for_ever(f, kernel, code, False, before)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
def test_an_uncached_write_that_may_be_tried_again(kernel: Kernel, path: Path, code: int) -> None:
    kernel.faults["write_uncached"] = at(2, code=code)
    with pacedio.open(path, "wb", pacing=paced(engine="uncached"), buffering=0) as f:
        done = 0
        while done < len(DATA):
            try:
                done += f.write(DATA[done:])
            except BlockingIOError as e:
                done += e.characters_written
    assert f.stats.engine == "uncached"
    assert f.stats.error is None


@not_here
@pytest.mark.parametrize("first", [1, 3])
def test_advice_that_does_not_work_here(kernel: Kernel, path: Path, code: int, first: int) -> None:
    kernel.faults["fadvise"] = since(first, code)
    f = write(path, paced(engine="advise"))
    check_written(path, kernel, f, "datasync")
    assert os.strerror(code) in f.stats.reason


@pytest.mark.parametrize("call", ["mmap", "mincore"])
@pytest.mark.parametrize("code", [errno.ENODEV, errno.EACCES, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_mapping_that_cannot_be_looked_at(kernel: Kernel, path: Path, call: str, code: int) -> None:
    kernel.faults[call] = always(code)
    f = write(path, paced(engine="advise"))
    check_written(path, kernel, f, "datasync")
    assert os.strerror(code) in f.stats.reason


@pytest.mark.parametrize(("mode", "engine"), [("wb", "datasync"), ("w+b", "advise")])
def test_a_file_that_cannot_be_opened_for_reading(kernel: Kernel, path: Path, mode: str, engine: str) -> None:
    kernel.faults["open"] = always(errno.EACCES)
    f = write(path, paced(engine="advise"), mode)
    check_written(path, kernel, f, engine)
    if engine == "datasync":
        assert "read the file" in f.stats.reason
        assert os.strerror(errno.EACCES) in f.stats.reason


def test_the_descriptor_of_the_mapping_is_released(kernel: Kernel, path: Path) -> None:
    before = descriptors()
    f = write(path, paced(engine="advise"))
    assert kernel.count("open") == 1
    assert descriptors() == before
    assert f.stats.engine == "advise"


def test_pages_that_stay_in_the_cache_are_synced(kernel: Kernel, path: Path) -> None:
    kernel.mapped_by_others = True
    begin, slept = kernel.now(), kernel.clock
    f = write(path, paced(engine="advise"))
    check_written(path, kernel, f, "advise")
    # The first window is waited for with patience; those after it are synced at once.
    windows = f.stats.windows
    assert kernel.count("msync") == windows > 4
    assert kernel.now() - begin >= 10**8
    assert kernel.clock - slept < 2 * 10**8
    assert kernel.count("fdatasync") == 1

    kernel.mapped_by_others = False
    kernel.cached.clear()
    check_written(path, kernel, write(path, paced(engine="advise")), "advise")
    assert kernel.count("msync") == windows


def test_patience_comes_back_when_pages_go_again(kernel: Kernel, path: Path) -> None:
    kernel.mapped_by_others = True
    with pacedio.open(path, "wb", pacing=paced(engine="advise", window=PAGE, limit=2 * PAGE)) as f:
        f.write(DATA[: 10 * PAGE])
        f.flush()
        synced = kernel.count("msync")
        assert synced >= 8
        kernel.mapped_by_others = False
        kernel.cached.clear()
        f.write(DATA[10 * PAGE : 40 * PAGE])
        assert kernel.count("msync") <= synced + 17
    assert path.read_bytes() == DATA[: 40 * PAGE]


def test_a_mapping_that_cannot_be_synced(kernel: Kernel, path: Path) -> None:
    kernel.mapped_by_others = True
    kernel.faults["msync"] = always(errno.ENOSYS)
    f = write(path, paced(engine="advise"))
    check_written(path, kernel, f, "datasync")
    assert "Function not implemented" in f.stats.reason


# ---- engines are verified ----


def test_pages_in_another_mapping(kernel: Kernel, path: Path) -> None:
    kernel.other_mapping = kernel.sync_file_range_lies = True
    f = write(path)
    check_written(path, kernel, f, "advise")
    assert "another file's mapping" in f.stats.reason
    assert kernel.count("sync_file_range") == 0


def test_pages_nowhere(kernel: Kernel, path: Path) -> None:
    kernel.other_mapping = kernel.sync_file_range_lies = True
    kernel.replace(
        "mincore", lambda _address, length, vec: [vec.__setitem__(i, 0) for i in range(length // PAGE)] and 0
    )
    f = write(path)
    check_written(path, kernel, f, "datasync")


def test_pages_that_are_clean_at_once(kernel: Kernel, path: Path) -> None:
    kernel.written_through = True
    f = write(path)
    check_written(path, kernel, f, "datasync")
    assert "clean at once" in f.stats.reason


def test_pages_that_stay_dirty(kernel: Kernel, path: Path) -> None:
    kernel.sync_file_range_lies = True
    f = write(path)
    check_written(path, kernel, f, "advise")
    assert "leaves pages dirty" in f.stats.reason
    assert f.stats.verified_dirty_pages > 0


def test_btrfs_may_need_a_second_round(kernel: Kernel, path: Path) -> None:
    real = kernel.sync_file_range

    def sync_file_range(fd: int, off: int, length: int, flags: int) -> int:
        return 0 if flags == START else real(fd, off, length, flags)

    kernel.replace("sync_file_range", sync_file_range)
    check_written(path, kernel, write(path), "range")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def test_without_cachestat_the_type_decides(kernel: Kernel, path: Path, code: int) -> None:
    kernel.faults["cachestat"] = always(code)
    f = write(path)
    check_written(path, kernel, f, "range")
    assert f.stats.reason is None
    assert f.stats.verified_dirty_pages is None


def test_without_cachestat_overlayfs_is_known(kernel: Kernel, path: Path) -> None:
    kernel.faults["cachestat"] = always(errno.ENOSYS)
    kernel.magic = OVERLAYFS
    kernel.sync_file_range_lies = True
    f = write(path)
    check_written(path, kernel, f, "advise")
    assert "type decided" in f.stats.reason


@pytest.mark.parametrize("code", [errno.ENOSYS, 0], ids=["no cachestat", "cachestat"])
def test_zfs_is_known(kernel: Kernel, path: Path, code: int) -> None:
    if code:
        kernel.faults["cachestat"] = always(code)
    kernel.magic = ZFS
    kernel.sync_file_range_lies = kernel.other_mapping = True
    f = write(path)
    check_written(path, kernel, f, "datasync")
    assert "type decided" in f.stats.reason


def test_memory_needs_no_pacing(kernel: Kernel, path: Path) -> None:
    kernel.magic = TMPFS
    f = write(path)
    assert f.stats.engine == "none"
    assert kernel.count("sync_file_range", "fadvise") == 0
    assert path.read_bytes() == DATA


def test_cachestat_that_fails_later(kernel: Kernel, path: Path) -> None:
    kernel.faults["cachestat"] = since(3, errno.EPERM)
    check_written(path, kernel, write(path), "range")


def test_a_file_system_without_a_type(kernel: Kernel, path: Path) -> None:
    kernel.faults["file_system"] = always(errno.ENOSYS)
    check_written(path, kernel, write(path), "range")


def test_a_mount_is_verified_once(kernel: Kernel, path: Path) -> None:
    f = write(path)
    assert f.stats.verified_dirty_pages > 0
    assert write(path).stats.verified_dirty_pages is None
    kernel.mount += 1 << 20
    assert write(path).stats.verified_dirty_pages > 0


def scatter(f: Any) -> None:
    """Fills every place of the planner, and not a window."""
    for i in range(32):
        f.seek(2 * i * PAGE)
        f.write(b"x")


def test_what_the_kernel_wrote_back_before_proves_nothing(kernel: Kernel, path: Path) -> None:
    with pacedio.open(path, "wb", buffering=0) as f:
        scatter(f)
        kernel.fdatasync(f.fileno())  # as the kernel does after half a minute
        f.seek(MIB)
        f.write(b"y")
    assert f.stats.engine == "range"
    assert f.stats.reason is None


def test_what_was_truncated_proves_nothing(kernel: Kernel, path: Path) -> None:
    with pacedio.open(path, "wb", buffering=0) as f:
        scatter(f)
        f.seek(63 * PAGE)
        f.write(b"y")
        f.truncate(62 * PAGE + 10)
        f.seek(MIB)
        f.write(b"z")
    assert f.stats.engine == "range"
    assert f.stats.reason is None


def test_a_file_that_fills_no_window_asks_nothing(kernel: Kernel, path: Path) -> None:
    f = write(path, data=DATA[: 512 * 1024 - 1])
    assert f.stats.engine == "undecided"
    assert kernel.count("status", "file_system", "cachestat", "sync_file_range", "fadvise", "mmap", "open") == 0
    assert kernel.count("fdatasync") == 1


# ---- what else may fail ----


@pytest.mark.parametrize(("call", "code"), [("get_flags", errno.EBADF), ("lseek", errno.EBADF)])
def test_a_descriptor_that_is_bad(kernel: Kernel, path: Path, call: str, code: int) -> None:
    before = descriptors()
    f = pacedio.open(path, "wb", buffering=0)
    kernel.faults[call] = always(code)
    assert raised_by(lambda: f.write(b"x")).errno == code
    assert kernel.count("write") == 0
    del kernel.faults[call]
    f.discard()
    assert descriptors() == before


def test_a_status_that_says_that_the_descriptor_is_bad(kernel: Kernel, path: Path) -> None:
    kernel.faults["status"] = always(errno.EBADF)
    before = descriptors()
    f = pacedio.open(path, "wb")
    assert write_until_it_fails(f).errno == errno.EBADF
    assert raised_by(f.close).errno == errno.EBADF
    assert descriptors() == before


def test_what_cannot_seek_is_not_paced(kernel: Kernel, path: Path) -> None:
    kernel.faults["lseek"] = always(errno.ESPIPE)
    f = write(path)
    assert f.stats.engine == "none"
    assert f.stats.error is None
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EROFS], ids=errno.errorcode.get)
def test_a_sync_of_what_is_no_file(kernel: Kernel, path: Path, code: int) -> None:
    kernel.faults["fdatasync"] = always(code)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pacedio.open(path, "wb") as f:
            f.write(b"through")
        assert f.stats.error is None
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    regular = path.with_name("regular")
    with pytest.raises(OSError) as e, pacedio.open(regular, "wb") as f:  # noqa: PT011
        f.write(b"x")
    assert e.value.errno == code


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EPERM], ids=errno.errorcode.get)
def test_a_truncation_that_fails_is_no_error_of_the_data(kernel: Kernel, path: Path, code: int) -> None:
    with pacedio.open(path, "wb") as f:
        f.write(DATA)
        kernel.faults["ftruncate"] = always(code)
        assert raised_by(lambda: f.truncate(10)).errno == code
        assert f.stats.error is None
    assert path.read_bytes() == DATA


IDLE = 3 << 13


@pytest.mark.parametrize("engine", ["auto", "advise", "datasync", "uncached"])
def test_the_io_class_is_set_around_what_submits(kernel: Kernel, path: Path, engine: str) -> None:
    kernel.priority = 5
    f = write(path, paced(io_class="idle", engine=engine))
    check_written(path, kernel, f, "range" if engine == "auto" else engine)
    assert kernel.priority == 5
    submits = {"advise": "fadvise", "datasync": "fdatasync", "uncached": "write_uncached", "auto": "sync_file_range"}
    assert kernel.priorities[submits[engine]] == {IDLE}
    assert kernel.priorities["fdatasync"] == {IDLE}
    assert kernel.priorities["write"] == {5}


@pytest.mark.parametrize("call", ["ioprio_get", "ioprio_set"])
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def test_an_io_class_that_is_refused_is_ignored(kernel: Kernel, path: Path, call: str, code: int) -> None:
    kernel.priority = 5
    kernel.faults[call] = always(code)
    f = write(path, paced(io_class="idle"))
    check_written(path, kernel, f, "range")
    assert kernel.priority == 5
    if call == "ioprio_get":
        assert kernel.count("ioprio_set") == 0  # it could not be put back


def test_the_io_class_is_put_back_after_an_error(kernel: Kernel, path: Path) -> None:
    kernel.priority = 5
    kernel.faults["sync_file_range"] = at(3, code=errno.EIO)
    f = pacedio.open(path, "wb", pacing=paced(io_class="idle"))
    write_until_it_fails(f)
    assert kernel.priority == 5
    raised_by(f.close)


# ---- a limit that follows the device ----


@pytest.mark.parametrize("engine", ["auto", "uncached", "advise", "datasync"])
def test_an_automatic_limit_on_the_simulated_kernel(kernel: Kernel, path: Path, engine: str) -> None:
    largest = 0
    with pacedio.open(path, "wb", buffering=0, pacing=Pacing(engine=engine)) as f:
        for off in range(0, len(DATA), 64 * 1024):
            f.write(DATA[off : off + 64 * 1024])
            largest = max(largest, f.stats.limit)
            assert kernel.most <= largest
            assert f.stats.in_flight <= f.stats.most_in_flight <= largest
    assert path.read_bytes() == DATA
    assert f.stats.engine == ("range" if engine == "auto" else engine)
    assert f.stats.in_flight == 0
    if engine == "datasync":
        assert (f.stats.limited_by, f.stats.limit) == ("engine", LIMIT)
    assert not kernel.dirty
    assert not kernel.writeback


def test_a_small_file_joins_no_device(kernel: Kernel, path: Path) -> None:
    kernel.shared_memory = path.parent
    f = write(path, Pacing(), data=DATA[: 128 * 1024])
    assert f.stats.engine == "undecided"
    assert set(kernel.calls) <= {"get_flags", "lseek", "write", "fdatasync", "now"}
    assert os.listdir(path.parent) == [path.name]


def test_a_budget_that_is_shared(kernel: Kernel, path: Path) -> None:
    kernel.shared_memory = path.parent
    write(path, Pacing())
    before = descriptors()  # one of them is the device's, for the next file
    for _ in range(2):
        f = write(path, Pacing())
        assert f.stats.share == "host"
        assert descriptors() == before
    (directory,) = path.parent.glob("pacedio-*")
    assert directory.name == f"pacedio-{os.geteuid()}"
    (file,) = directory.iterdir()
    assert (directory.stat().st_mode & 0o7777, file.stat().st_mode & 0o7777) == (0o700, 0o600)
    assert write(path, Pacing(share="process")).stats.share == "process"


@pytest.mark.parametrize("call", ["make_directory", "path_status", "open_or_create", "fallocate", "map_shared", "lock"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_budget_that_cannot_be_shared(kernel: Kernel, path: Path, call: str, code: int) -> None:
    kernel.shared_memory = path.parent
    kernel.faults[call] = always(code)
    write(path, Pacing())
    before = descriptors()
    f = write(path, Pacing())
    assert kernel.count(call) > 0
    assert f.stats.share == "process"
    assert f.stats.error is None
    assert path.read_bytes() == DATA
    assert descriptors() == before


@pytest.mark.parametrize("trap", ["writable by others", "a link", "a file"])
def test_a_directory_that_others_may_have_laid_out(kernel: Kernel, path: Path, trap: str) -> None:
    kernel.shared_memory = path.parent
    directory = path.parent / f"pacedio-{os.geteuid()}"
    if trap == "a file":
        directory.touch(0o700)
    elif trap == "a link":
        (path.parent / "elsewhere").mkdir(0o700)
        directory.symlink_to("elsewhere")
    else:
        directory.mkdir()
        directory.chmod(0o770)
    assert write(path, Pacing()).stats.share == "process"
    assert not directory.is_dir() or not list(directory.iterdir())


def test_a_controller_that_is_busy_is_left_alone(kernel: Kernel, path: Path) -> None:
    """Another process is in the middle of an update: samples are dropped, and nothing waits."""
    kernel.shared_memory = path.parent
    control = 0

    def lock(fd: int, byte: int, take: int) -> int:
        return -errno.EAGAIN if byte == control else int(kernel.real["lock"](fd, byte, take))

    kernel.replace("lock", lock)
    f = write(path, Pacing())
    assert f.stats.share == "host"
    assert (f.stats.base_delay_seconds, f.stats.delivery_rate) == (None, None)
    assert path.read_bytes() == DATA


# ---- for real ----

SCRIPT = """
import errno, os, sys
import pacedio

data = bytes(range(256)) * 16384
try:
    with pacedio.open(sys.argv[1], "wb", pacing=pacedio.Pacing(limit="2MiB")) as f:
        f.write(data)
except OSError as e:
    print(type(e).__name__, errno.errorcode[e.errno], e.filename == sys.argv[1], f.closed,
          f.stats.error.errno == e.errno)
else:
    with open(sys.argv[1], "rb") as f2:
        assert f2.read() == data
    print(f.stats.engine, f.stats.most_in_flight <= f.stats.limit, f.stats.reason)
"""


def traced(path: Path, inject: str) -> list[str]:
    """What the script says, and the traced calls, in a process whose system calls strace makes fail."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = path.with_name("strace.log")
    probe = ["strace", "-f", "-e", "trace=sync_file_range,fdatasync,statx", "-o", str(log)]
    if subprocess.run([*probe, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("strace may not trace here")
    command = [*probe, "-e", f"inject={inject}", sys.executable, "-c", textwrap.dedent(SCRIPT), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return [done.stdout.strip(), log.read_text()]


@pytest.fixture
def paced_by_range(path: Path) -> Path:
    """Skips where this directory's file system is paced by another engine, so that these calls are not made."""
    with pacedio.open(path, "wb") as f:
        f.write(DATA)
    if f.stats.engine != "range":
        pytest.skip(f"temporary files are paced by {f.stats.engine} here")
    return path


@pytest.mark.parametrize("code", ["ENOSYS", "EPERM"])
@pytest.mark.parametrize("when", ["", ":when=3+"])
def test_a_kernel_without_sync_file_range(paced_by_range: Path, code: str, when: str) -> None:
    said, log = traced(paced_by_range, f"sync_file_range:error={code}{when}")
    assert said.startswith("advise True")
    assert os.strerror(getattr(errno, code)) in said
    assert log.count("(INJECTED)") == 1


def test_a_sandbox_that_forbids_statx(paced_by_range: Path) -> None:
    said, log = traced(paced_by_range, "statx:error=EPERM")
    assert said == "range True None"
    assert "(INJECTED)" in log


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("when", [1, 3, 7])
def test_a_kernel_that_reports_a_writeback_error(paced_by_range: Path, code: str, when: int) -> None:
    said, log = traced(paced_by_range, f"sync_file_range:error={code}:when={when}")
    assert said == f"WritebackError {code} True True True"
    lines = log.splitlines()
    last = next(i for i, line in enumerate(lines) if "(INJECTED)" in line)
    assert not [line for line in lines[last + 1 :] if "sync" in line]


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EDQUOT"])
def test_a_kernel_that_reports_it_at_the_sync(paced_by_range: Path, code: str) -> None:
    said, log = traced(paced_by_range, f"fdatasync:error={code}:when=1")
    assert said == f"WritebackError {code} True True True"
    assert log.count("fdatasync(") == 1


@pytest.mark.parametrize("call", ["sync_file_range", "fdatasync"])
def test_a_kernel_that_is_interrupted(paced_by_range: Path, call: str) -> None:
    said, log = traced(paced_by_range, f"{call}:error=EINTR:when=1+2")
    assert said == "range True None"
    assert "(INJECTED)" in log
