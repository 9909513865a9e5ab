"""Command lines as GNU's getopt_long(3) reads them.

The standard library's parsers are near to it but not the same: getopt knows no optional arguments (`--backup[=HOW]`)
before Python 3.14, accepts abbreviations of every long option, and says other things than GNU about mistakes. So this
is getopt_long again, for the commands that stand in for GNU's: operands and options in any order (unless
POSIXLY_CORRECT is set), `-abc` for `-a -b -c`, `--`, `--name=argument`, and long options abbreviated as far as they
stay unambiguous.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_ARGUMENT = 0
REQUIRED_ARGUMENT = 1
OPTIONAL_ARGUMENT = 2


class Option:
    """One option: its letters and its long name, either of which may be empty, and whether it takes an argument.

    One that is `ours` is no option of the GNU command. It is recognized when spelled in full only, so that
    abbreviations mean what they mean there.
    """

    __slots__ = ("argument", "letters", "name", "ours")

    def __init__(self, letters: str, name: str, argument: int = NO_ARGUMENT, *, ours: bool = False) -> None:
        self.letters = letters
        self.name = name
        self.argument = argument
        self.ours = ours


class UsageError(Exception):
    """The command line cannot be understood; the text is GNU's, without the command's name."""


def parse(arguments: Sequence[str], options: Sequence[Option]) -> Iterator[tuple[Option | None, str | None]]:
    """The options in their order, each with its argument or None, then the operands, each as (None, operand).

    Lazy: the options before a mistake are handed out before the mistake is raised, as `UsageError`.
    """
    operands: list[str] = []
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        if word == "--":
            break
        if word.startswith("--"):
            yield _long(word, rest, options)
        elif word.startswith("-") and word != "-":
            yield from _letters(word, rest, options)
        else:
            operands.append(word)
            if "POSIXLY_CORRECT" in os.environ:
                break
    for operand in operands + rest[::-1]:
        yield None, operand


def _long(word: str, rest: list[str], options: Sequence[Option]) -> tuple[Option, str | None]:
    name, equals, value = word[2:].partition("=")
    option = _named(name, word, options)
    if equals:
        if option.argument == NO_ARGUMENT:
            raise UsageError(f"option '--{option.name}' doesn't allow an argument")
        return option, value
    if option.argument != REQUIRED_ARGUMENT:
        return option, None
    if not rest:
        raise UsageError(f"option '--{option.name}' requires an argument")
    return option, rest.pop()


def _named(name: str, word: str, options: Sequence[Option]) -> Option:
    candidates = []
    for option in options:
        if option.name and option.name == name:
            return option
        if option.name.startswith(name) and option.name and not option.ours:
            candidates.append(option)
    if not candidates:
        raise UsageError(f"unrecognized option '{word}'")
    if len(candidates) > 1:
        possibilities = " ".join(f"'--{option.name}'" for option in candidates)
        raise UsageError(f"option '{word}' is ambiguous; possibilities: {possibilities}")
    return candidates[0]


def _letters(word: str, rest: list[str], options: Sequence[Option]) -> Iterator[tuple[Option, str | None]]:
    at = 1
    while at < len(word):
        letter = word[at]
        at += 1
        option = next((option for option in options if letter in option.letters), None)
        if option is None:
            raise UsageError(f"invalid option -- '{letter}'")
        if option.argument == NO_ARGUMENT:
            yield option, None
            continue
        value: str | None = word[at:] or None
        if value is None and option.argument == REQUIRED_ARGUMENT:
            if not rest:
                raise UsageError(f"option requires an argument -- '{letter}'")
            value = rest.pop()
        yield option, value
        return
