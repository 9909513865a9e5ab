"""f.stats: what it says is true, at any time."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import pickle
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pacedio
from pacedio import Pacing, WriteStats

KIB = 1024
MIB = 1024 * KIB
FIXED = Pacing(limit="2MiB")
SMALL = Pacing(window="4KiB", limit="8KiB")
FIELDS = (
    *("bytes", "engine", "error", "in_flight", "limit", "longest_stall_seconds", "most_in_flight", "reason"),
    *("stall_seconds", "stalls", "sync_seconds", "verified_dirty_pages", "windows"),
    *("base_delay_seconds", "delivery_rate", "limited_by", "share"),
)


@pytest.fixture
def on_disk(mounts: Any) -> Iterator[Path]:
    """A directory on ext4, where there is something to pace whatever the machine's own disks are."""
    with mounts.directory("ext4") as made:
        yield made.directory


@contextlib.contextmanager
def sampled(f: Any) -> Iterator[list[WriteStats]]:
    """Have another thread look all the time."""
    samples: list[WriteStats] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            samples.append(f.stats)
            time.sleep(0.0002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def test_frozen(tmp_path: Path) -> None:
    with pacedio.open(tmp_path / "file", "wb", sync=False) as f:
        stats = f.stats
        with pytest.raises(AttributeError, match="frozen"):
            stats.bytes = 5
        with pytest.raises(AttributeError, match="frozen"):
            del stats.bytes
        with pytest.raises(AttributeError):
            stats.more = 5  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            f.stats = stats  # type: ignore[misc]
        assert stats == f.stats
        assert hash(stats) == hash(f.stats)
        f.write(b"x")
        f.flush()
        assert stats != f.stats
        assert stats.bytes == 0  # a snapshot
        assert stats != "stats"


def test_fields(tmp_path: Path) -> None:
    with pacedio.open(tmp_path / "file", "wb") as f:
        assert {name for name in dir(f.stats) if not name.startswith("_")} == {*FIELDS, "as_dict"}
        assert set(f.stats.as_dict()) == set(FIELDS)
        for name in FIELDS:
            assert f"{name}={getattr(f.stats, name)!r}" in repr(f.stats)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_small_file_decides_nothing(tmp_path: Path, sync: bool, atomic: bool) -> None:
    with pacedio.open(tmp_path / "file", "wb", sync=sync, atomic=atomic) as f:
        before = f.stats
        assert (before.bytes, before.windows, before.in_flight, before.most_in_flight) == (0, 0, 0, 0)
        assert before.engine == "undecided"
        f.write(b"x" * 5000)
        assert f.stats.bytes == 0  # in the user-space buffer
        f.flush()
        assert f.stats.bytes == 5000
        assert f.stats.in_flight == 8 * KIB  # whole pages
    after = f.stats
    assert (after.bytes, after.windows, after.engine, after.reason) == (5000, 0, "undecided", "no window was filled")
    assert (after.verified_dirty_pages, after.error) == (None, None)
    assert (after.limited_by, after.base_delay_seconds, after.delivery_rate) == (None, None, None)
    assert (after.sync_seconds > 0) == sync
    if sync:
        assert after.in_flight == 0


@pytest.mark.parametrize("pacing", [FIXED, SMALL, Pacing(window="64KiB", limit="1MiB")], ids=repr)
def test_during_and_after(on_disk: Path, pacing: Pacing) -> None:
    data = os.urandom(MIB)
    rounds = 4 if pacing is SMALL else 24
    with pacedio.open(on_disk / "file", "wb", pacing=pacing) as f, sampled(f) as samples:
        for _ in range(rounds):
            f.write(data)
            assert f.stats.in_flight <= pacing.limit
        f.sync()
        assert f.stats.in_flight == 0
        synced = f.stats
    last = f.stats
    assert len(samples) > 5
    for sample in samples:
        assert 0 <= sample.in_flight <= sample.most_in_flight <= sample.limit == pacing.limit
    for earlier, later in itertools.pairwise(samples):
        for name in ("bytes", "windows", "most_in_flight", "stalls", "stall_seconds", "sync_seconds"):
            assert getattr(earlier, name) <= getattr(later, name), name
    assert last.bytes == synced.bytes == rounds * MIB
    assert last.windows == rounds * MIB // pacing.window
    assert last.most_in_flight == pacing.limit
    assert (last.limited_by, last.base_delay_seconds, last.delivery_rate) == ("configuration", None, None)
    assert last.share == "process"
    assert last.engine in ("range", "uncached")
    assert last.in_flight == 0
    assert 0 < synced.sync_seconds <= last.sync_seconds < 60
    assert (last.stalls > 0) == (last.stall_seconds > 0)
    assert last.longest_stall_seconds <= last.stall_seconds <= last.longest_stall_seconds * max(last.stalls, 1)
    assert last.error is None


@pytest.mark.parametrize(
    "pacing",
    [Pacing(), Pacing(window="64KiB"), Pacing(polite=True), Pacing(polite=True, limit="2MiB"), Pacing(share="process")],
    ids=repr,
)
def test_a_limit_that_follows_the_device(on_disk: Path, pacing: Pacing) -> None:
    samples = []
    data = os.urandom(64 * KIB)
    with pacedio.open(on_disk / "file", "wb", 0, pacing=pacing) as f:
        for _ in range(512):
            f.write(data)
            samples.append(f.stats)
        f.sync()
        assert f.stats.in_flight == 0
    last = f.stats
    largest = 0
    for sample in samples:
        largest = max(largest, sample.limit)
        assert 0 <= sample.in_flight <= sample.most_in_flight <= largest
        assert sample.limit <= (64 * MIB if pacing.limit == "auto" else pacing.limit)
    assert last.bytes == 32 * MIB
    assert 64 * KIB <= last.bytes // last.windows <= 512 * KIB
    assert last.share == (pacing.share if os.access("/dev/shm", os.W_OK) else "process")
    assert last.engine in ("range", "uncached")
    assert last.limited_by in (None, "device", "cgroup", *(["configuration"] if pacing.limit != "auto" else []))
    if last.stalls:  # only a wait that blocked tells how long a window takes
        assert last.base_delay_seconds is not None
    assert (on_disk / "file").read_bytes() == data * 512


def test_close_without_sync_starts_what_is_left(on_disk: Path) -> None:
    with pacedio.open(on_disk / "file", "wb", sync=False, pacing=FIXED) as f:
        f.write(os.urandom(5 * MIB + 1000))
        assert f.stats.windows == 10
    after = f.stats
    assert (after.bytes, after.windows, after.sync_seconds) == (5 * MIB + 1000, 11, 0)
    assert 0 < after.in_flight <= after.most_in_flight <= after.limit  # nothing waited for


@pytest.mark.parametrize("pacing", [SMALL, Pacing(window="4KiB", limit="4KiB"), Pacing(window="4KiB", limit="1MiB")])
@pytest.mark.parametrize("seed", range(3))
def test_random_seeks_stay_below_the_limit(on_disk: Path, pacing: Pacing, seed: int) -> None:
    choose = random.Random(seed)
    expected = bytearray(2 * MIB)
    with pacedio.open(on_disk / "file", "w+b", choose.choice([0, -1]), pacing=pacing) as f, sampled(f) as samples:
        f.truncate(len(expected))
        for _ in range(400):
            at = choose.randrange(len(expected))
            data = choose.randbytes(min(choose.choice([1, 100, 4096, 5000, 40_000]), len(expected) - at))
            f.seek(at)
            f.write(data)
            expected[at : at + len(data)] = data
            assert f.stats.in_flight <= pacing.limit
            if choose.random() < 0.02:
                f.sync()
                assert f.stats.in_flight == 0
    assert all(sample.in_flight <= sample.most_in_flight <= pacing.limit for sample in samples)
    assert f.stats.most_in_flight <= pacing.limit
    assert (on_disk / "file").read_bytes() == expected


def test_truncate_takes_out_of_flight(on_disk: Path) -> None:
    # With a limit of its own: whatever is known of the device, nothing is to be waited for.
    with pacedio.open(on_disk / "file", "wb", 0, pacing=Pacing(limit=2 * MIB)) as f:
        f.write(bytes(400 * KIB))
        assert f.stats.in_flight == 400 * KIB
        f.truncate(100 * KIB)
        assert f.stats.in_flight == 100 * KIB
        f.truncate(0)
        assert f.stats.in_flight == 0


def test_a_rate_is_a_cap(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pacedio.open(tmp_path / "file", "wb", pacing=Pacing(rate="20MB/s"), sync=False) as f:
        f.write(bytes(8_000_000))
    assert 0.3 < time.monotonic() - begin < 2
    assert f.stats.bytes == 8_000_000


def test_nothing_to_pace() -> None:
    with pacedio.open("/dev/null", "wb") as f:
        f.write(bytes(4 * MIB))
    assert (f.stats.engine, f.stats.in_flight, f.stats.windows) == ("none", 0, 0)
    assert f.stats.reason == "not a regular file, nothing to pace"


def test_a_failed_write_is_told(tmp_path: Path) -> None:
    f = pacedio.open("/dev/full", "wb")
    f.write(b"x")
    uses: list[Callable[[], object]] = [f.flush, lambda: f.write(b"x"), f.sync, f.tell, lambda: f.seek(0), f.close]
    for use in uses:
        with pytest.raises(OSError, match="No space left"):
            use()
    f.close()
    assert f.closed
    assert isinstance(f.stats.error, OSError)
    assert f.stats.error.errno == 28
    assert "FAILED: [Errno 28] No space left on device: '/dev/full'" in str(f.stats)


def test_one_line(on_disk: Path) -> None:
    with pacedio.open(on_disk / "small", "wb") as f:
        f.write(b"x" * 1536)
    assert re.fullmatch(
        r"1\.5 KiB written, sync [\d.]+ m?s, engine undecided \(no window was filled\)", str(f.stats)
    ), str(f.stats)
    size, seconds = r"[\d.]+ [KMG]?i?B", r"[\d.]+ m?s"
    for pacing, in_flight in [
        (FIXED, r"at most 2 MiB in flight \(limit 2 MiB\)"),
        (
            Pacing(),
            rf"at most {size} in flight( \(limit now {size} by (device|cgroup)(: {size}/s, {seconds})?\))?",
        ),
        (Pacing(engine="datasync"), r"at most 2 MiB in flight \(limit 2 MiB by engine\)"),
    ]:
        with pacedio.open(on_disk / "big", "wb", pacing=pacing) as f:
            f.write(bytes(8 * MIB))
        assert re.fullmatch(
            rf"8 MiB written, {in_flight}, (no stall|(1 stall|\d+ stalls) of {seconds}, longest {seconds}), "
            rf"sync {seconds}, engine (range|uncached|datasync)( \(.+\))?",
            str(f.stats),
        ), str(f.stats)


def test_without_a_sync_the_line_says_so(on_disk: Path) -> None:
    with pacedio.open(on_disk / "file", "wb", sync=False) as f:
        f.write(bytes(MIB))
    assert f.stats.sync_seconds == 0
    assert ", not synced, " in str(f.stats)


def test_stats_travel(on_disk: Path) -> None:
    """Between the processes of a pool, into a copy, into a log of JSON lines."""
    with pacedio.open(on_disk / "file", "wb") as f:
        f.write(bytes(4 * MIB))
    for other in (pickle.loads(pickle.dumps(f.stats)), copy.copy(f.stats), copy.deepcopy(f.stats)):
        assert other == f.stats
        assert hash(other) == hash(f.stats)
    told = json.loads(json.dumps(f.stats.as_dict()))
    assert told == f.stats.as_dict()
    assert told["bytes"] == 4 * MIB
    assert told["error"] is None

    with pytest.raises(OSError, match="No space left"), pacedio.open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")
    assert "No space left on device" in full.stats.as_dict()["error"]
    again = pickle.loads(pickle.dumps(full.stats))
    assert (type(again.error), again.error.errno) == (OSError, 28)
    assert again == full.stats


def test_of_text_and_of_a_wrapped_file(tmp_path: Path) -> None:
    with pacedio.open(tmp_path / "text", "w", encoding="utf-16-le") as f:
        f.write("four")
        f.flush()
        assert f.stats.bytes == 8
    assert f.stats.bytes == 8
    with open(tmp_path / "plain", "wb") as plain:
        plain.write(b"not counted")
        with pacedio.wrap(plain) as w:
            w.write(b"counted")
        assert w.stats.bytes == 7


def test_sync_makes_durable_and_may_be_repeated(on_disk: Path) -> None:
    with pacedio.open(on_disk / "file", "wb") as f:
        for number in range(1, 4):
            f.write(os.urandom(700_000))
            before = f.stats.sync_seconds
            f.sync()
            after = f.stats
            assert after.sync_seconds > before
            assert (after.in_flight, after.bytes) == (0, number * 700_000)
    with pytest.raises(ValueError, match="closed"):
        f.sync()
