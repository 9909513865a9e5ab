"""The window planner against a model that knows single pages and nothing of ranges."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from pacedio._native import ffi, lib

START, WAIT, DROP, DONE = lib.PIO_START, lib.PIO_WAIT, lib.PIO_DROP, lib.PIO_DONE
RANGES, WINDOWS = lib.PIO_RANGES, lib.PIO_WINDOWS
MOST = 2**63 - 1

checked = settings(
    max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Planned:
    """A file that is written as the planner says. Every answer is checked against single pages: which are dirty, and
    which windows were started and not waited for.
    """

    def __init__(self, page: int, window: int, limit: int) -> None:
        self.page, self.window, self.limit = page, window, limit
        self.plan = ffi.new("pio_window *")
        lib.pio_window_init(self.plan, page, window, limit)
        self.dirty: set[int] = set()
        self.started: deque[set[int]] = deque()
        self.to_drop: set[int] = set()
        self.position = 0
        self.starts: dict[int, int] = {}  # of each page

    def pages(self, off: int, length: int) -> set[int]:
        return set(range(off // self.page, -(-(off + length) // self.page)))

    def under_writeback(self) -> set[int]:
        return set().union(*self.started)

    def hot_page(self) -> int | None:
        """The unfinished page at the position, where the dirty range that it is in ends."""
        hot = self.position // self.page
        unfinished = self.position % self.page != 0 and hot in self.dirty and hot + 1 not in self.dirty
        return hot if unfinished else None

    def check(self) -> None:
        plan = self.plan
        ranges = [(plan.dirty[i].off, plan.dirty[i].len) for i in range(plan.dirty_count)]
        for off, length in ranges:
            assert off % self.page == 0
            assert length > 0
        for (off, length), (following, _) in itertools.pairwise(ranges):
            assert off + length < following
        assert plan.dirty_count <= RANGES
        assert set().union(*(self.pages(*r) for r in ranges)) == self.dirty
        ring = [plan.started[(plan.started_head + i) % WINDOWS] for i in range(plan.started_count)]
        assert plan.started_count <= WINDOWS
        assert [self.pages(r.off, r.len) for r in ring if r.len] == list(self.started)
        assert plan.dirty_bytes == len(self.dirty) * self.page
        assert plan.started_bytes == sum(map(len, self.started)) * self.page
        assert plan.dirty_bytes + plan.started_bytes <= plan.most_in_flight <= self.limit

    def carry_out(self, action: int, out: Any) -> None:
        if action != DROP:
            # All that completed was handed out, but for what is dirty or under writeback again.
            assert self.to_drop <= self.dirty | self.under_writeback()
            self.to_drop = set()
        if action == DONE:
            return
        assert out.len > 0
        assert out.off % self.page == out.len % self.page == 0
        assert out.off // self.window == (out.off + out.len - 1) // self.window
        pages = self.pages(out.off, out.len)
        if action == START:
            assert pages <= self.dirty
            self.dirty -= pages
            self.started.append(pages)
            for page in pages:
                self.starts[page] = self.starts.get(page, 0) + 1
        elif action == WAIT:
            assert pages == self.started.popleft()
            self.to_drop = set(pages)
        else:
            assert action == DROP
            assert pages <= self.to_drop
            assert not pages & (self.dirty | self.under_writeback())
            self.to_drop -= pages
        self.check()

    def most_actions(self) -> int:
        """Each takes a page at least one step on its way."""
        return 3 * len(self.dirty) + 2 * sum(map(len, self.started)) + len(self.to_drop)

    def until_done(self, step: Any) -> list[int]:
        """The actions, which must end."""
        actions: list[int] = []
        out = ffi.new("pio_range *")
        bound = self.most_actions()
        while True:
            action = step(self.plan, out)
            self.carry_out(action, out)
            if action == DONE:
                return actions
            actions.append(action)
            assert len(actions) <= bound

    def make_room(self, off: int) -> int:
        out = ffi.new("pio_range *")
        bound = self.most_actions()
        while (room := lib.pio_window_room(self.plan, off)) == 0:
            hot = self.hot_page()
            before = set(self.dirty)
            none_started = not self.started
            action = lib.pio_window_make_room(self.plan, off, out)
            assert action != DONE
            self.carry_out(action, out)
            if action == START and hot is not None and hot not in self.dirty and off == self.position:
                assert none_started
                assert before == {hot}
            bound -= 1
            assert bound >= 0
        return int(room)

    def keep_up(self) -> None:
        hot = self.hot_page()
        before = self.dirty - {hot}
        self.until_done(lib.pio_window_keep_up)
        if hot is not None:
            assert hot in self.dirty
        if len(before) * self.page < self.window:
            # Nothing is started but what reaches a boundary.
            per_window = self.window // self.page
            for page in before - self.dirty:
                assert set(range(page, (page // per_window + 1) * per_window)) <= before
        # What is left is less than a window, the hot page aside, and completes none.
        cold = self.dirty - {hot}
        assert len(cold) * self.page < self.window
        for page in cold:
            first = page * self.page // self.window * self.window // self.page
            last = first + self.window // self.page - 1
            assert not set(range(page, last + 1)) <= cold

    def write(self, off: int, length: int, short: int = MOST) -> None:
        """As the writer does, with write calls that take no more than `short` bytes."""
        while length > 0:
            room = self.make_room(off)
            n = min(length, room, short)
            assert off // self.window == (off + n - 1) // self.window
            lib.pio_window_wrote(self.plan, off, n)
            self.position = off + n
            self.dirty |= self.pages(off, n)
            self.check()
            self.keep_up()
            off += n
            length -= n

    def truncate(self, size: int) -> None:
        lib.pio_window_truncate(self.plan, size)
        beyond = -(-size // self.page)
        self.dirty = {page for page in self.dirty if page < beyond}
        self.started = deque(kept for window in self.started if (kept := {page for page in window if page < beyond}))
        self.to_drop = {page for page in self.to_drop if page < beyond}
        self.check()

    def finish(self) -> None:
        self.until_done(lib.pio_window_finish)
        assert not self.dirty
        assert not self.started
        assert not self.to_drop

    def start_rest(self) -> None:
        waits_before = len(self.started)
        actions = self.until_done(lib.pio_window_start_rest)
        assert not self.dirty
        if waits_before + actions.count(START) <= WINDOWS:
            assert WAIT not in actions


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Page, window and limit in bytes."""
    page = draw(st.sampled_from([1, 4, 4096]))
    pages = draw(st.sampled_from([1, 2, 3, 4, 8, 50, 128]))
    window = page * pages
    windows = draw(st.sampled_from([1, 1, 2, 3, 4, 300 if pages < 3 else 5]))
    return page, window, window * windows + draw(st.integers(0, page - 1))


@st.composite
def plans(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[tuple[Any, ...]]]:
    page, window, limit = draw(shapes())
    near = st.integers(0, min(12 * window, 200 * page))
    far = st.sampled_from([2**40, 2**40 + window - 1, 2**62 + page])
    lengths = st.one_of(st.integers(1, 3 * page), st.integers(1, 2 * window), st.integers(1, limit + 2 * window))
    step = st.one_of(
        st.tuples(st.just("write"), st.one_of(near, near, near, far), lengths),
        st.tuples(st.just("on"), lengths),
        st.tuples(st.just("on"), lengths, st.integers(1, 2 * page)),
        # One byte in every other page or further apart: ranges that are not joined.
        st.tuples(st.just("scatter"), near, st.integers(1, 2 * RANGES), st.integers(2, 5)),
        st.tuples(st.just("truncate"), near),
        st.tuples(st.sampled_from(["finish", "rest"])),
    )
    return (page, window, limit), draw(st.lists(step, max_size=25))


@checked
@given(plans())
@example(((4096, 524288, 2097152), [("scatter", 5000, 40, 2), ("on", 3_000_000), ("write", 0, 30), ("finish",)]))
@example(((1, 1, 300), [("on", 290), ("truncate", 0), ("on", 2), ("finish",)]))
def test_every_page_is_started_waited_for_and_dropped(
    plan: tuple[tuple[int, int, int], list[tuple[Any, ...]]],
) -> None:
    shape, steps = plan
    file = Planned(*shape)
    page = file.page
    for what, *how in steps:
        if what == "write":
            file.write(*how)
        elif what == "on":
            if len(how) == 2:
                how[0] = min(how[0], 100 * how[1])
            file.write(file.position, *how)
        elif what == "scatter":
            off, count, stride = how
            for i in range(count):
                file.write(off + i * stride * page, 1)
            if file.plan.dirty_count == RANGES:
                event("all ranges taken")
        elif what == "truncate":
            file.truncate(*how)
        elif what == "finish":
            file.finish()
        else:
            file.start_rest()
        if file.plan.started_count == WINDOWS:
            event("all windows taken")
    file.finish()


@checked
@given(shapes(), st.integers(0, 10_000), st.lists(st.integers(1, 100_000), min_size=1, max_size=60))
def test_a_sequential_writer_starts_each_page_once(shape: tuple[int, int, int], begin: int, sizes: list[int]) -> None:
    file = Planned(*shape)
    off = begin
    for size in sizes:
        length = min(size, 2 * file.window)
        file.write(off, length)
        off += length
    file.finish()
    assert set(file.starts) == file.pages(begin, off - begin)
    assert set(file.starts.values()) == {1}


@pytest.mark.parametrize("piece", [1000, 4096, 10_000, 131_072, 1 << 20])
def test_a_sequential_writer_has_no_more_windows_than_the_file(piece: int) -> None:
    """With the sizes that are the default: one start, one wait and one drop a window."""
    file = Planned(4096, 512 << 10, 2 << 20)
    actions: list[int] = []
    carry_out = file.carry_out

    def recorded(action: int, out: Any) -> None:
        actions.append(action)
        carry_out(action, out)

    file.carry_out = recorded  # type: ignore[method-assign]
    for off in range(0, 2 << 20, piece):
        file.write(off, min(piece, (2 << 20) - off))
    file.finish()
    assert [actions.count(kind) for kind in (START, WAIT, DROP)] == [4, 4, 4]


def test_windows_emptied_by_a_truncation_take_no_place() -> None:
    file = Planned(4096, 4096, 300 * 4096)
    for page in range(WINDOWS):
        file.write(page * 4096, 4096)
    assert file.plan.started_count == WINDOWS
    file.truncate(0)
    file.write(0, 4096)
    assert not file.dirty
    file.write(8192, 100)
    file.finish()


def test_more_windows_than_places_wait_for_the_oldest() -> None:
    file = Planned(4096, 4096, 300 * 4096)
    for page in range(WINDOWS + 10):
        file.write(page * 4096, 4096)
    assert file.plan.started_count == WINDOWS
    assert file.started[0] == {10}
    file.write(4096 * 1000, 1)
    file.start_rest()
    file.finish()


@pytest.mark.parametrize("off", [MOST - 10, MOST - 4095, MOST - 4096, MOST - 4097, MOST - 600_000, MOST])
def test_the_end_of_what_an_offset_can_say(off: int) -> None:
    """XFS, Btrfs and tmpfs have files that long."""
    plan = ffi.new("pio_window *")
    lib.pio_window_init(plan, 4096, 524288, 2097152)
    out = ffi.new("pio_range *")
    room = lib.pio_window_room(plan, off)
    assert 0 < room <= 524288
    n = min(room, MOST - off)
    if n:
        lib.pio_window_wrote(plan, off, n)
    pages = range(off // 4096, -(-(off + n) // 4096))
    counted = len([page for page in pages if page < MOST // 4096]) if n else 0
    assert plan.dirty_bytes == counted * 4096
    started = 0
    for _ in range(10):
        action = lib.pio_window_finish(plan, out)
        if action == DONE:
            break
        assert out.off > 0
        assert out.len > 0
        started += out.len if action == START else 0
    else:
        pytest.fail("it does not end")
    assert started == counted * 4096


def test_a_write_that_landed_elsewhere_counts_more_rather_than_less() -> None:
    """Another appender moved the end of the file, so there was no room for one more range."""
    for where in (0, 7, 2 * RANGES + 3):
        file = Planned(4096, 4096 * 128, 4096 * 512)
        for i in range(RANGES):
            file.write((4 + 2 * i) * 4096, 1)
        assert file.plan.dirty_count == RANGES
        lib.pio_window_wrote(file.plan, where * 4096, 1)
        plan = file.plan
        ranges = [(plan.dirty[i].off, plan.dirty[i].len) for i in range(plan.dirty_count)]
        covered: set[int] = set().union(*(file.pages(*r) for r in ranges))
        assert covered >= file.dirty | {where}
        assert plan.dirty_bytes == sum(length for _, length in ranges) == len(covered) * 4096
        assert all(a + b < c for (a, b), (c, _) in itertools.pairwise(ranges))
        file.dirty = covered
        file.finish()
