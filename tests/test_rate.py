"""The rate schedule, with a clock of its own; and once with the real one, which must not be outrun."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pacedio
from pacedio import Pacing
from pacedio._native import ffi, lib

SECOND = 10**9
WINDOW = 512 * 1024
MOST = 2**63 - 1

checked = settings(max_examples=300, derandomize=True, deadline=None, database=None)


class Schedule:
    """A writer that has always something to write, on a simulated clock."""

    def __init__(self, rate: int, window: int = WINDOW, now: int = 10**15) -> None:
        self.rate = rate
        self.schedule = ffi.new("pio_rate *")
        lib.pio_rate_set(self.schedule, window, rate)
        self.now = now
        self.accepted: list[tuple[int, int]] = []  # when, bytes

    def write(self, wanted: int, overrun: int = 0, takes: int = 0) -> int:
        """One write call: sleeps `overrun` ns longer than asked for, and takes `takes` ns."""
        n = int(min(wanted, lib.pio_rate_piece(self.schedule)))
        delay = lib.pio_rate_delay(self.schedule, self.now, n)
        assert delay >= 0
        if delay > 0:
            self.now += delay + overrun
            assert lib.pio_rate_delay(self.schedule, self.now, n) == 0
        self.accepted.append((self.now, n))
        self.now += takes
        lib.pio_rate_accepted(self.schedule, self.now, n)
        return n

    def most_within(self, span: int) -> int:
        """The most bytes that were accepted within `span` ns."""
        most = total = first = 0
        for when, n in self.accepted:
            total += n
            while self.accepted[first][0] < when - span:
                total -= self.accepted[first][1]
                first += 1
            most = max(most, total)
        return most


rates = st.one_of(st.integers(1, 1000), st.integers(1000, 10**7), st.integers(10**7, 20 * 10**9))
windows = st.sampled_from([4096, 65536, WINDOW, 8 << 20, 1 << 30])
calls = st.lists(
    st.tuples(
        st.integers(1, 4 << 20),  # bytes
        st.one_of(st.just(0), st.integers(0, 5 * 10**7)),  # the sleep's overrun
        st.one_of(st.just(0), st.integers(0, 10**6), st.integers(0, 10**9)),  # what the write takes
        st.one_of(st.just(0), st.just(0), st.integers(0, 10 * SECOND)),  # a pause of the caller's
    ),
    min_size=1,
    max_size=100,
)


@checked
@given(rates, windows, calls)
@example(100_000_000, WINDOW, [(1 << 20, 0, 0, 0)] * 300)
@example(100_000_000, WINDOW, [(1 << 20, 0, 0, 5 * SECOND), *[(1 << 20, 0, 0, 0)] * 50] * 2)
def test_no_interval_sees_more_than_the_rate_and_a_burst(
    rate: int, window: int, sequence: list[tuple[int, int, int, int]]
) -> None:
    s = Schedule(rate, window)
    for wanted, overrun, takes, pause in sequence:
        s.write(wanted, overrun, takes)
        s.now += pause
    burst = max(min(window, rate // 25), 1)
    assert s.schedule.burst == burst
    for span in (0, 1, SECOND // 100, SECOND, 2 * SECOND, 60 * SECOND):
        # Each call's time is rounded down to a nanosecond.
        assert s.most_within(span) <= rate * (span + len(sequence)) / SECOND + burst
    if rate >= 25 and rate * len(sequence) < SECOND:
        assert s.most_within(2 * SECOND) <= 2 * rate * 1.02 + 1


@checked
@given(rates, windows, st.integers(0, 100))
def test_after_a_pause_there_is_no_more_than_a_window(rate: int, window: int, pause: int) -> None:
    s = Schedule(rate, window)
    for _ in range(10):
        s.write(MOST)
    s.now += (1000 + pause) * SECOND
    begin = s.now
    at_once = 0
    while s.now == begin:
        at_once += s.write(MOST)
    at_once -= s.accepted[-1][1]  # the first that had to wait
    assert 0 < at_once <= max(window, 1)
    assert at_once <= max(rate / 25, 1)


@checked
@given(
    st.integers(1000, 20 * 10**9), windows, st.lists(st.floats(0, 0.5), min_size=1, max_size=20), st.floats(0.01, 0.99)
)
def test_sleeps_that_overrun_do_not_slow_it_down(rate: int, window: int, overruns: list[float], busy: float) -> None:
    s = Schedule(rate, window)
    burst_ns = s.schedule.burst * SECOND / rate
    total = 0
    begin = s.now
    for i in range(400):
        overrun = overruns[i % len(overruns)]
        # A write that takes part of what the sleep left over.
        takes = int((0.5 - overrun) * busy * burst_ns)
        total += s.write(MOST, int(overrun * burst_ns), takes)
    seconds = (s.now - begin) / SECOND
    assert total >= rate * seconds * 0.98
    assert total <= rate * seconds * 1.02 + s.schedule.burst


@pytest.mark.parametrize("bytes_at_once", [1, 100, WINDOW, MOST])
def test_no_rate_means_no_wait(bytes_at_once: int) -> None:
    s = Schedule(0)
    for _ in range(5):
        assert s.write(bytes_at_once) == bytes_at_once
    assert s.now == 10**15


@pytest.mark.parametrize(
    ("piece", "pacing"),
    [
        (1 << 20, Pacing(rate="40MB/s")),
        (1000, Pacing(rate="40MB/s")),
        (1 << 20, Pacing(rate="40MB/s", engine="none")),
        (1 << 20, Pacing(rate="40MB/s", window="4MiB", limit="8MiB")),
    ],
    ids=["big writes", "small writes", "not paced", "big windows"],
)
def test_the_real_clock_is_not_outrun(tmp_path: Path, piece: int, pacing: Pacing) -> None:
    assert pacing.rate is not None
    size, data = 12_000_000, bytes(piece)
    begin = time.monotonic()
    with pacedio.open(tmp_path / "file", "wb", pacing=pacing) as f:
        for _ in range(size // piece):
            f.write(data)
    seconds = time.monotonic() - begin
    written = size // piece * piece
    assert f.stats.bytes == written
    window = pacing.window if isinstance(pacing.window, int) else 512 * 1024
    assert written <= pacing.rate * seconds + min(window, pacing.rate / 25)
