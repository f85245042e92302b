"""What the ledger keeps of each request, of each client, and of each engine."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

# Of a sequence's output, as work that is expected: most end before their `max_tokens`.
MOST_OUTPUT = 128


class RequestWork(NamedTuple):
    """The work that a request brings to its engine.

    Attributes:
        client: the name of its client, see `Queueing.client`.
        num_prompt: tokens of its prompt.
        sequences: that continue the prompt.
        priority: see `Queueing.priority`.
        compiles: it waits for its grammar first, and is in no queue until then.
        num_output: see `AddGroup.num_output_asked`.
        engine: the number of the engine that serves it.
        media_bytes: of its images and the like, and of what the engine makes of them.
    """

    client: str
    num_prompt: int
    sequences: int = 1
    priority: int = 0
    compiles: bool = False
    num_output: int = 0
    engine: int = 0
    media_bytes: int = 0

    @property
    def output_work(self) -> int:
        """Output tokens that are expected of each sequence."""
        return min(self.num_output // self.sequences, MOST_OUTPUT)


class Account:
    """What one client has in the engine or on its way there."""

    __slots__ = (
        "admitted",
        "entering",
        "media_bytes",
        "sequences",
        "tokens",
        "waiting",
        "waiting_by_rank",
    )

    def __init__(self) -> None:
        self.entering = 0  # requests that have arrived and are not admitted yet
        self.admitted = 0  # requests that have not ended
        self.media_bytes = 0  # of these
        self.waiting = 0  # admitted requests without a first step
        self.tokens = 0  # of the prompts of these
        self.sequences = 0  # that want a slot of an engine that is there, or have one
        self.waiting_by_rank = Counter[int]()  # of these sequences those without a first step


class EnginePace:
    """What one engine has done, and what it has to do."""

    __slots__ = ("behind", "capacity", "is_lost", "last_step", "num_steps", "work")

    def __init__(self, slots: int):
        self.num_steps = 0
        self.last_step = 0.0
        self.capacity = slots  # sequences that run at once
        self.is_lost = False  # it serves nothing, until it is restarted
        self.behind = 0.0  # seconds from a step's end until this process has heard of it
        self.work = 0  # tokens: of prompts that wait, and expected output of all that want a slot
