"""Messages of a conversation that made calls, or bring what came of them."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.errors import ValidationError
from jaxserve.params.structured_outputs_params import MAX_DEPTH, is_deeper

MAX_CALLS = 256  # of one message
DEEPEST = f"at most {MAX_DEPTH} levels of nesting"


def rendered_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as templates read them: arguments are an object.

    Args:
        calls: `tool_calls` of a message.
        where: what they are called in errors.

    Raises:
        ValidationError: names what is wrong.
    """
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise ValidationError(where, type(calls).__name__, f"a list of at most {MAX_CALLS} calls")
    return [_rendered(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _rendered(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise ValidationError(where, type(call).__name__, "an object of type 'function'")
    function = call.get("function")
    if not isinstance(function, dict):
        raise ValidationError(f"{where}.function", type(function).__name__, "an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValidationError(f"{where}.function.name", name, "a name")
    if not isinstance(call.get("id"), str | None):
        raise ValidationError(f"{where}.id", call["id"], "text")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    told = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return told if call.get("id") is None else {"id": call["id"], **told}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """The object that templates want.

    What a model has written need not be one: a call may have been cut off. Its text is passed on
    in the field `arguments`, so that the conversation can go on.
    """
    if isinstance(given, str):
        text = given
        try:
            given = json.loads(text) if text.strip() else {}
        except RecursionError as error:
            raise ValidationError(where, "deeper nesting", DEEPEST) from error
        except ValueError:
            given = text
        if not isinstance(given, dict | None):
            return {"arguments": text}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValidationError(where, given, "the text of a JSON object")
    if is_deeper(given, MAX_DEPTH):
        raise ValidationError(where, "deeper nesting", DEEPEST)
    return given
