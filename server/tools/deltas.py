"""What a parser finds in generated text, in the order in which it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that is thought and not said."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins: the `index`-th of the message."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, which are JSON as the model has written it."""

    index: int
    text: str


Delta = Reasoning | Content | CallBegin | CallArguments
