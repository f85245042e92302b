"""What the ledger keeps of each client, and of each engine."""

from __future__ import annotations

from collections import Counter


class Account:
    """What one client has in the engine or on its way there."""

    __slots__ = ("admitted", "entering", "sequences", "tokens", "waiting", "waiting_by_rank")

    def __init__(self) -> None:
        self.entering = 0  # requests that have arrived and are not admitted yet
        self.admitted = 0  # requests that have not ended
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
