"""The controller, csrc/control.c, on simulated devices (devices.py): what it is for must hold on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from devices import (
    COPY,
    KIB,
    MB,
    MIB,
    MS,
    SECOND,
    Bucket,
    Changing,
    Contended,
    Device,
    Disk,
    Metered,
    Nvme,
    Run,
    Shared,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pacedio._native import ffi, lib

DEVICES: dict[str, Callable[[], Device]] = {
    "disk with seeks": Disk,
    "SATA SSD": lambda: Device(520e6, 120_000, jitter=0.5),
    "NVMe SSD": Nvme,
    "NFS over 1 GbE": lambda: Device(117e6, MS, jitter=0.3),
    "network volume": lambda: Device(200e6, 2 * MS),
    "network volume far away": lambda: Device(1e9, 20 * MS),
    "USB stick": lambda: Device(20e6, 20 * MS),
    "hard disk behind a slow bus": lambda: Device(150e6, 8 * MS),
    "SD card": lambda: Device(5e6, 50 * MS),
    "shared with a neighbour": lambda: Shared(400e6, 2 * MS, 0.3),
}
devices = pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)

STEADY, STARTING, DRAINING = lib.PIO_STEADY, lib.PIO_STARTING, lib.PIO_DRAINING
LEAST_WINDOW = 64 * KIB


@devices
def test_full_rate_with_few_bytes_in_flight(make: Callable[[], Device]) -> None:
    run = write(make(), 12).converged()
    assert run.efficiency() >= 0.95
    assert run.products() <= 3


@devices
def test_the_start_floods_nobody(make: Callable[[], Device]) -> None:
    device = make()
    first = write(device, 1).moments
    # The first limit, and from then on no more than twice what turns out to be needed.
    assert max(m.in_flight for m in first) <= max(MIB, 3 * device.product(0) + MIB)


def test_a_usb_stick_is_never_asked_for_more_than_the_first_limit() -> None:
    run = write(DEVICES["USB stick"](), 5)
    assert max(m.in_flight for m in run.moments) <= MIB
    assert run.efficiency() >= 0.95


def test_a_burst_allowance_ends() -> None:
    run = write(Bucket(), 12)
    fast, slow = run.before(SECOND).after(SECOND // 2), run.after(4 * SECOND)
    assert fast.efficiency() >= 0.95
    assert fast.products() <= 3
    assert slow.efficiency() >= 0.95
    assert slow.products() <= 3


@pytest.mark.parametrize("begin", [0, 3, 6])
def test_a_device_that_changes_its_speed(begin: int) -> None:
    run = write(Changing(), 10).after((begin + 2) * SECOND).before((begin + 3) * SECOND)
    assert run.efficiency() >= 0.95
    assert run.products() <= 3


@pytest.mark.parametrize(("before", "after"), [(2, 10), (10, 2)])
def test_a_delay_that_changes_becomes_the_base(before: int, after: int) -> None:
    device = Device(200e6, before * MS)
    run = write(device, 5)
    device.latency = after * MS
    run = write(device, 30, control=run.control, begin=10 * SECOND).after(22 * SECOND)
    assert after * MS <= run.control.base < (after + 1) * MS
    assert run.efficiency() >= 0.95
    assert run.products() <= 3


def longest_delay(run: Run) -> int:
    return max(m.complete - m.now for m in run.moments)


def test_a_device_that_stops_and_goes_hardly_stops() -> None:
    device = Metered()
    run = write(device, 20)
    assert longest_delay(run.before(SECOND)) > 60 * MS
    settled = run.after(4 * SECOND)
    assert settled.efficiency() >= 0.95
    late = sorted(m.complete - m.now for m in settled.moments)
    assert late[len(late) * 99 // 100] < 12 * MS
    # No cap any more: what it delivers evenly is soon taken.
    faster = write(Device(1e9, 200_000), 20, control=run.control, begin=22 * SECOND)
    assert faster.after(12 * SECOND).efficiency() >= 0.95


def test_a_slow_producer_says_nothing_of_the_device() -> None:
    run = write(Device(400e6, 2 * MS), 4)
    before = run.control.rate, run.control.limit
    slow = write(Device(400e6, 2 * MS), 8, producer=lambda _: 50 * MB, control=run.control, begin=5 * SECOND)
    assert slow.bytes() / slow.seconds() == pytest.approx(50 * MB, rel=0.05)
    assert (run.control.rate, run.control.limit) == before
    fast = write(Device(400e6, 2 * MS), 3, control=run.control, begin=13 * SECOND)
    assert fast.efficiency() >= 0.95


def test_a_producer_that_is_slow_from_the_first_byte() -> None:
    run = write(Device(400e6, 2 * MS), 20, producer=lambda _: 10 * MB)
    assert run.control.limit == MIB
    assert run.bytes() / run.seconds() == pytest.approx(10 * MB, rel=0.05)


def test_what_was_learned_long_ago_is_forgotten() -> None:
    run = write(Device(1e9, 20 * MS), 5)
    assert run.control.limit > 16 * MIB
    later = write(Device(20e6, 20 * MS), 5, control=run.control, begin=120 * SECOND)
    assert max(m.in_flight for m in later.moments[2:]) <= MIB


@devices
def test_drains_are_short(make: Callable[[], Device]) -> None:
    run = write(make(), 60).converged()
    small = [
        b.now - a.now for a, b in zip(run.moments, run.moments[1:], strict=False) if a.limit != a.in_flight <= 64 * KIB
    ]
    assert run.efficiency() >= 0.95
    assert sum(small) <= 0.02 * 60 * SECOND


# ---- politeness


@devices
def test_polite_leaves_a_third(make: Callable[[], Device]) -> None:
    run = write(make(), 9, polite=True).after(3 * SECOND)
    assert 0.5 <= run.efficiency() <= 0.8
    steady = sorted(m.in_flight / m.product for m in run.moments)
    assert steady[len(steady) * 9 // 10] <= 2


@pytest.mark.parametrize("queued", [1, 2, 8])
def test_polite_gives_way_and_comes_back(queued: int) -> None:
    begin, end = 4 * SECOND, 20 * SECOND
    run = write(Contended(400e6, 2 * MS, queued * MIB, begin, end), 26, polite=True)
    alone = run.before(begin).after(2 * SECOND)
    together = run.after(begin + SECOND).before(end)
    again = run.after(end + 3 * SECOND)
    assert alone.efficiency() >= 0.5
    assert together.queued() <= 0.25 * (together.queued() + queued * MIB)
    rate = together.bytes() / together.seconds()
    assert 0.02 * 400e6 <= rate <= 0.25 * 400e6  # it never stops
    assert again.efficiency() >= 0.5


def test_pressure_of_others_is_told_from_our_own() -> None:
    def after(stalled: float, own: float, times: int = 20) -> int:
        control = ffi.new("pio_control *")
        lib.pio_control_init(control)
        for _ in range(times):
            lib.pio_control_pressure(control, round(stalled * 100 * MS), round(own * 100 * MS), 100 * MS)
        return int(control.share)

    untouched = after(0, 0)
    assert after(0.5, 0.5) == untouched  # all of it is ours
    assert after(0.52, 0.5) == untouched  # a 25th of what is left
    assert after(1, 0.95) == untouched  # nothing can be told
    assert after(0.3, 0) == after(0.8, 0.5) == 1024 // 16  # down to the floor, and no further
    assert 1024 // 16 < after(0.3, 0, times=1) < untouched


def test_a_polite_writer_beside_one_that_is_not_learns_from_it() -> None:
    device = Device(400e6, 2 * MS)
    run = write(device, 3)
    assert int(lib.pio_control_rate(run.control, True)) == pytest.approx(0.65 * 400e6, rel=0.1)
    assert lib.pio_control_limit(run.control, True) < lib.pio_control_limit(run.control, False)


# ---- whatever comes


samples = st.lists(
    st.tuples(
        st.integers(4096, 16 * MIB),  # bytes
        st.integers(0, 10**10),  # until it is started
        st.integers(0, 10**10),  # from there to its completion
        st.integers(0, 256 * MIB),  # in flight beside it
        st.booleans(),  # blocked
        st.booleans(),  # polite
    ),
    max_size=60,
)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(samples, st.integers(0, 10**15))
def test_limits_windows_and_rates_stay_in_their_bounds(sequence: list[Any], now: int) -> None:
    control = ffi.new("pio_control *")
    lib.pio_control_init(control)
    for size, wait, took, beside, blocked, polite in sequence:
        now += wait
        stamp = ffi.new("pio_stamp *")
        lib.pio_control_started(control, now, size, size + beside, 0, now - took, polite, polite, stamp)
        now += took
        lib.pio_control_completed(control, now, stamp, blocked, polite)
        assert LEAST_WINDOW <= control.window <= MIB
        assert control.window & (control.window - 1) == 0
        assert 2 * LEAST_WINDOW <= control.limit <= 128 * MIB
        assert control.base >= 0
        assert control.rate >= 0
        assert control.phase in (STEADY, STARTING, DRAINING, lib.PIO_PROBING)
        assert 1024 // 16 <= control.share <= 1024
        for asked in (True, False):
            assert 0 < lib.pio_control_limit(control, asked) <= 128 * MIB
            assert LEAST_WINDOW <= lib.pio_control_window(control, asked) <= MIB
        assert lib.pio_control_rate(control, True) >= 0
        assert lib.pio_control_rate(control, False) >= 0
        assert control.delivered > 0


def test_the_simulation_is_deterministic() -> None:
    def moments() -> list[Any]:
        run: Run = write(Nvme(), 0.5)
        return [(m.now, m.in_flight, m.limit) for m in run.moments]

    assert moments() == moments()
    assert COPY > 0
