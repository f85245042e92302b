"""What one step does, as the scheduler decides it and `execution.batch` packs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.memory.manager import PageUpdate
from jaxserve.request import FinishReason, Request


class DecodeRow(NamedTuple):
    """One request that computes its newest token, which the device knows already."""

    request: Request
    slot: int
    position: int  # of the token that is computed; the sampled token follows it


class PrefillLane(NamedTuple):
    """A chunk of one request's known tokens: positions `start` .. `start + length - 1`."""

    request: Request
    slot: int
    start: int
    length: int
    samples: bool  # the chunk reaches the last known token, so a new token is sampled


@dataclass(slots=True)
class StepPlan:
    """Rows of one step. Sampled tokens come back in the order: decode rows, then lanes."""

    decode: list[DecodeRow] = field(default_factory=list)
    lanes: list[PrefillLane] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(lane.length for lane in self.lanes)

    def __bool__(self) -> bool:
        return bool(self.decode or self.lanes)


class TokenUpdate(NamedTuple):
    """A token that the host has now seen, and whether it ended its request."""

    request: Request
    row: int  # index among the step's sampled rows
    token: int
    finish_reason: FinishReason | None
    stop_reason: int | None
