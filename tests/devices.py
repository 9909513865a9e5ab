"""Models of storage devices, and of a writer that follows them: a simulation with a clock of its own, which
csrc/control.c takes part in as it is. Times are in ns, sizes in bytes, rates in bytes a second. Nothing is random but
what a fixed seed says.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pacedio._native import ffi, lib

KIB, MIB, MB = 1 << 10, 1 << 20, 10**6
MS, SECOND = 10**6, 10**9

COPY = 5 * 10**9  # a producer that is never the slower side fills windows at this rate
WAKE = 60_000  # from a completion to the moment when its waiter runs
LEAST_WINDOW = 64 * KIB


class Device:
    """Serves one request after the other at `rate`; each completes `latency` after it was served."""

    def __init__(self, rate: float, latency: int, jitter: float = 0.0) -> None:
        self.rate = rate
        self.latency = latency
        self._jitter = jitter
        self._random = random.Random(1)
        self._free = 0

    def submit(self, now: int, size: int) -> int:
        """When a write that is submitted now will be complete."""
        begin = max(now, self._free)
        self._free = begin + self._service(begin, size)
        return self._free + round(self.latency * (1 + self._jitter * self._random.expovariate(1)))

    def _service(self, begin: int, size: int) -> int:
        return round(size * SECOND / self.rate_at(begin))

    def rate_at(self, now: int) -> float:
        return self.rate

    def capacity(self, begin: int, end: int) -> float:
        """The most bytes that it can take in that time."""
        steps = 1000
        return (
            sum(self.rate_at(begin + (end - begin) * i // steps) for i in range(steps)) * (end - begin) / steps / SECOND
        )

    def product(self, now: int) -> float:
        """Bandwidth-delay product: what has to be in flight to keep it busy, with the least windows that there are. The
        delay is that from a start to the moment when the waiter runs."""
        return self.rate_at(now) * (self.latency * (1 + self._jitter) + WAKE) / SECOND + LEAST_WINDOW


class Disk(Device):
    """A disk that leaves the file for its journal every 8 MiB."""

    SEEK, EVERY = 9 * MS, 8 * MIB

    def __init__(self) -> None:
        super().__init__(180e6, 4 * MS)
        self._since = 0

    def _service(self, begin: int, size: int) -> int:
        self._since += size
        seek, self._since = (self.SEEK, self._since - self.EVERY) if self._since >= self.EVERY else (0, self._since)
        return round(size * SECOND / self.rate) + seek

    def product(self, now: int) -> float:
        return self.rate * (self.latency + WAKE) / SECOND + LEAST_WINDOW  # between two seeks

    def rate_at(self, now: int) -> float:
        return self.EVERY / (self.EVERY / self.rate + self.SEEK / SECOND)


class Nvme(Device):
    """Eight channels, over which requests are spread in pieces of 128 KiB."""

    def __init__(self) -> None:
        super().__init__(3.2e9, 120_000)
        self._channels = [0] * 8

    def submit(self, now: int, size: int) -> int:
        end = 0
        for at in range(0, size, 128 * KIB):
            i = min(range(8), key=self._channels.__getitem__)
            piece = min(128 * KIB, size - at)
            self._channels[i] = max(now, self._channels[i]) + round(piece * 8 * SECOND / self.rate)
            end = max(end, self._channels[i])
        return end + 80_000 + round(40_000 * self._random.expovariate(1))

    def product(self, now: int) -> float:
        return 8 * 128 * KIB + self.rate * self.latency / SECOND  # every channel has a piece to do


class Bucket(Device):
    """A network volume: `fast` until the burst is used up, which the rate fills again."""

    def __init__(self) -> None:
        super().__init__(200e6, 2 * MS)
        self.fast, self.burst = 1e9, 1.5e9
        self._tokens, self._at = self.burst, 0

    def _service(self, begin: int, size: int) -> int:
        self._tokens = min(self.burst, self._tokens + (begin - self._at) * self.rate / SECOND)
        seconds = max(size / self.fast, (size - self._tokens) / self.rate)
        self._tokens = max(self._tokens + seconds * self.rate - size, 0)
        self._at = begin + round(seconds * SECOND)
        return round(seconds * SECOND)

    def rate_at(self, now: int) -> float:
        return self.fast if now < self.burst / (self.fast - self.rate) * SECOND else self.rate


class Metered(Device):
    """A control group's io.max: in each tenth of a second 5 MB at full speed, and nothing more until it is over."""

    SLICE, BYTES = SECOND // 10, 5 * MB

    def __init__(self) -> None:
        super().__init__(1e9, 200_000)
        self._slice, self._left = 0, self.BYTES

    def submit(self, now: int, size: int) -> int:
        begin = max(now, self._free)
        if begin // self.SLICE > self._slice:
            self._slice, self._left = begin // self.SLICE, self.BYTES
        if size > self._left:
            self._slice += 1
            self._left = self.BYTES
            begin = self._slice * self.SLICE
        self._left -= size
        self._free = begin + round(size * SECOND / self.rate)
        return self._free + self.latency

    def rate_at(self, now: int) -> float:
        return self.BYTES * SECOND / self.SLICE


class Changing(Device):
    """500 MB/s, after three seconds 100 MB/s, after six 1 GB/s."""

    def __init__(self) -> None:
        super().__init__(500e6, 2 * MS)

    def rate_at(self, now: int) -> float:
        return (500e6, 100e6, 1e9)[min(now // (3 * SECOND), 2)]


class Shared(Device):
    """A device on which somebody else writes 64 KiB at a time, `share` of its rate, whatever comes."""

    def __init__(self, rate: float, latency: int, share: float) -> None:
        super().__init__(rate, latency)
        self.share = share
        self._due = 0

    def submit(self, now: int, size: int) -> int:
        while self._due <= max(now, self._free):
            self._free = max(self._free, self._due) + self._service(self._due, 64 * KIB)
            self._due += round(64 * KIB * SECOND / (self.rate * self.share))
        return super().submit(now, size)

    def capacity(self, begin: int, end: int) -> float:
        return super().capacity(begin, end) * (1 - self.share)


class Contended(Device):
    """A device on which somebody else always has `queued` bytes waiting, between two moments."""

    def __init__(self, rate: float, latency: int, queued: int, begin: int, end: int) -> None:
        super().__init__(rate, latency)
        self.queued, self.begin, self.end = queued, begin, end
        self._queue: deque[tuple[int, bool]] = deque()  # when it will have been served, the other's
        self._others = 0

    def _push(self, now: int, size: int, others: bool) -> int:
        self._free = max(now, self._free) + self._service(now, size)
        self._queue.append((self._free, others))
        return self._free

    def submit(self, now: int, size: int) -> int:
        if self.begin <= now < self.end and not self._others:
            self._fill(now)
        while self._queue and self._queue[0][0] <= now:
            served, others = self._queue.popleft()
            if others:
                self._others -= 64 * KIB
                if served < self.end:
                    self._fill(served)
        return self._push(now, size, False) + self.latency

    def _fill(self, now: int) -> None:
        while self._others < self.queued:
            self._push(now, 64 * KIB, True)
            self._others += 64 * KIB

    def others(self) -> int:
        return self._others


@dataclass
class Moment:
    now: int
    delivered: int  # bytes, by then
    in_flight: int  # right after a window was started
    product: float
    share: float  # of the queue, ours
    limit: int
    window: int
    complete: int  # when that window will be


@dataclass
class Run:
    device: Device
    moments: list[Moment] = field(default_factory=list)
    control: Any = None

    def after(self, begin: int) -> Run:
        return Run(self.device, [m for m in self.moments if m.now >= begin], self.control)

    def before(self, end: int) -> Run:
        return Run(self.device, [m for m in self.moments if m.now < end], self.control)

    def converged(self) -> Run:
        """Without the first two seconds."""
        return self.after(2 * SECOND)

    def bytes(self) -> int:
        return self.moments[-1].delivered - self.moments[0].delivered

    def seconds(self) -> float:
        return (self.moments[-1].now - self.moments[0].now) / SECOND

    def queued(self) -> float:
        """Bytes under writeback, on average over time."""
        return sum(m.window * (m.complete - m.now) for m in self.moments) / SECOND / self.seconds()

    def efficiency(self) -> float:
        return self.bytes() / self.device.capacity(self.moments[0].now, self.moments[-1].now)

    def products(self) -> float:
        """The most in flight, as a multiple of the product at that time."""
        return max(m.in_flight / m.product for m in self.moments)


def write(
    device: Device,
    seconds: float,
    *,
    polite: bool = False,
    producer: Callable[[int], float] = lambda _: COPY,
    begin: int = SECOND,
    control: Any = None,
) -> Run:
    """One writer, as csrc/writer.c does it: fills a window, starts it, and waits for the oldest when the limit is
    reached. `producer`: the rate at which windows are filled at a given time."""
    if control is None:
        control = ffi.new("pio_control *")
        lib.pio_control_init(control)
    lib.pio_control_forget(control, begin)
    rate = ffi.new("pio_rate *")
    now, total, delivered = begin, 0, 0
    started: deque[tuple[Any, int, int]] = deque()  # stamp, completion, size
    run = Run(device, control=control)

    def limit() -> int:
        return int(lib.pio_control_limit(control, polite))

    while now < begin + seconds * SECOND:
        window = int(lib.pio_control_window(control, polite))
        while started and total + window > limit():
            stamp, complete, size = started.popleft()
            blocked = complete > now
            if blocked:
                now = complete + WAKE
            total -= size
            delivered += size
            lib.pio_control_completed(control, now, stamp, blocked, polite)
        held_back = False
        if cap := lib.pio_control_rate(control, polite):
            lib.pio_rate_set(rate, window, cap)
            if not polite:
                rate.burst = 2 * window
            delay = lib.pio_rate_delay(rate, now, window // 2 if polite else window)
            held_back = delay > 0 and not polite
            now += delay + WAKE if delay else 0
            lib.pio_rate_accepted(rate, now, window)
        granted = now
        now += round(window * SECOND / producer(now))
        total += window
        stamp = ffi.new("pio_stamp *")
        lib.pio_control_started(control, now, window, total, 0, granted, polite, held_back, stamp)
        at = now - begin  # devices begin at zero
        complete = device.submit(at, window)
        started.append((stamp, begin + complete, window))
        others = device.others() if isinstance(device, Contended) else 0
        run.moments.append(
            Moment(
                at, delivered, total, device.product(at), total / (total + others), int(control.limit), window, complete
            )
        )
    return run
