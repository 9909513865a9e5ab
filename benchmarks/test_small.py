"""The comparisons of small.py for pytest-benchmark: `pytest benchmarks/test_small.py --benchmark-group-by=param:name`.

pytest-benchmark measures one side after the other; the verdict comes from batches that take turns.
"""

from __future__ import annotations

import os

import pytest
import small
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.parametrize("side", small.SIDES)
@pytest.mark.parametrize("name", small.CASES)
def test_speed(benchmark: BenchmarkFixture, name: str, side: str) -> None:
    case = small.CASES[name]
    with small.place(case, os.curdir) as directory:
        batch = case.make(directory, small.SIDES[side])
        try:
            assert benchmark(batch) > 0
        finally:
            batch.close()


@pytest.mark.parametrize("name", [name for name, case in small.CASES.items() if case.least_rate])
def test_rate(name: str) -> None:
    case = small.CASES[name]
    assert case.least_rate
    assert 1 / small.time_ratio(small.compare(case, os.curdir, batches=60)) >= case.least_rate


@pytest.mark.parametrize("name", [name for name, case in small.CASES.items() if case.most_time])
def test_time(name: str) -> None:
    case = small.CASES[name]
    assert case.most_time
    assert small.time_ratio(small.compare(case, os.curdir, batches=60)) <= case.most_time


@pytest.mark.parametrize("name", ["write-64", "write-4k", "text-64"])
def test_same_bytes(name: str) -> None:
    """What is compared is the same work."""
    contents = []
    for opener in small.SIDES.values():
        with small.place(small.CASES[name], os.curdir) as directory:
            batch = small.CASES[name].make(directory, opener)
            batch()
            batch.close()
            with open(os.path.join(directory, "writes"), "rb") as f:
                contents.append(f.read())
    assert contents[0] == contents[1]
    assert contents[0]
