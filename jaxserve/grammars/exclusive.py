"""Whether the alternatives of a `oneOf` exclude one another, so that it says what `anyOf` does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# The schemas that a value holds to at once.
Schemas = list[dict[str, Any]]

MAX_DEPTH = 6  # of properties and alternatives that are looked into
MAX_REFERENCES = 32  # that lead from one schema to the next
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_ALTERNATIVES = ("anyOf", "oneOf")
_BY_CLASS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class Exclusive:
    """Tells schemas apart by types, constants and required properties.

    Args:
        resolve: the schema that a reference leads to; None: it cannot be known.
        lone_references: what stands beside a `$ref` means nothing, as up to draft 7.
    """

    def __init__(self, resolve: Callable[[str], Any], lone_references: bool):
        self._resolve = resolve
        self._lone_references = lone_references

    def holds(self, beside: dict[str, Any], branches: list[Any], tag: str | None) -> bool:
        """Whether no value holds to two branches.

        Args:
            beside: what all of them are joined with.
            branches: the alternatives.
            tag: the property that an OpenAPI `discriminator` names.
        """
        parts = [self._joined([beside, branch]) for branch in branches]
        possible = [part for part in parts if part is not None]
        if not possible:
            return True
        names = dict.fromkeys(([tag] if tag else []) + [*_required(possible[0])])
        if any(self._tells_apart(name, possible) for name in names):
            return True
        return all(
            self._disjoint(one, other, MAX_DEPTH)
            for one, other in itertools.combinations(possible, 2)
        )

    def _tells_apart(self, name: str, parts: list[Schemas]) -> bool:
        """Whether each is an object with a property of this name, and all have other values."""
        seen: set[Any] = set()
        for part in parts:
            found = self._values_at(name, part, MAX_DEPTH)
            if found is None or found & seen:
                return False
            seen |= found
        return True

    def _values_at(self, name: str, part: Schemas, depth: int) -> set[Any] | None:
        """Those that a property which is always there can have; None: they are not known."""
        if _types(part) == {"object"} and name in _required(part):
            property_ = self._joined(_properties(part, name))
            if property_ is None:
                return set()
            values = _values(property_)
            if values is not None:
                return values
        if not depth:
            return None
        for branches in self._alternatives(part):
            found = [
                set() if branch is None else self._values_at(name, branch, depth - 1)
                for branch in branches
            ]
            known = [one for one in found if one is not None]
            if len(known) == len(found):
                return set().union(*known)
        return None

    def _disjoint(self, one: Schemas, other: Schemas, depth: int) -> bool:
        common = _types(one) & _types(other)
        if not common:
            return True
        values, others = _values(one), _values(other)
        if values is not None and others is not None and not values & others:
            return True
        if not depth:
            return False
        if common == {"object"}:
            for name in _required(one) | _required(other):
                first = self._joined(_properties(one, name))
                second = self._joined(_properties(other, name))
                if first is None or second is None or self._disjoint(first, second, depth - 1):
                    return True
        return self._all_disjoint(one, other, depth) or self._all_disjoint(other, one, depth)

    def _all_disjoint(self, one: Schemas, other: Schemas, depth: int) -> bool:
        return any(
            all(branch is None or self._disjoint(branch, other, depth - 1) for branch in branches)
            for branches in self._alternatives(one)
        )

    def _alternatives(self, part: Schemas) -> Iterator[list[Schemas | None]]:
        """Of each `anyOf` and `oneOf`, its branches with everything else."""
        for place, schema in enumerate(part):
            for key in _ALTERNATIVES:
                if isinstance(schema.get(key), list):
                    rest = {name: value for name, value in schema.items() if name != key}
                    others = [*part[:place], rest, *part[place + 1 :]]
                    yield [self._joined([*others, branch]) for branch in schema[key]]

    def _joined(self, schemas: Iterable[Any]) -> Schemas | None:
        """Them, what they refer to and their `allOf`; None: no value holds to all of them."""
        found: Schemas = []
        left = list(schemas)
        references: set[str] = set()
        while left:
            schema = left.pop()
            if schema is False:
                return None
            if not isinstance(schema, dict):
                continue
            reference = schema.get("$ref")
            if isinstance(reference, str):
                if reference not in references and len(references) < MAX_REFERENCES:
                    references.add(reference)
                    left.append(self._resolve(reference))
                if self._lone_references:
                    continue
            found.append(schema)
            if isinstance(schema.get("allOf"), list):
                left += schema["allOf"]
        return found


def _types(part: Schemas) -> frozenset[str]:
    """Of the values that hold to all; integers are numbers."""
    types = _TYPES
    for schema in part:
        given = schema.get("type")
        named = [given] if isinstance(given, str) else given
        if isinstance(named, list):
            types &= {"number" if one == "integer" else one for one in named if _is_text(one)}
    values = _values(part)
    return types if values is None else types & {kind for kind, _ in values}


def _values(part: Schemas) -> set[Any] | None:
    """Where they are named; None: there may be any."""
    values: set[Any] | None = None
    for schema in part:
        for listed in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(listed, list):
                found = {_key(value) for value in listed}
                values = found if values is None else values & found
    return values


def _key(value: Any) -> Any:
    """Equal for values that JSON schema takes for equal: 1 and 1.0, not 1 and true."""
    content: Any = value
    if isinstance(value, list):
        content = tuple(map(_key, value))
    elif isinstance(value, dict):
        content = frozenset((name, _key(one)) for name, one in value.items())
    return _BY_CLASS[type(value)], content


def _required(part: Schemas) -> set[str]:
    lists = [s["required"] for s in part if isinstance(s.get("required"), list)]
    return {name for names in lists for name in names if _is_text(name)}


def _properties(part: Schemas, name: str) -> list[Any]:
    """What a property of this name must hold to."""
    found: list[Any] = []
    for schema in part:
        named = schema.get("properties")
        named = named if isinstance(named, dict) else {}
        if name in named:
            found.append(named[name])
        elif "patternProperties" not in schema:
            found.append(schema.get("additionalProperties", True))
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
