"""Values that a model has written as plain text, as JSON of the types that a schema names."""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

TEXT = frozenset({"string"})
_KINDS: Mapping[type, frozenset[str]] = {
    str: TEXT,
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
# what authors of tools write for the types of JSON schemas
_ALIASES: Mapping[str, str] = {
    alias: kind
    for kind, aliases in {
        "string": "str text varchar char enum",
        "integer": "int int32 int64 uint uint32 uint64 long short unsigned",
        "number": "num float float32 float64 double",
        "boolean": "bool",
        "array": "arr list sequence",
        "object": "dict",
    }.items()
    for alias in aliases.split()
}
_NESTED = frozenset({"array", "object"})
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_BRANCHES = ("anyOf", "oneOf", "allOf")


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Types of a property, as JSON schemas name them; empty: the schema tells none.

    Of names that no schema has, as "str", those that tools have in their places are known.
    """
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return frozenset()
    found, seen, left = set[str](), set[str](), [properties.get(name)]
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            continue
        kinds = one.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        found.update(_ALIASES.get(kind, kind) for kind in kinds if isinstance(kind, str))
        for value in _listed(one, "enum"):
            found |= _KINDS[type(value)]
        for branch in _BRANCHES:
            left += _listed(one, branch)
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(_referred(schema, reference))
    return frozenset(found)


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON. What is none of the types stays as it is, as a text or as JSON.

    Args:
        text: as the model has written it.
        types: it may have; empty: any.
    """
    plain = text.strip()
    word = plain.lower()
    try:
        value = json.loads(plain, parse_float=_finite, parse_constant=_finite)
        kinds = _KINDS[type(value)]
    except (ValueError, RecursionError):
        kinds = frozenset()
    if kinds & types - TEXT:
        return plain
    if "boolean" in types and word in _BOOLEANS:
        return _BOOLEANS[word]
    if "null" in types and word == "null":
        return word
    if not kinds:
        read = _number(plain, types) or (_python(plain) if types & _NESTED else None)
        if read is not None:
            return read
    return json.dumps(text, ensure_ascii=False) if "string" in types or not kinds else plain


def _number(text: str, types: frozenset[str]) -> str | None:
    """A number that is none in JSON, as `007` and `.5`; None: it is none of the types."""
    for kind, read in (("integer", int), ("number", _finite)):
        if kind in types:
            try:
                return json.dumps(read(text))
            except ValueError:
                continue
    return None


def _python(text: str) -> str | None:
    """A list or dict as Python writes it, with single quotes and None; None: it is neither."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            value = ast.literal_eval(text)
        if isinstance(value, dict | list):
            told = json.dumps(value, ensure_ascii=False, allow_nan=False)
            told.encode()  # half of a surrogate pair is a ValueError: no response could hold it
            return told
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return None


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _finite(text: str) -> float:
    """Raises ValueError: no response could hold the number."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _referred(schema: Any, reference: str) -> Any:
    """What `#/a/b` is in a schema; None: nothing."""
    for part in reference.removeprefix("#").split("/")[1:]:
        schema = schema.get(part) if isinstance(schema, dict) else None
    return schema
