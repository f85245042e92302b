"""Keywords of JSON schemas that no grammar carries, and where they say nothing."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import shown

# and what may say the same
_REFUSED = {
    "uniqueItems": "items may be equal; an object can have a boolean for each value",
    "propertyNames": "'properties' or 'patternProperties' can name them",
    "not": "'enum', 'pattern' or 'anyOf' can say what may be",
    "if": "'anyOf' can list the cases",
    "contains": "'prefixItems' can say where an item is",
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"), "'anyOf' can list the cases"
    ),
    "unevaluatedItems": "'items' can be false",
    "unevaluatedProperties": "'additionalProperties' can be false",
    **dict.fromkeys(
        ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
        "'$ref' can refer to a definition",
    ),
}
_ANNOTATIONS = {"title", "description", "$comment", "default", "examples", "deprecated"}
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")


class SchemaError(ValueError):
    """A schema says what no grammar carries: its text is what would have been allowed."""

    @classmethod
    def of(cls, allowed: str, value: Any, at: str) -> SchemaError:
        """What would have been allowed in the place of a value, which is at a JSON pointer."""
        return cls(f"{allowed}; {shown(value)} is at {shown(at)}")


def check_keywords(schema: dict[str, Any], at: str, is_dynamic: bool) -> None:
    """Take out the keywords that say nothing where they are, in place.

    Args:
        schema: to be looked at, without those that it holds.
        at: its place, as a JSON pointer.
        is_dynamic: the whole schema has a reference that anchors can be the aim of.

    Raises:
        SchemaError: names another keyword that no grammar carries, and its place.
    """
    for keyword in _silent(schema):
        del schema[keyword]
    if not is_dynamic:
        schema.pop("$recursiveAnchor", None)
        if "$dynamicAnchor" in schema:
            schema.setdefault("$anchor", schema.pop("$dynamicAnchor"))
    for keyword, hint in _REFUSED.items():
        if keyword in schema:
            where = shown(f"{at}/{keyword}")
            raise SchemaError(f"a schema without {keyword!r}, which is at {where}: {hint}")


def _silent(schema: dict[str, Any]) -> list[str]:
    """The keywords that any value holds to."""
    found = [name for name in ("uniqueItems", "not") if schema.get(name) is False]
    found += [
        name
        for name in ("unevaluatedItems", "unevaluatedProperties")
        if _takes_anything(schema.get(name))
    ]
    if _takes_any_name(schema.get("propertyNames")):
        found.append("propertyNames")
    for name in _DEPENDENCIES:
        listed = schema.get(name)
        if isinstance(listed, dict) and all(v == [] or _takes_anything(v) for v in listed.values()):
            found.append(name)
    cases = [name for name in ("then", "else") if name in schema]
    if "if" not in schema or all(_takes_anything(schema[name]) for name in cases):
        found += [name for name in ("if", *cases) if name in schema]
    counts = ("minContains", "maxContains")  # of what `contains` tells of, which is refused itself
    return found + [name for name in counts if name in schema]


def _takes_anything(schema: Any) -> bool:
    return schema.keys() <= _ANNOTATIONS if isinstance(schema, dict) else schema is True


def _takes_any_name(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    return schema.keys() <= {*_ANNOTATIONS, "type"} and schema.get("type", "string") == "string"
