"""Request fields of the OpenAI and vLLM APIs that no request model has: passed over, or refused.

Every field of both APIs is in one of three lists: those that a request model declares, which are
implemented; `NEUTRAL`, accepted with any value, since they have no effect on the answer; `REFUSED`.
Of the latter a value that asks for nothing (null, false, the neutral value) is accepted, because
clients send such defaults. Nothing that would change the answer is ignored. The lists, and all
names of the two APIs, are in `fields.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import ValidationError

_LISTS = json.loads((Path(__file__).parent / "fields.json").read_text(encoding="utf-8"))


class Refusal(NamedTuple):
    """What is accepted of a field beside null, and why nothing else is."""

    values: list[Any]
    why: str


# request -> API -> the names of its fields
KNOWN: dict[str, dict[str, list[str]]] = _LISTS["requests"]
NEUTRAL: dict[str, str] = _LISTS["neutral"]
REFUSED: dict[str, Refusal] = {name: Refusal(*given) for name, given in _LISTS["refused"].items()}
# request -> fields that others have
REFUSED_IN: dict[str, dict[str, Refusal]] = {
    request: {name: Refusal(*given) for name, given in names.items()}
    for request, names in _LISTS["refused_in"].items()
}


def refusals(request: str) -> dict[str, Refusal]:
    """Field -> refusal, of a kind of request, which need not be in `KNOWN`."""
    return REFUSED | REFUSED_IN.get(request, {})


def check_unsupported(fields: Mapping[str, Any], request: str = "") -> None:
    """Refuse each field that asks for something that jaxserve does not do.

    Args:
        fields: those that the request model does not have.
        request: which of `KNOWN` it is.

    Raises:
        ValidationError: names the first such field, its value and what is allowed.
    """
    own = REFUSED_IN.get(request, {})
    for name, value in fields.items():
        refusal = own.get(name) or REFUSED.get(name)
        if refusal is None or value is None:
            continue
        if not any(type(value) is type(one) and value == one for one in refusal.values):
            allowed = " or ".join(["null", *(repr(one) for one in refusal.values)])
            raise ValidationError(
                name, value, f"this server accepts only {allowed} ({refusal.why})"
            )
