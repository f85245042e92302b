"""A JSON schema as llguidance carries it: what it would take otherwise is said in other words.

A text that the result allows holds to the schema, but for what docs/structured_outputs.md names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from jaxserve.errors import shown
from jaxserve.grammars.exclusive import Exclusive
from jaxserve.grammars.number_limits import is_exact, lower_limits
from jaxserve.grammars.patterns import not_carried, without_look_ahead
from jaxserve.grammars.string_formats import BUILT_IN, EXPRESSIONS, MAX_HOSTNAME
from jaxserve.grammars.unsupported_keywords import SchemaError, check_keywords

# what a schema holds others under: by names that a schema's author chooses, in a list, or alone
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties")
_ONE_OF = (
    "alternatives of 'oneOf' that types, constants or required properties tell apart; "
    "'anyOf' takes any"
)
# what means something beside a `$ref` where nothing else does: places and names of others
_BESIDE_REFERENCE = {"$ref", "$schema", "$id", "id", "x-guidance", *_DEFINITIONS}
MAX_NOTED = 5  # formats that are told of
_DRAFT = re.compile(r"/draft-0([3467])/")  # that know nothing beside a `$ref`
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # that JSON has no short escape of


def lowered(schema: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A schema for llguidance, made in place, and what has no meaning in it, in words or "".

    Raises:
        SchemaError: names the keyword and its place, as a JSON pointer.
    """
    return _Lowering(schema).run()


class _Lowering:
    def __init__(self, schema: dict[str, Any]):
        self._root = schema
        self._seen: dict[int, dict[str, Any]] = {}
        self._moved: dict[int, list[str]] = {}  # where the `oneOf` of a schema has gone
        self._left: list[tuple[Any, str]] = []
        self._notes: list[str] = []
        draft = _DRAFT.search(str(schema.get("$schema", "")))
        base = "id" if draft is not None and draft[1] in "34" else "$id"
        # Where it is not plain what a reference leads to, all definitions count as referred to.
        self._is_plain = all(
            _is_pointer(one.get("$ref")) and (one is schema or not isinstance(one.get(base), str))
            for one in _objects(schema)
        )
        self._is_dynamic = any("$dynamicRef" in s or "$recursiveRef" in s for s in _objects(schema))
        self._lone_references = draft is not None
        self._exclusive = Exclusive(self._resolve, self._lone_references)

    def run(self) -> tuple[dict[str, Any], str]:
        self._left.append((self._root, "#"))
        while self._left:
            schema, at = self._left.pop()
            if isinstance(schema, dict) and id(schema) not in self._seen:
                self._seen[id(schema)] = schema
                self._lower(schema, at)
        for schema in self._seen.values():
            if self._moved and isinstance(schema.get("$ref"), str):
                schema["$ref"] = self._followed(schema["$ref"])[1]
        return self._root, self._note()

    def _note(self) -> str:
        if not self._notes:
            return ""
        rest = len(self._notes) - MAX_NOTED
        more = f" and {rest} more" if rest > 0 else ""
        return f"any text passes for {', '.join(self._notes[:MAX_NOTED])}{more}"

    def _lower(self, schema: dict[str, Any], at: str) -> None:
        if self._lone_references and isinstance(schema.get("$ref"), str):
            for keyword in schema.keys() - _BESIDE_REFERENCE:
                del schema[keyword]
        check_keywords(schema, at, self._is_dynamic)
        _check_constants(schema, at)
        lower_limits(schema, at)
        self._lower_format(schema, at)
        _lower_pattern(schema, at)
        if isinstance(schema.get("oneOf"), list) and isinstance(schema.get("allOf", []), list):
            self._lower_one_of(schema, at)
        self._visit(schema, at)

    def _visit(self, schema: dict[str, Any], at: str) -> None:
        """Go on with what it holds and refers to."""
        for keyword in (*_BY_NAME, *(() if self._is_plain else _DEFINITIONS)):
            if isinstance(schema.get(keyword), dict):
                for name, one in schema[keyword].items():
                    self._left.append((one, f"{at}/{keyword}/{_escaped(name)}"))
        for keyword in _LISTS:
            if isinstance(schema.get(keyword), list):
                for place, one in enumerate(schema[keyword]):
                    self._left.append((one, f"{at}/{keyword}/{place}"))
        for keyword in _ALONE:
            self._left.append((schema.get(keyword), f"{at}/{keyword}"))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._left.append((self._resolve(reference), reference))

    def _resolve(self, reference: str) -> Any:
        """What it leads to in this schema; None: nothing, or it is not plain."""
        return self._followed(reference)[0]

    def _followed(self, reference: str) -> tuple[Any, str]:
        """What a reference into the given schema leads to, and how it is written now."""
        if not self._is_plain or not _is_pointer(reference):
            return None, reference
        found: Any = self._root
        path = list[str]()
        is_moved = False
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            names = [name]
            if name == "oneOf" and id(found) in self._moved:
                names, is_moved = self._moved[id(found)], True
            for one in names:
                found = _part(found, one)
            path += names
        text = "/".join(quote(_escaped(name), safe="~") for name in path)
        return found, f"#/{text}" if is_moved else reference

    def _lower_format(self, schema: dict[str, Any], at: str) -> None:
        name = schema.get("format")
        if not isinstance(name, str) or name in BUILT_IN:
            return
        del schema["format"]
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return
        if name not in EXPRESSIONS:
            self._notes.append(f"format {shown(name)} at {shown(at)}")
            return
        _add_pattern(schema, f"^(?:{EXPRESSIONS[name]})$")
        if name == "hostname":
            most = schema.get("maxLength", MAX_HOSTNAME)
            schema["maxLength"] = min(most, MAX_HOSTNAME) if isinstance(most, int) else most

    def _lower_one_of(self, schema: dict[str, Any], at: str) -> None:
        """Make it `anyOf`, in its place: that is the order of properties."""
        branches = schema["oneOf"]
        discriminator = schema.get("discriminator")
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(tag, str):
            self._require(branches, tag, set())
        beside = {name: value for name, value in schema.items() if name != "oneOf"}
        if not self._exclusive.holds(beside, branches, tag if isinstance(tag, str) else None):
            raise SchemaError(f"{_ONE_OF} (at {shown(at + '/oneOf')})")
        if "anyOf" in schema:
            del schema["oneOf"]
            _add_all_of(schema, {"anyOf": branches})
            self._moved[id(schema)] = ["allOf", str(len(schema["allOf"]) - 1), "anyOf"]
            return
        self._moved[id(schema)] = ["anyOf"]
        items = [*schema.items()]
        schema.clear()
        schema.update(("anyOf" if name == "oneOf" else name, value) for name, value in items)

    def _require(self, branches: list[Any], name: str, seen: set[int]) -> None:
        """A discriminator's property must be there to tell branches apart: Pydantic leaves it
        out of `required` where it has a default, and refuses what has none."""
        for branch in branches:
            if isinstance(branch, dict) and isinstance(branch.get("$ref"), str):
                branch = self._resolve(branch["$ref"])
            if not isinstance(branch, dict) or id(branch) in seen:
                continue
            seen.add(id(branch))
            for keyword in ("anyOf", "oneOf"):
                if isinstance(branch.get(keyword), list):
                    self._require(branch[keyword], name, seen)
            properties, required = branch.get("properties"), branch.get("required", [])
            is_named = isinstance(properties, dict) and name in properties
            if is_named and isinstance(required, list) and name not in required:
                branch["required"] = [*required, name]


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def _part(value: Any, name: str) -> Any:
    """What a name of a JSON pointer leads to; None: nothing."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return None


def _is_pointer(reference: Any) -> bool:
    """Whether it names a place in the schema that it is in; no string is no reference."""
    return not isinstance(reference, str) or reference == "#" or reference.startswith("#/")


def _check_constants(schema: dict[str, Any], at: str) -> None:
    """llguidance rounds numbers, and has no text of some characters."""
    for keyword in ("const", "enum"):
        left, place = [schema.get(keyword)], f"{at}/{keyword}"
        while left:
            value = left.pop()
            if isinstance(value, dict):
                left += [*value, *value.values()]
            elif isinstance(value, list):
                left += value
            elif isinstance(value, int) and not is_exact(value):
                raise SchemaError.of("numbers that a 64-bit float has, below 2^63", value, place)
            elif isinstance(value, str) and _CONTROL.search(value):
                raise SchemaError.of("texts without control characters", value, place)


def _lower_pattern(schema: dict[str, Any], at: str) -> None:
    given = schema.get("pattern")
    if isinstance(given, str):
        first, *others = without_look_ahead(given)
        schema["pattern"] = first
        for one in others:
            _add_pattern(schema, one)
        _check_pattern(first, f"{at}/pattern")
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        for name in by_pattern:
            _check_pattern(name, f"{at}/patternProperties")


def _check_pattern(pattern: str, at: str) -> None:
    found = not_carried(pattern)
    if found is not None:
        allowed = "a pattern without look-around, word boundaries and back-references"
        raise SchemaError.of(allowed, found, at)


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" in schema:
        _add_all_of(schema, {"pattern": pattern})
    else:
        schema["pattern"] = pattern


def _add_all_of(schema: dict[str, Any], one: dict[str, Any]) -> None:
    there = schema.get("allOf", [])
    schema["allOf"] = [*there, one] if isinstance(there, list) else there


def _escaped(name: str) -> str:
    """A name in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
