from __future__ import annotations

import copy
import os
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacedio._native import lib
from pacedio.pacing import (
    BALANCED,
    ENGINES,
    IO_CLASSES,
    POLITE,
    PREALLOCATE,
    RECIPE,
    SHARES,
    Pacing,
    format_size,
    parse_rate,
    parse_size,
)

PAGE = os.sysconf("SC_PAGE_SIZE")
KIB = 1024
MIB = 1024**2
GIB = 1024**3
MOST = 2**63 - 1

sizes = st.integers(1, MOST) | st.builds(lambda n, k: n * 1024**k, st.integers(1, 8000), st.integers(0, 5))
windows_and_limits = st.tuples(st.integers(1, 4096), st.integers(1, 256)).map(
    lambda of: (of[0] * PAGE, of[0] * of[1] * PAGE)
) | st.tuples(st.just("auto") | st.integers(1, 4096).map(lambda pages: pages * PAGE), st.just("auto"))
pacings = st.builds(
    lambda both, **rest: Pacing(window=both[0], limit=both[1], **rest),
    windows_and_limits,
    rate=st.none() | sizes,
    engine=st.sampled_from(ENGINES),
    drop_cache=st.booleans(),
    io_class=st.none() | st.sampled_from(IO_CLASSES),
    preallocate=st.sampled_from(PREALLOCATE) | sizes,
    polite=st.booleans(),
    share=st.sampled_from(SHARES),
)


def test_bounds_are_those_of_the_c_side() -> None:
    assert Pacing(window=PAGE, limit=PAGE * lib.PIO_WINDOWS).limit == PAGE * lib.PIO_WINDOWS
    with pytest.raises(ValueError, match="raise window"):
        Pacing(window=PAGE, limit=PAGE * lib.PIO_WINDOWS + 1)
    assert lib.pio_page_size() == PAGE


# ---- sizes ----


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (MOST, MOST),
        ("4096", 4096),
        ("4096B", 4096),
        ("512KiB", 512 * KIB),
        ("512kib", 512 * KIB),
        ("512KIB", 512 * KIB),
        ("64k", 64 * KIB),
        ("64K", 64 * KIB),
        ("8M", 8 * MIB),
        ("8m", 8 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (".5GiB", GIB // 2),
        ("1.50G", 3 * GIB // 2),
        ("2T", 2 * 1024**4),
        ("3PiB", 3 * 1024**5),
        ("7KB", 7000),
        ("7kB", 7000),
        ("7kb", 7000),
        ("100 MB", 100 * 1000**2),
        ("1.5GB", 1500 * 1000**2),
        ("1TB", 1000**4),
        ("1PB", 1000**5),
        ("  8 M\t", 8 * MIB),
        ("0001", 1),
        (str(MOST), MOST),
        ("0.5KiB", 512),
    ],
)
def test_parse_size(value: int | str, expected: int) -> None:
    assert parse_size(value) == expected


BAD_TEXT = [
    "",
    " ",
    "K",
    ".",
    "-1",
    "-1K",
    "+1",
    "0",
    "0K",
    "0.0M",
    "12 parsecs",
    "12 K B",
    "1 2",
    "1,5G",
    "1.G",
    "1.2.3",
    "1_000",
    "1e6",
    "0x10",
    "nan",
    "inf",
    "4096b",  # dd's blocks
    "8Mb",  # bits
    "8Kib",
    "8Ki",
    "8E",
    "8KK",
    "²",
    "٣K",
    "8\N{KELVIN SIGN}",  # its lower case is an ASCII k
    str(MOST + 1),
    "8192P",
    "9" * 5000,
    "8M\0",
]


@pytest.mark.parametrize("value", [*BAD_TEXT, "0.1K", "1.5B", "1.5", "8M/s", 0, -1, MOST + 1])
def test_parse_size_names_what_it_refuses(value: int | str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(value))):
        parse_size(value)


@pytest.mark.parametrize("value", [True, False, None, 1.0, b"8M", [8], object()])
def test_parse_size_takes_int_and_str_only(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_size(value)  # type: ignore[arg-type]


@given(st.text() | st.from_regex(r"[0-9. ]{1,6}[ kKmMiIbB]{0,4}", fullmatch=True))
def test_parse_size_refuses_or_gives_a_size(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
        assert 1 <= size <= MOST
    assert refusal is None or repr(text) in refusal


@given(st.integers(1, 9000), st.integers(0, 3), st.sampled_from("KMGTP"), st.sampled_from(["", " "]))
def test_powers_of_1024_and_of_1000(number: int, decimals: int, prefix: str, space: str) -> None:
    power = "KMGTP".index(prefix) + 1
    text = f"{number}.{'0' * decimals}" if decimals else str(number)
    for unit, base in [(prefix, 1024), (f"{prefix}iB", 1024), (f"{prefix}B", 1000)]:
        for spelled in {unit, unit.lower()}:
            if number * base**power <= MOST:
                assert parse_size(f"{text}{space}{spelled}") == number * base**power


# ---- rates ----


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (1.0, 1),
        (1.9, 1),
        (1e9 / 3, 333333333),
        ("100MB/s", 100 * 1000**2),
        ("100 MB /s", 100 * 1000**2),
        ("1.5 GiB/sec", 3 * GIB // 2),
        ("8M", 8 * MIB),
        ("8M/s ", 8 * MIB),
        ("1000/s", 1000),
        ("33.3333333MB/s", 33333333),
    ],
)
def test_parse_rate(value: int | float | str, expected: int) -> None:
    assert parse_rate(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *BAD_TEXT,
        *(f"{text}/s" for text in BAD_TEXT),
        "8M/",
        "8M/min",
        "8M/s/s",
        "8M/s/sec",
        "/s",
        0,
        -1,
        MOST + 1,
        0.0,
        0.5,
        -0.0,
        -1.5,
        1e300,
        float("nan"),
        float("inf"),
        float("-inf"),
        2.0**63,
    ],
)
def test_parse_rate_names_what_it_refuses(value: int | float | str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(value))):
        parse_rate(value)


@pytest.mark.parametrize("value", [True, None, b"8M", 1j])
def test_parse_rate_takes_numbers_and_str_only(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_rate(value)  # type: ignore[arg-type]


# ---- sizes for people ----


@pytest.mark.parametrize(
    ("size", "rounded", "exact"),
    [
        (0, "0 B", "0 B"),
        (1, "1 B", "1 B"),
        (999, "999 B", "999 B"),
        (1000, "1000 B", "1 KB"),
        (1024, "1 KiB", "1 KiB"),
        (1536, "1.5 KiB", "1536 B"),
        (MIB - 1, "1 MiB", "1048575 B"),
        (512 * KIB, "512 KiB", "512 KiB"),
        (3 * GIB // 2, "1.5 GiB", "1536 MiB"),
        (4 * GIB + 123, "4 GiB", "4294967419 B"),
        (100 * 1000**2, "95.4 MiB", "100 MB"),
        (MOST, "8192 PiB", "9223372036854775807 B"),
    ],
)
def test_format_size(size: int, rounded: str, exact: str) -> None:
    assert format_size(size) == rounded
    assert format_size(size, exact=True) == exact


@given(sizes)
def test_an_exact_size_parses_to_itself(size: int) -> None:
    assert parse_size(format_size(size, exact=True)) == size
    assert parse_rate(f"{format_size(size, exact=True)}/s") == size


@given(sizes)
def test_a_rounded_size_is_short_and_near(size: int) -> None:
    number, unit = format_size(size).split()
    assert len(number) <= len("1023.9")
    step = parse_size(f"1{unit}")
    assert abs(float(number) * step - size) <= 0.0501 * step


# ---- Pacing ----


def test_presets() -> None:
    assert Pacing() == BALANCED
    assert (BALANCED.window, BALANCED.limit) == ("auto", "auto")
    assert (BALANCED.rate, BALANCED.engine, BALANCED.drop_cache, BALANCED.io_class) == (None, "auto", True, None)
    assert (BALANCED.polite, BALANCED.share) == (False, "host")
    assert (RECIPE.window, RECIPE.limit, RECIPE.drop_cache) == (8 * MIB, 16 * MIB, False)
    assert (RECIPE.polite, RECIPE.share) == (False, "host")
    assert BALANCED.replace(polite=True, io_class="idle") == POLITE


@pytest.mark.parametrize(
    ("given_", "window", "limit"),
    [
        ({}, "auto", "auto"),
        ({"window": "auto"}, "auto", "auto"),
        ({"limit": "auto"}, "auto", "auto"),
        ({"window": None, "limit": None}, "auto", "auto"),
        ({"window": "auto", "limit": "auto"}, "auto", "auto"),
        ({"window": "8MiB"}, 8 * MIB, "auto"),
        ({"window": PAGE, "limit": "auto"}, PAGE, "auto"),
        ({"window": 64 * KIB, "limit": None}, 64 * KIB, "auto"),
        ({"window": "auto", "limit": "2M"}, 512 * KIB, 2 * MIB),
        ({"window": "auto", "limit": "1GiB"}, 4 * MIB, GIB),
        ({"window": None, "limit": PAGE}, PAGE, PAGE),
        ({"limit": "2M"}, 512 * KIB, 2 * MIB),
        ({"limit": "64M"}, 512 * KIB, 64 * MIB),
        ({"limit": "1M"}, 256 * KIB, MIB),
        ({"limit": PAGE}, PAGE, PAGE),
        ({"limit": PAGE + 1}, PAGE, PAGE + 1),
        ({"limit": "1GiB"}, 4 * MIB, GIB),
        ({"window": "1M", "limit": "1M"}, MIB, MIB),
        ({"window": "1M", "limit": "256M"}, MIB, 256 * MIB),
    ],
)
def test_window_and_limit_go_together(given_: dict[str, int | str | None], window: int | str, limit: int | str) -> None:
    pacing = Pacing(**given_)  # type: ignore[arg-type]
    assert (pacing.window, pacing.limit) == (window, limit)


@given(st.integers(PAGE, MOST))
def test_every_limit_has_a_window(limit: int) -> None:
    pacing = Pacing(limit=limit)
    assert pacing.limit == limit
    assert isinstance(pacing.window, int)
    assert pacing.window % PAGE == 0
    assert pacing.window <= limit <= 256 * pacing.window


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"window": "4M", "limit": "2M"}, ["'4M'", "'2M'"]),
        ({"window": 4 * MIB, "limit": "2048 KiB"}, [str(4 * MIB), "'2048 KiB'"]),
        ({"window": PAGE - 1}, [str(PAGE - 1), f"page size, {PAGE} "]),
        ({"window": f"{PAGE + 1}B"}, [f"'{PAGE + 1}B'", f"page size, {PAGE} "]),
        ({"window": "100KB"}, ["'100KB'"]),
        ({"limit": PAGE - 1}, [str(PAGE - 1), f"one page, {PAGE} "]),
        ({"limit": PAGE - 1, "window": "auto"}, [str(PAGE - 1), f"one page, {PAGE} "]),
        ({"limit": "Auto"}, ["'Auto'"]),
        ({"window": "automatic"}, ["'automatic'"]),
        ({"window": PAGE + 1, "limit": "auto"}, [str(PAGE + 1), f"page size, {PAGE} "]),
        ({"window": PAGE, "limit": 256 * PAGE + 1}, [str(256 * PAGE + 1), str(PAGE), "raise window"]),
        ({"window": "-1"}, ["'-1'"]),
        ({"limit": "12 parsecs"}, ["'12 parsecs'"]),
        ({"limit": 0}, [": 0"]),
        ({"limit": 2**63}, [str(2**63)]),
        ({"rate": 0}, [": 0"]),
        ({"rate": float("nan")}, ["nan"]),
        ({"rate": "-5M/s"}, ["'-5M/s'"]),
        ({"engine": "fast"}, ["'fast'", *ENGINES]),
        ({"engine": "Range"}, ["'Range'"]),
        ({"io_class": "realtime"}, ["'realtime'", *IO_CLASSES]),
        ({"preallocate": "on"}, ["'on'", *PREALLOCATE]),
        ({"preallocate": 0}, ["preallocate", ": 0"]),
        ({"preallocate": "12 parsecs"}, ["preallocate", "'12 parsecs'"]),
        ({"share": "user"}, ["share", "'user'", *SHARES]),
    ],
)
def test_a_bad_value_is_named(arguments: dict[str, object], named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Pacing(**arguments)  # type: ignore[arg-type]
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": 1.5},
        {"window": True},
        {"limit": b"2M"},
        {"limit": 2e6},
        {"rate": True},
        {"rate": b"1M"},
        {"engine": None},
        {"engine": 1},
        {"engine": ["range"]},
        {"drop_cache": 1},
        {"drop_cache": None},
        {"io_class": 3},
        {"io_class": ["idle"]},
        {"preallocate": None},
        {"preallocate": True},
        {"preallocate": 1e9},
        {"preallocate": ["auto"]},
        {"polite": 1},
        {"polite": None},
        {"polite": "yes"},
        {"share": None},
        {"share": True},
        {"share": ["host"]},
        {"speed": "fast"},
    ],
)
def test_a_wrong_type_is_a_type_error(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments)) + "|size|rate"):
        Pacing(**arguments)  # type: ignore[arg-type]


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        Pacing(512 * KIB)  # type: ignore[misc]


def test_frozen() -> None:
    pacing = Pacing()
    for name in ("window", "other"):
        with pytest.raises(AttributeError, match=f"frozen; replace\\({name}="):
            setattr(pacing, name, PAGE)
    with pytest.raises(AttributeError, match="frozen"):
        del pacing.window
    assert pacing == BALANCED
    assert not hasattr(pacing, "__dict__")


@given(pacings)
def test_repr_evaluates(pacing: Pacing) -> None:
    assert eval(repr(pacing), {"Pacing": Pacing}) == pacing


def test_repr_is_readable() -> None:
    assert repr(Pacing(rate="100MB/s")) == (
        "Pacing(window='auto', limit='auto', rate='100 MB/s', engine='auto', drop_cache=True, io_class=None, "
        "polite=False, share='host', preallocate='auto')"
    )
    assert "window='512 KiB', limit='2 MiB'," in repr(Pacing(limit="2M"))
    assert "preallocate='2 GB'" in repr(Pacing(preallocate="2000MB"))


@given(pacings, st.sampled_from(range(pickle.HIGHEST_PROTOCOL + 1)))
def test_copies_are_equal(pacing: Pacing, protocol: int) -> None:
    for other in (pickle.loads(pickle.dumps(pacing, protocol)), copy.copy(pacing), copy.deepcopy(pacing)):
        assert other == pacing
        assert hash(other) == hash(pacing)
        assert repr(other) == repr(pacing)


@given(pacings, pacings)
def test_equal_means_the_same_arguments(one: Pacing, other: Pacing) -> None:
    assert (one == other) == (repr(one) == repr(other))
    assert one != repr(one)


FIXED = Pacing(window="512K", limit="2M")


def test_every_argument_counts_for_equality() -> None:
    all_changed = {
        "window": "1M",
        "limit": "4M",
        "rate": 1,
        "engine": "range",
        "drop_cache": False,
        "io_class": "idle",
        "preallocate": "off",
        "polite": True,
        "share": "process",
    }
    variants = {BALANCED, FIXED} | {FIXED.replace(**{name: value}) for name, value in all_changed.items()}
    assert len(variants) == 2 + len(all_changed)


def test_replace() -> None:
    assert BALANCED.replace() == BALANCED
    changed = RECIPE.replace(rate="50MB/s", engine="datasync")
    assert changed == Pacing(window="8M", limit="16M", rate="50MB/s", engine="datasync", drop_cache=False)
    assert RECIPE.rate is None
    with pytest.raises(ValueError, match="'8M' > 2097152"):
        FIXED.replace(window="8M")
    assert FIXED.replace(window="8M", limit=None) == BALANCED.replace(window="8M") == Pacing(window="8M")
    assert FIXED.replace(limit="auto") == Pacing(window="512K")
    assert BALANCED.replace(limit="2M") == FIXED  # "auto" is the window that goes with it
    with pytest.raises(TypeError, match="speed"):
        BALANCED.replace(speed="fast")


@pytest.mark.parametrize(("given_", "held"), [("auto", "auto"), ("off", "off"), ("1.5GiB", 3 * GIB // 2), (7, 7)])
def test_preallocate(given_: int | str, held: int | str) -> None:
    assert Pacing(preallocate=given_).preallocate == held
    assert BALANCED.preallocate == "auto"


@pytest.mark.parametrize("preset", [BALANCED, RECIPE, POLITE])
def test_presets_are_valid_arguments(preset: Pacing) -> None:
    assert preset.replace(limit=preset.limit) == preset
