"""Fields of Pydantic models: 48 of these 51 are accepted, and the others are refused by name."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import typing
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
import pytest
from pydantic import BaseModel, Field, networks, types
from typing_extensions import TypedDict

from benchmarks.constrained.suite import allows, compiled


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Cat(BaseModel):
    kind: typing.Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: typing.Literal["dog"] = "dog"
    name: str = "Rex"


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Point(typing.NamedTuple):
    x: int
    y: float


class Film(TypedDict):
    title: str
    year: int


@dataclass
class Pair:
    left: int
    right: str = "x"


UTC = datetime.UTC
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 1, tzinfo=UTC)
# a type, the JSON of a value that it dumps to, JSON that is none
FIELDS: dict[str, tuple[Any, Any, str]] = {
    "str": (str, "é \n", "1"),
    "constr": (Annotated[str, Field(min_length=1, max_length=3)], "abc", '"abcd"'),
    "pattern": (Annotated[str, Field(pattern=r"^[a-z]+\d$")], "ab1", '"ab"'),
    "int": (int, 5, '"5"'),
    "bounds": (Annotated[int, Field(ge=1, lt=10)], 9, "10"),
    "64 bits": (Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], -7, str(2**63)),
    "PositiveInt": (pydantic.PositiveInt, 1, "0"),
    "multiple_of": (Annotated[int, Field(multiple_of=5)], 15, "7"),
    "float": (float, 1.5, "true"),
    "NegativeFloat": (pydantic.NegativeFloat, -0.5, "0"),
    "bool": (bool, True, "0"),
    "None": (None, None, "0"),
    "Any": (Any, {"a": [1, None]}, "{"),
    "Decimal": (decimal.Decimal, decimal.Decimal("19.99"), "true"),
    "bytes": (bytes, b"ab", "[]"),
    "Base64Bytes": (types.Base64Bytes, b"abcd", '"a"'),
    "Base64UrlStr": (types.Base64UrlStr, "abcd", '"a+=="'),
    "date": (datetime.date, datetime.date(2024, 2, 29), '"2021-02-29"'),
    "datetime": (datetime.datetime, MOMENT, '"2021-02-29T12:30:01Z"'),
    "AwareDatetime": (pydantic.AwareDatetime, MOMENT, '"2024-02-29"'),
    "PastDate": (pydantic.PastDate, datetime.date(2020, 1, 1), '"2020-13-01"'),
    "time": (datetime.time, datetime.time(12, 30, tzinfo=UTC), '"12:60:00Z"'),
    "timedelta": (datetime.timedelta, datetime.timedelta(hours=3), '"3 hours"'),
    "UUID": (uuid.UUID, uuid.UUID(int=5), '"0"'),
    "UUID4": (
        pydantic.UUID4,
        uuid.UUID("b4f2ad34-9d37-4d2c-8e0a-0d5f1b2c3d4e"),
        '"b4f2ad34-9d37-1d2c-8e0a-0d5f1b2c3d4e"',
    ),
    "UUID5": (pydantic.UUID5, uuid.uuid5(uuid.NAMESPACE_DNS, "a"), '"a"'),
    "IPv4Address": (ipaddress.IPv4Address, ipaddress.IPv4Address("10.0.0.1"), '"10.0.0.256"'),
    "IPv6Address": (ipaddress.IPv6Address, ipaddress.IPv6Address("::1"), '":1"'),
    "IPv4Network": (ipaddress.IPv4Network, ipaddress.IPv4Network("10.0.0.0/8"), '"10.0.0.0/33"'),
    "IPv6Interface": (
        ipaddress.IPv6Interface,
        ipaddress.IPv6Interface("2001:db8::1/64"),
        '"2001:db8::1/129"',
    ),
    "IPvAnyAddress": (networks.IPvAnyAddress, ipaddress.IPv4Address("10.0.0.1"), '"a"'),
    "HttpUrl": (pydantic.HttpUrl, pydantic.HttpUrl("https://a.example/b?c=1"), '"a b"'),
    "email": (
        Annotated[str, pydantic.WithJsonSchema({"type": "string", "format": "email"})],
        "a@b.example",
        '"a"',
    ),
    "Path": (pathlib.Path, pathlib.Path("/a/b"), "{}"),
    "SecretStr": (pydantic.SecretStr, pydantic.SecretStr("x"), "1"),
    "ByteSize": (pydantic.ByteSize, 1024, "-1"),
    "Enum": (Colour, Colour.RED, '"green"'),
    "IntEnum": (Level, Level.LOW, "3"),
    "Literal": (typing.Literal["a", 1, None], "a", '"b"'),
    "Optional": (int | None, None, '"a"'),
    "discriminated": (Annotated[Cat | Dog, Field(discriminator="kind")], Dog(), '{"name":"Rex"}'),
    "list": (list[int], [1, 2], '["a"]'),
    "tuple": (tuple[int, str], (1, "a"), "[1]"),
    "conlist": (Annotated[list[int], Field(max_length=2)], [1], "[1,2,3]"),
    "deque": (deque[int], deque([1]), "[null]"),
    "Sequence of models": (Sequence[Node], [Node(value=1, children=[Node(value=2)])], "[[]]"),
    "dict": (dict[str, float], {"a": 1.5}, '{"a":"b"}'),
    "NamedTuple, TypedDict, dataclass": (
        tuple[Point, Film, Pair],
        (Point(1, 2.5), {"title": "M", "year": 1931}, Pair(1)),
        '[[1,2.5],{"title":"M"},{"left":1}]',
    ),
}
REFUSED = {
    "set": (set[int], "uniqueItems"),
    "frozenset": (frozenset[str], "uniqueItems"),
    "Mapping of an Enum": (Mapping[Colour, int], "propertyNames"),
}


def test_there_are_as_many_as_the_documentation_says() -> None:
    assert (len(FIELDS), len(REFUSED)) == (48, 3)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_accepted_with_the_values_that_it_has(name: str) -> None:
    kind, value, wrong = FIELDS[name]
    model = pydantic.create_model("Model", field=(kind, ...))
    matcher = compiled(json=model.model_json_schema())
    dumped = model.model_construct(field=value).model_dump_json(warnings=False)
    assert allows(matcher, dumped)
    assert not allows(matcher, f'{{"field":{wrong}}}')
    assert json.loads(dumped).keys() == {"field"} and not allows(matcher, "{}")


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_no_grammar_carries_is_refused_by_its_keyword(name: str) -> None:
    kind, keyword = REFUSED[name]
    model = pydantic.create_model("Model", field=(kind, ...))
    with pytest.raises(ValueError, match=f"without '{keyword}', .*'#/properties/field/{keyword}'"):
        compiled(json=model.model_json_schema())
