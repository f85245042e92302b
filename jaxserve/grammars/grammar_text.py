"""A constraint in the notation of llguidance: text that travels and is compiled elsewhere."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.errors import ValidationError
from jaxserve.params.structured_outputs_params import FIELD, StructuredOutputsParams, parsed

MAX_TAGS = 1024
# What may follow a backslash; with `u` a name could be written in a way that its schema misses.
ESCAPES = 'nrbtf\\"'
# what a JSON schema holds others under, by names that its author chooses
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
GBNF = "gbnf_grammar"  # for a grammar that llguidance's notation has no name for
_LARK_LINE = re.compile(r"%llguidance\b|[?!]{0,2}start\s*(?:[.\[]|:(?!:=))")
# Marks of Lark's for trees and for the choice between them, which say nothing of what is accepted.
_MARKED = re.compile(
    r"^([ \t]*)[?!]{0,2}([A-Za-z_][\w-]*)(?:[ \t]*\.[ \t]*-?\d+)?(?=[ \t]*[:\[])", re.MULTILINE
)
_ANY_TEXT = r"(.|\n)*"


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar of a constraint; whether it compiles is another question.

    It is for `in_notation`: schemas and GBNF are as they were given, since they may take long.

    Raises:
        ValidationError: names the field that cannot be understood.
    """
    library()
    if params.json is not None:
        return _grammar(json_schema=_schema(parsed("json", params.json), params))
    if params.json_object:
        return _grammar(json_schema=_schema({"type": "object"}, params))
    if params.regex is not None:
        return str(library().LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        # one lexeme: as alternatives of a rule each would be followed on its own
        texts = " | ".join(map(json.dumps, dict.fromkeys(params.choice)))
        return _grammar(lark_grammar=f"start: CHOICE\nCHOICE: {texts}\n")
    if params.grammar is not None:
        if not _is_lark(params.grammar):
            return _grammar(**{GBNF: params.grammar})
        return _grammar(lark_grammar=_MARKED.sub(r"\1\2", params.grammar))
    assert params.structural_tag is not None
    return _tagged(parsed("structural_tag", params.structural_tag), params)


def library() -> Any:
    """The module llguidance.

    Raises:
        ValidationError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ValidationError(
            FIELD,
            "a constraint",
            "nothing without llguidance: pip install '.[structured]' in a clone",
        ) from error
    return llguidance


def _grammar(*others: dict[str, Any], **first: Any) -> str:
    return json.dumps({"grammars": [first, *others]})


def _schema(schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    """A schema with llguidance's options, in the place of any that it brings."""
    if params.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {
        "whitespace_flexible": False,
        "lenient": False,
        "json_allowed_escapes": ESCAPES,
    }
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return {**schema, "x-guidance": options}


def _closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than the named ones."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: _closed(one) for key, one in value.items()}
        elif name in ("const", "enum", "default", "examples"):
            found[name] = value
        else:
            found[name] = _closed(value)
    is_object = found.get("type") == "object" or "properties" in found
    if is_object and "patternProperties" not in found:
        found.setdefault("additionalProperties", False)
    return found


def _is_lark(grammar: str) -> bool:
    """Whether a grammar is in Lark's notation already, as llguidance tells it from GBNF."""
    return any(_LARK_LINE.match(line.lstrip()) for line in grammar.splitlines())


def _tagged(tag: dict[str, Any], params: StructuredOutputsParams) -> str:
    """Free text; behind the trigger of a tag the rest of its beginning, its content, its end."""
    where = f"{FIELD}.structural_tag"
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if tag.get("type", "structural_tag") != "structural_tag" or "format" in tag:
        raise ValidationError(where, sorted(tag)[:9], "an object of structures and triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise ValidationError(f"{where}.structures", structures, f"a list of 1 to {MAX_TAGS} tags")
    if not isinstance(triggers, list) or not triggers or not all(map(_is_text, triggers)):
        raise ValidationError(f"{where}.triggers", triggers, "a list of texts, not empty")
    rules, schemas = [], []
    for place, one in enumerate(structures):
        at = f"{where}.structures[{place}]"
        begin, end, schema = _parts(one, at)
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValidationError(f"{at}.begin", begin, "a text that begins with a trigger")
        body = [json.dumps(begin[len(trigger) :])] if begin != trigger else []
        body.append(f"@schema_{place}")
        schemas.append({"name": f"schema_{place}", "json_schema": _schema(schema, params)})
        body += [json.dumps(end)] if end else []
        rules.append(f"trigger_{place}[lazy]: TEXT {json.dumps(trigger)}\n")
        rules.append(f"tag_{place}: trigger_{place} {' '.join(body)}\n")
    tags = " | ".join(f"tag_{place}" for place in range(len(structures)))
    text = f"start: ({tags})* rest\nrest: TEXT\nTEXT: /{_ANY_TEXT}/\n" + "".join(rules)
    return _grammar(*schemas, lark_grammar=text)


def _parts(one: Any, at: str) -> tuple[str, str, dict[str, Any]]:
    """Beginning, end and schema of a tag."""
    if not isinstance(one, dict):
        raise ValidationError(at, one, "an object of begin, schema and end")
    begin, end, schema = one.get("begin"), one.get("end", ""), one.get("schema", {})
    if not isinstance(begin, str) or not begin:
        raise ValidationError(f"{at}.begin", begin, "a text that is not empty")
    if not isinstance(end, str):
        raise ValidationError(f"{at}.end", end, "a text")
    if isinstance(schema, str):
        schema = parsed("structural_tag", schema)
    if not isinstance(schema, dict):
        raise ValidationError(f"{at}.schema", schema, "a JSON schema")
    return begin, end, schema


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
