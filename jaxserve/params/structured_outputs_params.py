"""What the text of one request must be, validated when it is made."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from jaxserve.errors import ValidationError

FIELD = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHARACTERS = 1 << 16  # of a schema, a grammar or an expression
MAX_CHOICE_CHARACTERS = 1 << 18  # of all choices together
MAX_CHOICES = 10_000
MAX_DEPTH = 64  # levels of objects and lists in a schema


class Thoughts(NamedTuple):
    """What may come before a constrained text, by the tags that the model puts around it.

    Attributes:
        begin: the opening tag; a model that has it as one token may begin with it.
        end: the closing tag, behind which the constraint begins.
        is_open: the prompt ends in the middle of thoughts.
        other_ends: what the model may write in the place of `end`.
    """

    begin: str
    end: str
    is_open: bool
    other_ends: tuple[str, ...] = ()

    @property
    def ends(self) -> list[bytes]:
        """All that ends thoughts, as bytes."""
        return [end.encode() for end in (self.end, *self.other_ends)]


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A constraint of the generated text: exactly one kind. The names are vLLM's.

    Attributes:
        json: a JSON schema, as an object or as text; the text is JSON that holds to it.
        regex: the whole text matches this regular expression.
        choice: the text is one of these.
        grammar: a context-free grammar, in Lark's or in GBNF's notation.
        json_object: True: the text is a JSON object.
        structural_tag: free text in which, behind each trigger, a tag follows whose content holds
            to a schema.
        disable_any_whitespace: JSON is always compact, so this changes nothing.
        disable_additional_properties: objects of the schema have the properties that it names only.
        whitespace_pattern: a regular expression of what may stand between the tokens of JSON; None:
            nothing.
        thoughts: the text comes behind them; None: it begins at once.

    Raises:
        ValidationError: no kind or several are given, or a value has another type or is too large.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    thoughts: Thoughts | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(given) or "none of them"
            raise ValidationError(FIELD, told, f"exactly one of {', '.join(KINDS)}")
        self._check_kind()
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)

        if not isinstance(self.thoughts, Thoughts | None):
            raise _wrong("thoughts", type(self.thoughts).__name__, "Thoughts")

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """A mapping of the fields as parameters.

        Raises:
            ValidationError: names the field at fault.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValidationError(FIELD, value, f"an object with one of {', '.join(KINDS)}")
        given = {name: one for name, one in value.items() if one is not None}
        known = [item.name for item in fields(cls) if item.name != "thoughts"]
        for name in given:
            if name not in known:
                raise ValidationError(FIELD, name, f"an object of {', '.join(known)}")
        return cls(**given)

    def _check_kind(self) -> None:
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                parsed(name, getattr(self, name))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.json_object is not None and self.json_object is not True:
            raise _wrong("json_object", self.json_object, "true")
        if self.choice is not None:
            self._check_choice(self.choice)

    @staticmethod
    def _check_choice(choice: Any) -> None:
        if not isinstance(choice, list) or not choice:
            raise _wrong("choice", choice, "a list of at least one text")
        if len(choice) > MAX_CHOICES:
            raise _wrong("choice", f"{len(choice)} texts", f"at most {MAX_CHOICES}")
        size = 0
        for text in choice:
            if not isinstance(text, str) or not text:
                raise _wrong("choice", text, "texts that are not empty")
            size += len(text)
            if size > MAX_CHOICE_CHARACTERS:
                raise _wrong("choice", "longer texts", f"{MAX_CHOICE_CHARACTERS} characters in all")


class Constraint:
    """The rule of a parameter that is `StructuredOutputsParams`, or a mapping of its fields."""

    metavar: ClassVar[str] = "JSON"
    allowed: ClassVar[str] = f"`StructuredOutputsParams`: one of {', '.join(KINDS)}"

    def checked(self, name: str, value: Any) -> StructuredOutputsParams:
        return StructuredOutputsParams.of(value)


class Tags:
    """The rule of a parameter that is `Thoughts`."""

    metavar: ClassVar[str] = "TAGS"
    allowed: ClassVar[str] = "`Thoughts(begin, end, is_open)`"

    def checked(self, name: str, value: Any) -> Thoughts:
        is_text = isinstance(value, Thoughts) and all(
            isinstance(tag, str) and tag for tag in value[:2]
        )
        if not is_text or not isinstance(value.is_open, bool):
            raise ValidationError(name, value, self.allowed)
        found: Thoughts = value
        return found


def parsed(name: str, value: Any) -> dict[str, Any]:
    """The JSON object that a field holds, as an object or as text.

    Raises:
        ValidationError: it is none, too large, or nested deeper than MAX_DEPTH.
    """
    if isinstance(value, str):
        _check_text(name, value)
        try:
            value = json_text.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _wrong(name, value, f"JSON ({error})") from error
    if not isinstance(value, dict):
        raise _wrong(name, value, "a JSON object")
    if is_deeper(value, MAX_DEPTH):
        raise _wrong(name, "deeper nesting", f"at most {MAX_DEPTH} levels of nesting")
    try:
        text = json_text.dumps(value, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise _wrong(name, type(value).__name__, f"JSON ({error})") from error
    if len(text) > MAX_CHARACTERS:
        raise _wrong(name, f"{len(text)} characters", f"at most {MAX_CHARACTERS} characters")
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists are nested in one another more often than `depth` times."""
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "text that is not empty")
    if len(value) > MAX_CHARACTERS:
        raise _wrong(name, f"{len(value)} characters", f"at most {MAX_CHARACTERS} characters")
    if "\0" in value:
        raise _wrong(name, "a NUL character", "text without NUL")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, "half a surrogate pair", "Unicode text") from error


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _wrong(name: str, value: Any, allowed: str) -> ValidationError:
    return ValidationError(f"{FIELD}.{name}", value, allowed)
