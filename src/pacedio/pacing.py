"""How a file is paced: `Pacing`, its presets, and sizes and rates as people write them."""

# `import pacedio` must stay cheap, so this module imports nothing that the interpreter has not loaded already: no
# dataclasses, enum, re or typing.
from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

ENGINES = ("auto", "uncached", "range", "advise", "datasync", "none")
IO_CLASSES = ("idle", "best-effort")
SHARES = ("host", "process")
PREALLOCATE = ("auto", "off")

_KIB = 1024
_MOST = 2**63 - 1  # off_t
_PAGE = os.sysconf("SC_PAGE_SIZE")

_WINDOW = 512 * _KIB
_WINDOWS = 256  # PIO_WINDOWS in csrc/pacedio.cdef.h: started windows that a writer keeps apart

_PREFIXES = "KMGTP"
_BINARY = {"B": 1, **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate(_PREFIXES)}}
_DECIMAL = {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate(_PREFIXES)}
_UNITS = {
    "": 1,
    **{prefix: 1024 ** (i + 1) for i, prefix in enumerate(_PREFIXES)},
    **{unit.upper(): size for unit, size in _BINARY.items()},
    **_DECIMAL,
}


def parse_size(value: int | str) -> int:
    """The number of bytes that `value` says.

    An int is bytes. A str is a decimal number and a unit: `B` or none for bytes; `K`, `M`, `G`, `T`, `P` and `KiB`,
    `MiB`... for powers of 1024; `KB`, `MB`... for powers of 1000, as GNU coreutils reads them. Space around number and
    unit is ignored, and so is case, except that a small `b` after a capital (`Mb`) or alone is refused: it may mean
    bits, or dd's blocks. So "512KiB", "8M", "1.5GiB", "64k", "100 MB", "4096" and "4096B" are sizes.

    Raises `ValueError`, which names the value, unless it is a whole number of bytes from 1 to 2**63 - 1, and
    `TypeError` for what is neither int nor str (bool included).
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"a size must be int or str, not {type(value).__name__}")
    if isinstance(value, int):
        return _checked(value, "size", value)
    numerator, denominator = _parse(value, value, "size")
    if numerator % denominator:
        raise ValueError(f"not a whole number of bytes: {value!r}")
    return _checked(numerator // denominator, "size", value)


def parse_rate(value: int | float | str) -> int:
    """The number of bytes a second that `value` says: a number of them, or a str as `parse_size` reads it, which may
    end in `/s` or `/sec`: "100MB/s", "1.5 GiB/sec", "8M". A fraction of a byte is dropped.

    Raises `ValueError`, which names the value, unless that is from 1 to 2**63 - 1, and `TypeError` for what is neither
    int, float nor str (bool included).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"a rate must be int, float or str, not {type(value).__name__}")
    if isinstance(value, int):
        return _checked(value, "rate", value)
    if isinstance(value, float):
        if value - value != 0:  # nan and the infinities, without the math module
            raise ValueError(f"a rate must be finite: {value!r}")
        return _checked(int(value), "rate", value)
    text, slash, per = value.partition("/")
    if slash and per.strip() not in ("s", "sec"):
        raise _not_a("rate", value)
    numerator, denominator = _parse(text, value, "rate")
    return _checked(numerator // denominator, "rate", value)


def format_size(size: int, *, exact: bool = False) -> str:
    """`size` bytes as people read them, in powers of 1024 with at most one decimal: "512 KiB", "1.5 GiB", "999 B".

    With `exact` nothing is rounded, and `parse_size` gives back the same number (from 1): the shortest whole number of
    a unit, which may be a power of 1000: "1536 MiB", "100 MB", "1001 B".
    """
    if exact:
        return min(
            (f"{size // unit} {name}" for name, unit in {**_BINARY, **_DECIMAL}.items() if size % unit == 0),
            key=lambda text: len(text.split()[0]),
        )
    name, tenths = next(
        (name, tenths)
        for name, unit in _BINARY.items()
        if (tenths := (size * 10 + unit // 2) // unit) < 10240 or name == "PiB"
    )
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth} {name}" if tenth else f"{whole} {name}"


def format_seconds(seconds: float) -> str:
    """A time as people read it: "9.2 ms" below a second, "1.21 s" from there on."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _parse(text: str, value: str, what: str) -> tuple[int, int]:
    """The bytes that `text` says, as numerator and denominator: no float, which would round."""
    text = text.strip()
    number = text.rstrip("BbIiKkMmGgTtPp")
    unit = text[len(number) :]
    whole, point, fraction = number.rstrip().partition(".")
    digits = whole + fraction
    if digits.startswith("-"):
        raise ValueError(f"a {what} must be positive: {value!r}")
    # isdigit alone also accepts superscripts and other scripts' digits. 2**63 has 19 digits; a number of more than 4300
    # would make int() complain in words of its own.
    if not (digits.isascii() and digits.isdigit()) or (point and not fraction) or len(digits) > 100:
        raise _not_a(what, value)
    if unit.upper() not in _UNITS or (unit.endswith("b") and (unit == "b" or not unit.islower())):
        raise _not_a(what, value)
    return int(digits) * _UNITS[unit.upper()], 10 ** len(fraction)


def _not_a(what: str, value: str) -> ValueError:
    example = "512KiB, 8M or 1.5GiB" if what == "size" else "100MB/s or 8M"
    return ValueError(f"not a {what}: {value!r} (write it like {example})")


def _checked(number: int, what: str, value: object) -> int:
    if number < 1:
        raise ValueError(f"a {what} must be at least 1 byte{'' if what == 'size' else ' a second'}: {value!r}")
    if number > _MOST:
        raise ValueError(f"a {what} must be below 2**63 bytes: {value!r}")
    return number


def _windows_of(window: int | str | None, limit: int | str | None) -> tuple[int | str, int | str]:
    """Window and limit in bytes or "auto", whichever of them was given."""
    if limit is None or limit == "auto":
        if window is None or window == "auto":
            return "auto", "auto"
        return _checked_window(window), "auto"
    most = parse_size(limit)
    size = _window_for(most) if window is None or window == "auto" else _checked_window(window)
    if most < size:
        if window is None or window == "auto":
            raise ValueError(f"limit must be at least one page, {_PAGE} bytes: {limit!r}")
        raise ValueError(f"window must not be above limit: {window!r} > {limit!r}")
    if most > _WINDOWS * size:
        raise ValueError(f"limit must be at most {_WINDOWS} windows, raise window: {limit!r} > {_WINDOWS} * {window!r}")
    return size, most


def _checked_window(window: int | str) -> int:
    size = parse_size(window)
    if size % _PAGE:
        raise ValueError(f"window must be a multiple of the page size, {_PAGE} bytes: {window!r}")
    return size


def _window_for(limit: int) -> int:
    """The window that goes with a limit: 512 KiB, but at most a quarter of it, so that the device has one to write
    while another fills, at least 1/256 of it, and whole pages.
    """
    most = max(_PAGE, limit // 4 // _PAGE * _PAGE)
    least = -(-limit // _WINDOWS // _PAGE) * _PAGE
    return max(min(_WINDOW, most), least)


def _preallocate_of(value: int | str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"preallocate must be int or str, not {type(value).__name__}")
    if value in PREALLOCATE:
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"preallocate must be {', '.join(PREALLOCATE)} or a size: {error}") from None


class Pacing:
    """How a file is paced. Frozen, hashable, compares by value; sizes and rates are kept in bytes.

    window
        Bytes that are started, waited for and dropped as a unit, a multiple of the page size. Default: "auto", 64 KiB
        to 1 MiB as the device needs it; if only `limit` is given in bytes, 512 KiB, but at most a quarter and at
        least a 256th of it.
    limit
        The most bytes in flight. "auto", the default: as few as keep the device busy, found out while writing, in one
        budget with all other writers to the same device whose limit is "auto", and at most a quarter of the background
        threshold (`pacedio.observe.limit_cap`) if that is more than a window (two, where `window` is in bytes). In
        bytes: of this file alone, at least one window, at most 256. A neighbour's fsync waits for the bytes in flight,
        so less is kinder; too little leaves the device idle between windows.
    polite
        Whether to give way to neighbours: takes at most 65 % of what the device delivers, less when its windows take
        longer than they do on an idle device or others are stalled (/proc/pressure/io), down to a sixteenth, and
        recovers within two seconds. Other writers of the budget come first, for up to 250 ms. A `limit` in bytes holds
        beside the automatic one, which is then shared as well.
    share
        Whom the budget of an automatic limit is shared with: "host", up to 64 processes of this user on this host (or
        in this container), through files in /dev/shm; "process", only this process. Without a directory of its user's
        own there, or a place among the 64, a process is alone anyway, and `stats` says so.
    rate
        The most bytes a second that are accepted from the caller, or None for no cap.
    engine
        The way windows are started and waited for: "auto" chooses and verifies one for the file system, "uncached",
        "range", "advise", "datasync" name one (which still gives way to the next where its system call fails), "none"
        does not pace.
    drop_cache
        Whether completed windows are dropped from the page cache.
    io_class
        The I/O class that windows are submitted in (ioprio_set(2)): "idle", "best-effort", or None for the calling
        thread's own. Only some I/O schedulers look at it. The realtime class is not offered: it needs privilege, and
        starves neighbours.
    preallocate
        Whether blocks are allocated ahead of the writer (fallocate(2)), so that files written side by side do not end
        up in pieces: "auto", where it is known to help (ext4, xfs and btrfs without compression), from the first
        window on and by at most a 64th of the free space; "off"; or the expected final size, which is allocated at
        once with the first window. What is left over is released when the file is closed, and after a failure.

    Sizes and rates are given as `parse_size` and `parse_rate` read them. Raises `ValueError`, which names the
    offending value as it was given, and `TypeError`.
    """

    __slots__ = (
        "drop_cache",
        "engine",
        "io_class",
        "limit",
        "polite",
        "preallocate",
        "rate",
        "share",
        "window",
    )

    window: int | str
    limit: int | str
    rate: int | None
    engine: str
    drop_cache: bool
    io_class: str | None
    polite: bool
    share: str
    preallocate: int | str

    def __init__(
        self,
        *,
        window: int | str | None = None,
        limit: int | str | None = None,
        rate: int | float | str | None = None,
        engine: str = "auto",
        drop_cache: bool = True,
        io_class: str | None = None,
        polite: bool = False,
        share: str = "host",
        preallocate: int | str = "auto",
    ) -> None:
        window, limit = _windows_of(window, limit)
        if not isinstance(engine, str):
            raise TypeError(f"engine must be str, not {type(engine).__name__}")
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}: {engine!r}")
        if not isinstance(drop_cache, bool):
            raise TypeError(f"drop_cache must be bool, not {type(drop_cache).__name__}")
        if io_class is not None and not isinstance(io_class, str):
            raise TypeError(f"io_class must be str or None, not {type(io_class).__name__}")
        if io_class is not None and io_class not in IO_CLASSES:
            raise ValueError(f"io_class must be None or one of {', '.join(IO_CLASSES)}: {io_class!r}")
        if not isinstance(polite, bool):
            raise TypeError(f"polite must be bool, not {type(polite).__name__}")
        if not isinstance(share, str):
            raise TypeError(f"share must be str, not {type(share).__name__}")
        if share not in SHARES:
            raise ValueError(f"share must be one of {', '.join(SHARES)}: {share!r}")
        put = object.__setattr__  # our own refuses
        put(self, "window", window)
        put(self, "limit", limit)
        put(self, "rate", None if rate is None else parse_rate(rate))
        put(self, "engine", engine)
        put(self, "drop_cache", drop_cache)
        put(self, "io_class", io_class)
        put(self, "polite", polite)
        put(self, "share", share)
        put(self, "preallocate", _preallocate_of(preallocate))

    def replace(self, **changes: object) -> Pacing:
        """The same with some arguments changed, and checked anew. What is not named stays as it is: a larger
        `window` may need a larger `limit` beside it, or `limit=None` for the automatic one.
        """
        return _restore({**self._arguments(), **changes})

    def _arguments(self) -> dict[str, object]:
        return {
            "window": self.window,
            "limit": self.limit,
            "rate": self.rate,
            "engine": self.engine,
            "drop_cache": self.drop_cache,
            "io_class": self.io_class,
            "polite": self.polite,
            "share": self.share,
            "preallocate": self.preallocate,
        }

    def __repr__(self) -> str:
        shown = self._arguments()
        for name in ("window", "limit"):
            if isinstance(size := shown[name], int):
                shown[name] = format_size(size, exact=True)
        if self.rate is not None:
            shown["rate"] = f"{format_size(self.rate, exact=True)}/s"
        if isinstance(self.preallocate, int):
            shown["preallocate"] = format_size(self.preallocate, exact=True)
        return f"Pacing({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pacing):
            return NotImplemented
        return self._arguments() == other._arguments()

    def __hash__(self) -> int:
        return hash(tuple(self._arguments().values()))

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self._arguments(),)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Pacing is frozen; replace({name}=...) gives a changed one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("Pacing is frozen")


def _restore(arguments: dict[str, object]) -> Pacing:
    """What pickle and copy call, because they pass no keyword arguments."""
    return Pacing(**arguments)  # type: ignore[arg-type]


BALANCED = Pacing()
"""The default: as few bytes in flight as keep the device busy, pages dropped behind; full speed, and a neighbour's
fsync stays within a few times its quiet latency."""

RECIPE = Pacing(window="8MiB", limit="16MiB", drop_cache=False)
"""8 MiB windows, one behind, pages kept: the widespread recipe (Borg, Redis), here for comparison."""

POLITE = Pacing(polite=True, io_class="idle")
"""Gives way to neighbours, windows submitted in the idle I/O class."""
