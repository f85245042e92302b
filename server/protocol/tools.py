"""`tools` and `tool_choice` of chat completions: what the model may call, and what it must."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ValidationError
from jaxserve.grammars.grammar_text import SCHEMAS_BY_NAME
from jaxserve.params.structured_outputs_params import (
    FIELD,
    MAX_DEPTH,
    StructuredOutputsParams,
    is_deeper,
)
from server.protocol.response_format import FormatFields
from server.protocol.tool_messages import MAX_CALLS

NONE, AUTO, REQUIRED = "none", "auto", "required"
MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# a schema's references go by its own root
_NOT_SCHEMAS = ("const", "enum", "default", "examples")
_FIELDS: Mapping[str, str] = {f"{FIELD}.json": "tools"}


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What a request says of tools.

    Attributes:
        tools: OpenAI's objects, as templates read them; empty without tools.
        choice: "none", "auto", "required" or "named".
        name: of the function that must be called, where one is named.
        parallel: whether a message may have several calls.
    """

    tools: list[dict[str, Any]]
    choice: str
    name: str | None
    parallel: bool

    def constraint(self) -> FormatFields | None:
        """What the text must be where a call is demanded."""
        if self.name is not None:
            (schema,) = (_parameters(t) for t in self.tools if _name(t) == self.name)
            return FormatFields(StructuredOutputsParams(json=schema), _FIELDS)
        if self.choice != REQUIRED:
            return None
        calls, definitions = [], {}
        for place, tool in enumerate(self.tools):
            key = f"tool_{place}"
            definitions[key] = _moved(_parameters(tool), f"#/$defs/{key}")
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": _name(tool)},
                        "parameters": {"$ref": f"#/$defs/{key}"},
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
        schema["maxItems"] = MAX_CALLS if self.parallel else 1
        return FormatFields(StructuredOutputsParams(json=schema), _FIELDS)


def asked_tools(tools: Any, choice: Any, parallel: bool | None) -> AskedTools:
    """What the fields of a body ask for.

    Raises:
        ValidationError: names the field that cannot be understood.
    """
    if tools is not None:
        _check_tools(tools)
    name: str | None = None
    if choice is None:
        choice = AUTO if tools else NONE
    elif isinstance(choice, dict):
        name, choice = _named(choice), "named"
    elif choice not in (NONE, AUTO, REQUIRED):
        raise ValidationError("tool_choice", choice, "none, auto, required or a function")
    if not tools and (choice == REQUIRED or name is not None):
        raise ValidationError("tool_choice", name or choice, "none where there are no tools")
    tools = tools or []
    if name is not None and name not in map(_name, tools):
        raise ValidationError("tool_choice.function.name", name, "the name of one of the tools")
    if choice == AUTO and not tools:
        choice = NONE
    return AskedTools(tools, choice, name, parallel is not False)


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        shown = f"{len(tools)} tools" if isinstance(tools, list) else type(tools).__name__
        raise ValidationError("tools", shown, f"a list of at most {MAX_TOOLS} functions")
    names: set[str] = set()
    for place, tool in enumerate(tools):
        at = f"tools[{place}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise ValidationError(f"{at}.type", kind, "'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise ValidationError(f"{at}.function", type(function).__name__, "an object")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValidationError(
                f"{at}.function.name", name, "1 to 128 letters, digits, '_', '.', ':' or '-'"
            )
        if name in names:
            raise ValidationError(f"{at}.function.name", name, "a name that no other tool has")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise ValidationError(f"{at}.function.description", function["description"], "text")
        _check_parameters(function.get("parameters"), f"{at}.function.parameters")


def _check_parameters(parameters: Any, at: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ValidationError(at, type(parameters).__name__, "a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise ValidationError(f"{at}.type", parameters["type"], "'object'")
    if is_deeper(parameters, MAX_DEPTH):
        raise ValidationError(at, "deeper nesting", f"at most {MAX_DEPTH} levels of nesting")


def _named(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function":
        raise ValidationError("tool_choice.type", choice.get("type"), "'function'")
    if not isinstance(name, str):
        raise ValidationError("tool_choice.function.name", name, "the name of one of the tools")
    return name


def _name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without one there are none."""
    given = tool["function"].get("parameters")
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}


def _moved(schema: Any, root: str) -> Any:
    """A schema that is not the root any more."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(one, root) for name, one in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in _NOT_SCHEMAS else _moved(value, root)
    return moved
