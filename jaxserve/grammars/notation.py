"""What `grammar_text` gave, in llguidance's notation: where it is tried, since it may take long."""

from __future__ import annotations

import json
import re

from jaxserve.grammars.grammar_text import GBNF
from jaxserve.grammars.schemas import lowered

# A rule's name that the translation gives to `root`; texts, classes and comments are passed over.
_START = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(?<![\w-])(start)(?![\w-])', re.DOTALL
)
MAX_ERROR = 200  # characters of what a translation says


def in_notation(text: str) -> tuple[str, str]:
    """A grammar that llguidance compiles, and what of it has no meaning, in words or "".

    To translate GBNF takes time that grows with the square of the text.

    Raises:
        ValueError: says what would have been allowed.
    """
    grammars = json.loads(text)["grammars"]
    is_changed, notes = False, list[str]()
    for grammar in grammars:
        if GBNF in grammar:
            grammar["lark_grammar"], is_changed = _lark_of(grammar.pop(GBNF)), True
        elif grammar.get("json_schema") is not None:
            grammar["json_schema"], note = lowered(grammar["json_schema"])
            is_changed = True
            notes += [note] if note else []
    return json.dumps({"grammars": grammars}) if is_changed else text, "; ".join(notes)


def _lark_of(gbnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    other = "start-rule"
    while other in gbnf:
        other += "s"
    gbnf = _START.sub(lambda found: other if found[1] else found[0], gbnf)
    try:
        return str(gbnf_to_lark(gbnf))
    except Exception as error:  # its parser raises whatever comes
        raise ValueError(f"a grammar of Lark or GBNF ({str(error)[:MAX_ERROR]})") from error
