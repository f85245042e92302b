"""`response_format` and `structured_outputs`: what the answer's text must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.errors import ValidationError
from jaxserve.params.structured_outputs_params import FIELD, KINDS, StructuredOutputsParams
from server.protocol.body_errors import named

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_WHERE = {
    "json_object": "response_format",
    "json": "response_format.json_schema.schema",
    "structural_tag": "response_format",
}
_FROM_FORMAT = {f"{FIELD}.{kind}": where for kind, where in _WHERE.items()}


class FormatFields(NamedTuple):
    """A constraint, and which field of the body each of its own comes from."""

    params: StructuredOutputsParams
    fields: Mapping[str, str]


def constraint(given: Any, response_format: Any) -> FormatFields | None:
    """What a body asks for by one of the two fields; None: nothing.

    Args:
        given: `structured_outputs`.
        response_format: OpenAI's field.

    Raises:
        ValidationError: names the field that cannot be understood.
    """
    asked = None if response_format is None else of_format(response_format)
    if given is None:
        return asked
    if asked is not None:
        kinds = [name for name in KINDS if given.get(name) is not None]
        raise ValidationError(FIELD, kinds, "nothing beside response_format")
    return FormatFields(StructuredOutputsParams.of(given), {})


def of_format(given: Any) -> FormatFields | None:
    """What `response_format` asks for. Raises ValidationError."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in FORMATS:
        shown = kind if isinstance(given, dict) else type(given).__name__
        raise ValidationError("response_format.type", shown, f"one of {', '.join(FORMATS)}")
    if kind == "text":
        return None
    with named(_FROM_FORMAT):
        if kind == "json_object":
            params = StructuredOutputsParams(json_object=True)
        elif kind == "structural_tag":
            params = StructuredOutputsParams(structural_tag=given)
        else:
            schema, is_strict = _schema(given)
            params = StructuredOutputsParams(json=schema, disable_additional_properties=is_strict)
    return FormatFields(params, _FROM_FORMAT)


def _schema(given: dict[str, Any]) -> tuple[Any, bool]:
    """The schema, and whether its objects have the properties that it names only."""
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise ValidationError(
            "response_format.json_schema", described, "an object with name and schema"
        )
    schema = described.get("schema")
    if schema is None:
        raise ValidationError("response_format.json_schema.schema", None, "a JSON schema")
    return schema, described.get("strict") is True
