"""A question with its answer, and the split into training and held-out instances."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """One question and its only right answer."""

    task: str
    prompt: str
    answer: str
    key: str

    @property
    def held_out(self) -> bool:
        """True for one key in ten."""
        digest = hashlib.sha256(f"{self.task}|{self.key}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 10 == 0


def join(items: list[int] | list[str]) -> str:
    """The items as text, separated by commas."""
    return ", ".join(str(item) for item in items)
