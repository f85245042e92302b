"""A step plan becomes a blob: the host side of the step's inputs and of its features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.execution.features import FAST, Facts, Feature, Need, SpecialRow
from jaxserve.execution.inputs import Blob, BlobLayout
from jaxserve.execution.layout import RowTable
from jaxserve.request import Request, StopRule
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import StepPlan


class Needs(NamedTuple):
    """What a plan asks of its program.

    Attributes:
        features: names of the features that its rows and chunks need.
        special: (index among the plan's rows, features) of each row that needs a costly feature.
            Plan rows are decode rows, then lanes.
    """

    features: frozenset[str]
    special: list[tuple[int, frozenset[str]]]


class RowPacker:
    """Writes blobs; remembers what the requests in the slots need.

    Args:
        max_num_seqs: slots; row `max_num_seqs` is the trash row.
        features: of the engine.
        facts: about the engine.
    """

    def __init__(self, max_num_seqs: int, features: Sequence[Feature], facts: Facts):
        self._trash = max_num_seqs
        self._features = features
        self._facts = facts
        self._owner: list[Request | None] = [None] * max_num_seqs
        self._always: dict[int, frozenset[str]] = {}  # by slot: what its rows need in every step
        self._at_times: dict[int, list[Feature]] = {}  # by slot: what they may need
        self._prompt_len = np.zeros(max_num_seqs + 1, np.int32)
        # columns of a program's features come first in the same order in every program
        self._table = RowTable({feature.name: feature.row for feature in features if feature.row})
        self._rows = np.zeros((max_num_seqs + 1, self._table.width), np.int32)
        idle = Request(
            "idle",
            [0],
            SamplingParams(temperature=0.0),
            StopRule(frozenset(), frozenset(), 0, 1),
            0,
        )
        self._write_row(self._trash, idle)

    def _bind(self, request: Request, slot: int) -> None:
        """Learn what the request that got `slot` needs."""
        if self._owner[slot] is request:
            return
        self._owner[slot] = request
        self._always.pop(slot, None)
        self._at_times.pop(slot, None)
        needs = [(f, f.need(request)) for f in self._features if f.special]
        always = frozenset(f.name for f, need in needs if need is Need.ALWAYS)
        at_times = [f for f, need in needs if need is Need.AT_TIMES]
        if always:
            self._always[slot] = always
        if at_times:
            self._at_times[slot] = at_times
        for feature, need in needs:
            if need is not Need.NEVER:
                feature.bind(request, slot, self._facts)
        self._write_row(slot, request)
        self._prompt_len[slot] = request.num_prompt

    def _write_row(self, slot: int, request: Request) -> None:
        for feature in self._features:
            if feature.row is not None:
                value = feature.row_of(request, self._facts)
                self._table.write(self._rows[slot], feature.name, value)

    def needs(self, plan: StepPlan) -> Needs:
        """What the plan asks of its program; learns of new slot owners."""
        features = FAST
        for lane in plan.lanes:
            self._bind(lane.request, lane.slot)
            for feature in self._features:
                if feature.needed_by_chunk(lane):
                    features |= {feature.name}
        special: list[tuple[int, frozenset[str]]] = []
        if self._always or self._at_times:
            self._forget_the_gone()
        if self._always or self._at_times:
            for index, (request, slot) in enumerate(_sampling_rows(plan)):
                if request is None:
                    continue
                needed = self._always.get(slot, frozenset())
                at_times = self._at_times.get(slot)
                if at_times:
                    now = [feature for feature in at_times if feature.needed_now(request)]
                    needed |= {feature.name for feature in now}
                    if len(now) < len(at_times):
                        self._at_times[slot] = now
                if needed:
                    features |= needed
                    special.append((index, needed))
        return Needs(features, special)

    def _forget_the_gone(self) -> None:
        """Drop what is known of requests that have left their slots."""
        for slot in [slot for slot in self._always if self._has_left(slot)]:
            del self._always[slot]
        for slot in [s for s, found in self._at_times.items() if not found or self._has_left(s)]:
            del self._at_times[slot]

    def _has_left(self, slot: int) -> bool:
        owner = self._owner[slot]
        return owner is None or owner.slot != slot

    def pack(self, plan: StepPlan, needs: Needs, layout: BlobLayout) -> np.ndarray:
        """A fresh blob for `plan`; fresh because a compiled call may read NumPy memory in place."""
        shape = layout.shape
        flat = np.zeros(layout.size, np.int32)
        blob = layout.views(flat)
        step = blob.step
        step.slot[:] = self._trash
        if plan.decode:
            count = len(plan.decode)
            step.slot[:count] = plan.decode.slots
            step.position[:count] = plan.decode.positions
        step.updates[0] = self._trash
        if plan.page_updates:
            step.updates[:, : len(plan.page_updates)] = np.array(plan.page_updates, np.int32).T
        if shape.num_prefill:
            self._pack_lanes(plan, layout, blob)
        step.prompt_len[:] = self._prompt_len[step.slot]
        blob.rows[:] = self._rows[step.slot][:, : layout.row_table.width]
        if needs.features is not FAST:
            step.wanted[:] = [feature.name in needs.features for feature in self._features]
        if shape.num_special:
            self._pack_special(plan, needs, layout, blob)
        return flat

    def _pack_lanes(self, plan: StepPlan, layout: BlobLayout, blob: Blob) -> None:
        first_row, step = layout.shape.num_decode, blob.step
        step.token_lane[:] = layout.shape.num_lanes
        begin = 0
        for index, lane in enumerate(plan.lanes):
            end = begin + lane.length
            last = lane.start + lane.length
            step.slot[first_row + index] = lane.slot
            step.position[first_row + index] = last - 1
            step.token[begin:end] = lane.request.prefill_tokens[lane.start : last]
            step.token_lane[begin:end] = index
            step.token_position[begin:end] = np.arange(lane.start, last)
            step.lane_start[index] = begin
            step.lane_length[index] = lane.length
            step.lane_context[index] = lane.start
            begin = end

    def _pack_special(self, plan: StepPlan, needs: Needs, layout: BlobLayout, blob: Blob) -> None:
        shape = layout.shape
        blob.step.special[:] = shape.num_rows
        rows = _sampling_rows(plan)
        by_feature: dict[str, list[SpecialRow]] = {name: [] for name in shape.features}
        for place, (index, needed) in enumerate(needs.special):
            row = program_row(index, plan, shape.num_decode)
            request, slot = rows[index]
            assert request is not None
            own = row if shape.all_special else place
            blob.step.special[place] = row
            for name in needed:
                by_feature[name].append(SpecialRow(own, request, slot))
        for feature in self._features:
            if feature.name in blob.features:
                inputs = blob.features[feature.name]
                feature.pack(inputs, by_feature[feature.name], plan, self._facts)


def program_row(index: int, plan: StepPlan, num_decode: int) -> int:
    """Where a plan row lies among the rows of a program with so many decode rows."""
    decodes = len(plan.decode)
    return index if index < decodes else num_decode + index - decodes


def _sampling_rows(plan: StepPlan) -> list[tuple[Request | None, int]]:
    """(request, slot) of each plan row; no request where a lane does not sample."""
    rows: list[tuple[Request | None, int]] = [*zip(plan.decode.requests, plan.decode.slots)]
    rows += [(lane.request if lane.samples else None, lane.slot) for lane in plan.lanes]
    return rows
