"""The last steps of an engine: what each held, and where its time went."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MOST_STEPS = 4096


class StepRecord(NamedTuple):
    """One step that has run.

    Moments are seconds of `time.monotonic()`, which processes share.

    Attributes:
        number: 0, 1, 2, ... of one engine; one that replaces a dead engine begins again at 0.
        begin: the host began to plan it.
        dispatched: the device was given it.
        fetched: the host had its result.
        plan, pack, dispatch, wait, commit: seconds of the host, see `StepTimes`.
        device_busy: seconds that the device computed it, at least.
        num_decode, num_prefill: rows that go on with one token (and drafts), and rows that bring
            their tokens, such as chunks of prompts.
        num_decode_tokens, num_prefill_tokens: tokens of these rows.
        num_running, num_waiting: sequences with a slot and without, once it was planned.
        num_pages: KV pages that requests owned then.
        num_decode_keys, num_prefill_keys: keys that the tokens of these rows see, added up.
    """

    number: int
    begin: float
    dispatched: float
    fetched: float
    plan: float
    pack: float
    dispatch: float
    wait: float
    commit: float
    device_busy: float
    num_decode: int
    num_prefill: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_decode_keys: int = 0
    num_prefill_keys: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it computed."""
        return self.num_decode_tokens + self.num_prefill_tokens


class StepHistory:
    """Keeps the last MOST_STEPS steps. One thread may record, any may ask."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)

    def record(self, step: StepRecord) -> None:
        """Take in a step that has run; it may replace the oldest one."""
        self._steps.append(step)

    @property
    def last(self) -> StepRecord | None:
        """The one that was recorded last."""
        return self._steps[-1] if self._steps else None

    def after(self, moment: float) -> list[StepRecord]:
        """Steps that ended after a moment, the oldest first."""
        found = []
        for step in reversed(self._steps.copy()):  # the copy is one operation of the interpreter
            if step.fetched <= moment:
                break
            found.append(step)
        return found[::-1]

    def snapshot(self) -> list[StepRecord]:
        """What is kept, the oldest first."""
        return [*self._steps.copy()]
