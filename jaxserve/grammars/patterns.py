"""What a `pattern` of a JSON schema says that an automaton cannot follow."""

from __future__ import annotations

import re

# An escape, a class and a group are one piece each, so that `\\(?=` and `[(?=]` are none of these.
_PIECE = re.compile(
    r"""
    (?P<word>\\[bB]) | (?P<back>\\[1-9][0-9]*|\\k<[^>]*>) | \\.
    | \[ \^? \]? (?: \\. | [^\]\\] )* \]
    | (?P<behind>\(\?<[=!]) | (?P<ahead>\(\?[=!])
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMES = {
    "word": "word boundary",
    "back": "back-reference",
    "behind": "look-behind",
    "ahead": "look-ahead",
}
# what Pydantic writes of `Decimal`: not only characters of a class
_NOT_ONLY = re.compile(r"\^\(\?!\^\[(?P<members>[^\]\\^]+)\]\*\$\)")


def not_carried(pattern: str) -> str | None:
    """The first part of a pattern that looks around or back, by its name; None: there is none."""
    for found in _PIECE.finditer(pattern):
        if found.lastgroup is not None:
            return f"{_NAMES[found.lastgroup]} {found.group()!r}"
    return None


def without_look_ahead(pattern: str) -> list[str]:
    """Patterns that together say the same, where one begins with `^(?!^[...]*$)`."""
    found = _NOT_ONLY.match(pattern)
    if found is None or _has_alternatives(pattern[found.end() :]):
        return [pattern]
    return ["^" + pattern[found.end() :], f"[^{found['members']}]"]


def _has_alternatives(pattern: str) -> bool:
    """Whether `|` may stand outside all groups: then a look-ahead concerns the first part only."""
    depth = 0
    for piece in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        match piece.group():
            case "(":
                depth += 1
            case ")":
                depth -= 1
            case "|" if depth == 0:
                return True
    return False
