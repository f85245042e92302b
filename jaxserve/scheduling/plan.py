"""What one step does, as the scheduler decides it and `execution.packing` packs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.memory.manager import PageUpdate
from jaxserve.request import End, Request


@dataclass(slots=True)
class DecodeRows:
    """Requests that compute their newest token, which the device knows already.

    Parallel lists with an entry a row; an object for each row would cost as much as planning it.

    Attributes:
        requests: one a row.
        slots: their slots.
        positions: of the token that is computed; the sampled token follows it.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)


class PrefillLane(NamedTuple):
    """A chunk of one request's known tokens: positions `start` .. `start + length - 1`."""

    request: Request
    slot: int
    start: int
    length: int
    samples: bool  # the chunk reaches the last known token, so a new token is sampled


class Upload(NamedTuple):
    """What the device must be told of a slot before the step: tokens and pages from 0 on.

    The tokens were computed by another sequence, which the pages were shared with.
    """

    slot: int
    tokens: np.ndarray  # int32
    pages: list[int]


@dataclass(slots=True)
class StepPlan:
    """Rows of one step. Sampled tokens come back in the order: decode rows, then lanes."""

    decode: DecodeRows = field(default_factory=DecodeRows)
    lanes: list[PrefillLane] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(lane.length for lane in self.lanes)

    def __bool__(self) -> bool:
        # a row that waits may have had its slot prepared
        return bool(self.decode or self.lanes or self.uploads)


@dataclass(slots=True)
class SeenTokens:
    """The tokens of one step that the host has now seen.

    Attributes:
        requests: one an entry; requests that had ended before are left out.
        tokens: the token of each entry.
        rows: index of each entry among the step's sampled rows.
        ends: entry -> how its token ended its request; most tokens end none.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
