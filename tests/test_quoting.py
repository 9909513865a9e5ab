"""shell_quote against the printf of coreutils, whose %q is the same style without the outer quotes it can spare."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pacedio.cli.quoting import shell_quote

PRINTF = shutil.which("printf")


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("plain", "'plain'"),
        ("", "''"),
        ("it's", '"it\'s"'),
        ("it's $HOME", "'it'\\''s $HOME'"),
        ("two\nlines", "'two'$'\\n''lines'"),
        ("\n", "''$'\\n'"),
        (os.fsdecode(b"\xff"), "''$'\\377'"),
        ("\x1b[31m", "''$'\\033''[31m'"),
    ],
)
def test_known_names(name: str, quoted: str) -> None:
    assert shell_quote(name) == quoted


def _known_to_both(character: str) -> bool:
    """Assigned long ago: libc's tables and Python's need not be of the same Unicode version."""
    return unicodedata.ucd_3_2_0.category(character) != "Cn"


def _mishandled(name: bytes) -> bool:
    """With an apostrophe in the name and an escape at its end, gnulib carries the state of its first pass into the
    second, and what it prints is not what a shell reads back.
    """
    return b"'" in name and re.search(r"\\([0-7]{3}|[a-z])'$", shell_quote(os.fsdecode(name))) is not None


_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0").filter(_known_to_both), max_size=8)
_bytes = st.binary(max_size=8).filter(lambda name: b"\0" not in name)
_shell = st.text("ab '\"~#{}=@?%$`\\!\n\t\x7f", max_size=6)


@pytest.mark.skipif(not PRINTF, reason="coreutils is not installed")
@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(_text.map(os.fsencode), _bytes, _shell.map(os.fsencode)), min_size=1, max_size=40))
@example(["é\xa0\u200b\xad\u2028\ue000".encode(), b"\xe2\x82", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"'\xc3\xa9"])
def test_same_as_coreutils(names: list[bytes]) -> None:
    assert PRINTF
    names = [name for name in names if not _mishandled(name)]
    assume(names)  # without any, printf prints an empty one
    printed = subprocess.run([PRINTF, "%q\n", *names], check=True, capture_output=True).stdout
    expected = [line if line[:1] in (b"'", b'"') else b"'" + line + b"'" for line in printed.split(b"\n")[:-1]]
    assert [os.fsencode(shell_quote(os.fsdecode(name))) for name in names] == expected


@settings(deadline=None, max_examples=30)
@given(_bytes | _shell.map(os.fsencode) | _text.map(os.fsencode))
def test_a_shell_reads_the_name_back(name: bytes) -> None:
    bash = shutil.which("bash")
    if not bash:
        pytest.skip("bash is not installed")
    script = b"printf %s " + os.fsencode(shell_quote(os.fsdecode(name)))
    assert subprocess.run([bash, "-c", script], check=True, capture_output=True).stdout == name
