"""One declaration for each setting and parameter: default, values, meaning and reader.

`EngineConfig` and `SamplingParams` are dataclasses whose fields are declared by `setting`. Their
checks, the flags of the commands and the tables of docs/settings.md are made from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from jaxserve.errors import ValidationError

_KEY = "setting"


class Rule(Protocol):
    """Which values a setting may have.

    Attributes:
        metavar: what its flag's value is called.
    """

    @property
    def metavar(self) -> str: ...

    @property
    def allowed(self) -> str:
        """In words, for errors and docs."""
        ...

    def checked(self, name: str, value: Any) -> Any:
        """The value as it is kept.

        Raises:
            ValidationError: it is not allowed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    """Integers."""

    metavar: ClassVar[str] = "N"
    least: int | None = None
    most: int | None = None

    @property
    def allowed(self) -> str:
        if self.least is None:
            return "an integer"
        if self.most is None:
            return f"an integer >= {self.least}"
        return f"an integer from {self.least} to {self.most}"

    def checked(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValidationError(name, value, self.allowed)
        number = int(value)
        low, high = self.least, self.most
        if (low is not None and number < low) or (high is not None and number > high):
            raise ValidationError(name, value, self.allowed)
        return number


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Powers of two, from 1 on."""

    metavar: ClassVar[str] = "N"
    allowed: ClassVar[str] = "a power of two"

    def checked(self, name: str, value: Any) -> int:
        number = Integer(1).checked(name, value)
        if number & (number - 1):
            raise ValidationError(name, value, self.allowed)
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """Finite numbers from `least`, or above `above`, to `most`."""

    least: float | None = None
    most: float = math.inf
    above: float | None = None
    unit: str = ""
    metavar: str = "X"

    @property
    def allowed(self) -> str:
        text = "a finite number" + (f" of {self.unit}" if self.unit else "")
        if self.least is None and self.above is None:
            return text
        if self.most == math.inf:
            return f"{text} >= {self.least:g}" if self.above is None else f"{text} > {self.above:g}"
        low = f"[{self.least:g}" if self.above is None else f"({self.above:g}"
        return f"{text} in {low}, {self.most:g}]"

    def checked(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValidationError(name, value, self.allowed)
        try:
            number = float(value)
        except OverflowError as error:
            raise ValidationError(name, value, self.allowed) from error
        if (
            not math.isfinite(number)
            or (self.least is not None and number < self.least)
            or (self.above is not None and number <= self.above)
            or number > self.most
        ):
            raise ValidationError(name, value, self.allowed)
        return number


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some names."""

    metavar: ClassVar[str] = "NAME"
    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.names)}"

    def checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise ValidationError(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Switch:
    """True or false."""

    metavar: ClassVar[str] = ""
    allowed: ClassVar[str] = "true or false"

    def checked(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValidationError(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is not empty."""

    metavar: str = "TEXT"
    allowed: ClassVar[str] = "text that is not empty"

    def checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValidationError(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of texts that are not empty; one text is a list of one where `single` says so."""

    metavar: ClassVar[str] = "TEXT"
    single: bool = False

    @property
    def allowed(self) -> str:
        return ("a string or " if self.single else "") + "a list of non-empty strings"

    def checked(self, name: str, value: Any) -> list[str]:
        if value is None:
            return []
        if self.single and isinstance(value, str):
            value = [value]
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise ValidationError(name, value, self.allowed)
        texts = list(value)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValidationError(name, value, self.allowed)
        return texts


@dataclass(frozen=True, slots=True)
class Integers:
    """A tuple of `count` integers."""

    metavar: ClassVar[str] = "N"
    count: int
    least: int

    @property
    def allowed(self) -> str:
        return f"{self.count} integers >= {self.least}"

    def checked(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or len(value) != self.count:
            raise ValidationError(name, value, self.allowed)
        return tuple(Integer(self.least).checked(name, number) for number in value)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field is beside its name, type and default.

    Attributes:
        rule: the values that it may have.
        text: what it means, in one or two sentences; help of its flag and docs are made of it.
        reader: the part that acts on it; docs are grouped by it.
        optional: whether None is allowed, which `text` explains.
        flag: whether commands have a flag for it.
    """

    rule: Rule
    text: str
    reader: str
    optional: bool
    flag: bool

    def checked(self, name: str, value: Any) -> Any:
        """The value as it is kept; raises ValidationError where it is not allowed."""
        if value is None and self.optional:
            return None
        return self.rule.checked(name, value)


def setting(
    default: Any,
    rule: Rule,
    text: str,
    *,
    reader: str,
    optional: bool | None = None,
    flag: bool = True,
    secret: bool = False,
) -> Any:
    """Declares a field of a dataclass.

    Args:
        default: its default, `dataclasses.MISSING` where it has none; a function makes each
            instance's own.
        rule, text, reader, flag: see `Setting`.
        optional: whether None is allowed; by the default when None.
        secret: whether `repr` leaves it out.
    """
    optional = default is None if optional is None else optional
    told = {_KEY: Setting(rule, text, reader, optional, flag)}
    given: dict[str, Any] = {"metadata": told, "repr": not secret}
    if default is not dataclasses.MISSING:
        given["default_factory" if isinstance(default, Callable) else "default"] = default  # type: ignore[arg-type]
    return dataclasses.field(**given)


def settings_of(kind: type) -> dict[str, Setting]:
    """The declarations of a dataclass by the names of its fields."""
    return _declared(kind)[0]


def defaults_of(kind: type) -> dict[str, Any]:
    """Defaults by name, of the fields that have one; each list is the same one every time."""
    return _declared(kind)[1]


@functools.cache
def _declared(kind: Any) -> tuple[dict[str, Setting], dict[str, Any]]:
    items = {f.name: f.metadata[_KEY] for f in dataclasses.fields(kind) if _KEY in f.metadata}
    defaults = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(kind)
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }
    return items, defaults


def check(made: Any) -> None:
    """Holds the fields of a dataclass against their declarations and keeps what the rules give.

    Raises:
        ValidationError: a value has the wrong type or is not allowed.
    """
    items, defaults = _declared(made.__class__)
    for name, item in items.items():
        value = getattr(made, name)
        if value is not defaults.get(name, item):  # defaults are allowed
            object.__setattr__(made, name, item.checked(name, value))
