"""Arguments that are tagged values, read character by character; they are told as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.tools.json_text import Take
from server.tools.reader import Finding, Reader
from server.tools.schema_values import TEXT, json_of, types_of

MAX_HEADER = 512  # characters of a name or of a key, and of what stands around it


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before arguments or before a value, and tells its name.

    Attributes:
        end: what ends it; empty: the tag of what follows.
        pattern: of what comes before its end. `name` is a group, and `is_text` of keys that tell
            texts ("true") from JSON ("false").
    """

    end: str
    pattern: str = r"\s*(?P<name>[^\s<>]+)\s*"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The tags of such a notation.

    Attributes:
        begin: before a key.
        key: the key, up to its value.
        end: behind a value. Where it is missing the next parameter, or the end of the call, ends
            the value.
        call_end: behind the last value.
        is_padded: a line break before a value and one behind it are none of it.
        untyped_is_json: a value of which no schema tells the type is JSON, where it can be read
            so; else it is a text.
        wrappers: keys that models write around all arguments, as one object, where the tool has no
            such key itself.
    """

    begin: str
    key: Header
    end: str
    call_end: str
    is_padded: bool = False
    untyped_is_json: bool = False
    wrappers: tuple[str, ...] = ()


def read_parameters(
    reader: Reader,
    add: Take,
    parameters: Parameters,
    outer: Sequence[str],
    schema: Mapping[str, Any],
    tag: str | None,
) -> Finding:
    """Read arguments up to the end of their call. Cut off in the middle they are not whole.

    Where the model ends its text behind a value, the call has ended with it.

    Args:
        reader: stands behind the name of the call.
        add: told of the arguments as JSON, as they come.
        parameters: the notation.
        outer: tags that end a call too, since its own end is missing. In a value they are text.
        schema: of the arguments.
        tag: one of the notation that has been read; None: none.

    Returns:
        The tag of `outer` that has ended them; None: their own, or the end of the text.
    """
    tags = (parameters.begin, parameters.call_end, *outer)
    separator, is_between = "", True  # values
    add("{")
    while reader.char is not None or tag is not None:
        if tag is None:  # text between values is none of them
            tag = yield from reader.until(tags, lambda char: None)
        elif tag != parameters.begin:
            add("}")
            return tag if tag in outer else None
        else:
            text: list[str] = []
            is_between = False
            key_tags = (parameters.key.end, *tags)
            tag = yield from reader.until(key_tags, text.append, most=MAX_HEADER)
            found = re.fullmatch(parameters.key.pattern, "".join(text), re.DOTALL)
            if tag == parameters.key.end:
                tag = None
                if found is not None:
                    value: list[str] = []
                    name, known = found["name"], schema.get("properties")
                    known = known if isinstance(known, dict) else {}
                    is_wrapper = name in parameters.wrappers and name not in known
                    types = _types(found, schema, parameters.untyped_is_json)
                    if not is_wrapper:
                        add(f"{separator}{_quoted(name)}: ")
                    end = yield from _read_value(
                        reader, value.append if is_wrapper else add, parameters, types
                    )
                    if is_wrapper:
                        add(_unwrapped("".join(value), name, known, separator))
                    separator = ", "
                    is_between = end is not None
                    tag = None if end == parameters.end else end
    if is_between and not reader.is_cut:
        add("}")
    return None


def _types(key: re.Match[str], schema: Mapping[str, Any], untyped_is_json: bool) -> frozenset[str]:
    """Types that a value may have; empty: any. A schema's go before what the model says of it."""
    types, told = types_of(schema, key["name"]), key.groupdict()
    if told.get("is_text") == "true":
        return TEXT if not types or types & TEXT else types
    return types if types or untyped_is_json or "is_text" in told else TEXT


def _read_value(
    reader: Reader, add: Take, parameters: Parameters, types: frozenset[str]
) -> Finding:
    """A value; the tag that has ended it."""
    ends = [parameters.end, parameters.begin, parameters.call_end]
    if parameters.is_padded:
        ends += [f"\n{end}" for end in ends]
        if reader.char == "\n":
            yield from reader.next()
    if types == TEXT:
        add('"')
        tag = yield from reader.until(ends, lambda char: add(_quoted(char)[1:-1]))
        add('"' if tag is not None else "")
    else:
        text: list[str] = []
        tag = yield from reader.until(ends, text.append)
        add(json_of("".join(text), types) if tag is not None else "")
    return tag and tag.lstrip("\n")


def _unwrapped(value: str, name: str, known: Mapping[str, Any], separator: str) -> str:
    """The arguments in a value around them; where it has others, the value by its name."""
    try:
        inner = json.loads(value)
        inner = json.loads(inner) if isinstance(inner, str) else inner
        if isinstance(inner, dict) and inner and inner.keys() <= known.keys():
            told = json.dumps(inner, ensure_ascii=False, allow_nan=False)
            told.encode()  # half of a surrogate pair is a ValueError: no response could hold it
            return f"{separator}{told[1:-1]}"
    except (ValueError, RecursionError):
        pass  # it is no JSON that can be told, or was cut off
    return f"{separator}{_quoted(name)}: {value}"


_quoted = partial(json.dumps, ensure_ascii=False)
