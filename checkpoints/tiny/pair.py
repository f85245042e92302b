"""A question with its answer, and the split into training and held-out instances."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Pair:
    """One question and its only right answer.

    Attributes:
        key: what is asked, apart from the wording.
        system: the system turn, where the question needs one.
        before: earlier turns of the conversation.
    """

    task: str
    prompt: str
    answer: str
    key: str
    system: str = ""
    before: tuple[Pair, ...] = ()

    @property
    def held_out(self) -> bool:
        """Whether the pair is held out: one key in ten, a key with a task's name as that task's."""
        named = self.key if "|" in self.key else f"{self.task}|{self.key}"
        digest = hashlib.sha256(named.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 10 == 0

    @property
    def leaves_no_choice(self) -> bool:
        """Whether the answer is a call and one tool alone is listed."""
        listing = self.system.partition("Tools:\n")[2]
        return self.answer.startswith("<tool_call>") and "\n" not in listing


def phrase(rng: Random, forms: Sequence[str]) -> str:
    """One of the wordings, now and then without its capital or its last mark."""
    form = rng.choice(forms)
    if rng.random() < 0.15:
        form = form[0].lower() + form[1:]
    return form.rstrip("?., ") if rng.random() < 0.1 else form


def listed(rng: Random, items: list[int] | list[str]) -> str:
    """The items as a user may type them: mostly ``a, b``, sometimes ``a,b`` or ``a b``."""
    return rng.choices((", ", ",", " "), (14, 3, 3))[0].join(str(item) for item in items)


def join(items: list[int] | list[str]) -> str:
    """The items as text, separated by commas."""
    return ", ".join(str(item) for item in items)
