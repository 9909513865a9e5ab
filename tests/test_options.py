"""The option parser against getopt(1) of util-linux, which is getopt_long(3)."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pacedio.cli.options import NO_ARGUMENT, Option, UsageError, parse
from pacedio.cli.pacedcp import _OPTIONS

GETOPT = shutil.which("getopt")
THEIRS = [option for option in _OPTIONS if not option.ours]

Found = list[tuple[str, str]]


def ours(arguments: Sequence[str]) -> Found | str:
    """Names and arguments, operands without a name; or the message."""
    try:
        return [
            ((option.name or option.letters) if option else "", value or "")
            for option, value in parse(arguments, THEIRS)
        ]
    except UsageError as mistake:
        return str(mistake)


def getopts(arguments: Sequence[str]) -> Found | str:
    assert GETOPT
    letters = "".join(letter + ":" * option.argument for option in THEIRS for letter in option.letters)
    names = ",".join(option.name + ":" * option.argument for option in THEIRS if option.name)
    command = [GETOPT, "--name", "x", "--options", letters, "--longoptions", names, "--", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.split("\n", 1)[0].removeprefix("x: ")
    words = shlex.split(done.stdout)
    found: Found = []
    while (word := words.pop(0)) != "--":
        option = next(o for o in THEIRS if word == f"--{o.name}" or (word[1] != "-" and word[1] in o.letters))
        found.append((option.name or option.letters, "" if option.argument == NO_ARGUMENT else words.pop(0)))
    return found + [("", operand) for operand in words]


_names = st.sampled_from([option.name for option in THEIRS if option.name])
_words = st.one_of(
    st.sampled_from(["--", "-", "a", "", "-t", "-vt", "--no", "--s", "-W", "--=x"]),
    _names.flatmap(lambda name: st.integers(1, len(name)).map(lambda length: f"--{name[:length]}")),
    _names.map(lambda name: f"--{name}=x"),
    st.text("vfpTtrSx-=", min_size=1, max_size=4).map(lambda letters: f"-{letters}"),
)


@pytest.mark.skipif(not GETOPT, reason="getopt(1) is not installed")
@settings(deadline=None, max_examples=150)
@given(st.lists(_words, max_size=5))
@example(["--no-t", "a", "-vtx", "b", "--", "-v"])
@example(["--ver"])
@example(["--target-directory"])
@example(["a", "-t"])
def test_same_as_getopt_long(arguments: list[str]) -> None:
    assert ours(arguments) == getopts(arguments)


@pytest.mark.skipif(not GETOPT, reason="getopt(1) is not installed")
@pytest.mark.parametrize("arguments", [["a", "-v"], ["-v", "a", "--", "-v"], ["-v", "--", "a"]])
def test_posixly_correct(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSIXLY_CORRECT", "1")
    assert ours(arguments) == getopts(arguments)


def test_ours_are_not_abbreviated() -> None:
    table = [Option("", "strip"), Option("", "stats", ours=True)]
    names = [option.name for option, _ in parse(["--st", "--stats"], table) if option]
    assert names == ["strip", "stats"]
    with pytest.raises(UsageError, match=r"^unrecognized option '--stat'$"):
        list(parse(["--stat"], table))


def test_options_before_a_mistake_come_first() -> None:
    found = parse(["--help", "--nonsense"], THEIRS)
    option, _ = next(found)
    assert option
    assert option.name == "help"
    with pytest.raises(UsageError):
        next(found)
