"""File names as GNU's commands quote them in messages, so that a name cannot pass for a part of the message or drive
the terminal, and can be pasted back into a shell.
"""

from __future__ import annotations

import os

_ESCAPES = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
_PUNCTUATION = frozenset(" %+,-./:@]_'")


def shell_quote(name: str) -> str:
    r"""`name`, as `os.fsdecode` gives it, in GNU's quoting style shell-escape-always (coreutils manual, "Formatting the
    file names"): 'plain', "it's", 'a'$'\n''b'. Bytes that are no characters of the locale, and characters that cannot
    be printed, become octal escapes, so that the result always encodes.
    """
    if "'" in name and all(_plain(character, at) for at, character in enumerate(name)):
        return f'"{name}"'
    quoted = ["'"]
    escaping = False
    for character in name:
        if character == "'":
            quoted.append("'\\''")
            escaping = False
            continue
        escape = _ESCAPES.get(character) or ("" if _printable(character) else _octal(character))
        if escape and not escaping:
            quoted.append("'$'")
        elif escaping and not escape:
            quoted.append("''")
        escaping = bool(escape)
        quoted.append(escape or character)
    quoted.append("'")
    return "".join(quoted)


def _plain(character: str, at: int) -> bool:
    """Whether the character means itself between double quotes in every shell; GNU's list, which is cautious."""
    if character.isascii():
        return character.isalnum() or character in _PUNCTUATION or (at == 0 and character in "#~")
    return _printable(character)


def _printable(character: str) -> bool:
    if character.isascii():
        return " " <= character <= "~"
    # Seldom needed, so imported where they are.
    import locale
    import unicodedata

    # The interpreter reads names as UTF-8 in the C locale as well, where the terminal may not.
    if locale.nl_langinfo(locale.CODESET) == "ANSI_X3.4-1968":
        return False
    # What glibc's iswprint refuses: controls, surrogates (here: undecodable bytes), the unassigned, line separators.
    return unicodedata.category(character) not in ("Cc", "Cs", "Cn", "Zl", "Zp")


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
