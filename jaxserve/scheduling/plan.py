"""What one step does, as the scheduler decides it and `execution.packing` packs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.memory.manager import PageUpdate
from jaxserve.memory.tier import Move
from jaxserve.request import End, Request


@dataclass(slots=True)
class ComputeRows:
    """Stretches of tokens that the step computes: one a running request at most.

    Parallel lists with an entry a row; an object for each row would cost as much as planning it.
    Rows whose tokens the device knows come first: they decode, from the newest token of the
    sequence on. A row that decodes has its own first token and as many drafts as its length says
    beside it. The others bring their tokens (`StepPlan.tokens`): chunks of prompts, and whatever
    else the host decides.

    Attributes:
        requests: the request of each row.
        slots: the slot of each request.
        starts: position of the first token; of a row that decodes the most that it can be, since
            the device alone knows how many drafts of the step in flight were accepted.
        lengths: tokens of the row.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(slots=True)
class SampleRows:
    """Which hidden states tokens are sampled from, and for which requests; parallel lists.

    A row that decodes is sampled at each of its tokens, another one at its last. Several sequences
    may sample from one row. Samples of rows that decode come first, in the order of those rows.

    Attributes:
        requests: the request that gets the token.
        slots: the slot of each request.
        rows: index of the compute row whose hidden state is sampled.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)


class Upload(NamedTuple):
    """What the device must learn of a slot before the step: tokens and page list from 0 on.

    The tokens were computed by another sequence, which the pages were shared with.
    """

    slot: int
    tokens: np.ndarray  # int32
    pages: list[int]


class Fork(NamedTuple):
    """A slot that takes over the first `num_tokens` tokens of another one, before the step.

    Attributes:
        source, slot: from and to which slot.
        num_tokens: tokens whose keys and values are in the pages.
        source_pages, pages: the last pages, one a group of layers, which both would write to, are
            copied; none where they are full. The pages before them are shared.
    """

    source: int
    slot: int
    num_tokens: int
    source_pages: list[int]
    pages: list[int]


@dataclass(slots=True)
class StepPlan:
    """One step: what is computed, what is sampled, and what the device learns before it.

    Attributes:
        rows: what is computed.
        tokens: int32 tokens of the compute rows that bring theirs, by row, in order.
        samples: what is sampled; the results come back in this order.
        page_updates: page-table entries that the step is the first to need.
        moves: pages to the host's memory and back, in order. Those that leave before any comes back
            are done first: a fork may write to their pages.
        forks: done second, before pages that come back, which may be those that it reads.
        uploads: done after all moves.
    """

    rows: ComputeRows = field(default_factory=ComputeRows)
    tokens: dict[int, np.ndarray] = field(default_factory=dict)
    samples: SampleRows = field(default_factory=SampleRows)
    page_updates: list[PageUpdate] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)

    @property
    def num_decode(self) -> int:
        """Rows whose tokens the device knows."""
        return len(self.rows) - len(self.tokens)

    @property
    def num_moves_first(self) -> int:
        """How many of the moves come before the forks."""
        coming = (place for place, move in enumerate(self.moves) if not move.leaves)
        return next(coming, len(self.moves))

    def __bool__(self) -> bool:
        # a row that waits may have had its slot prepared
        return bool(self.rows.requests or self.uploads)


@dataclass(slots=True)
class SeenTokens:
    """The tokens of one step that the host has now seen.

    Attributes:
        requests: one an entry; requests that had ended before are left out.
        tokens: the token of each entry.
        samples: index of each entry among the plan's samples.
        ends: entry -> how its token ended its request; most tokens end none.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
