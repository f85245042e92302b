"""A step plan becomes a blob: the host side of the step's inputs and of its features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxserve.boundary.messages import AddGroup
from jaxserve.errors import RowError
from jaxserve.execution.features import Chunk, Feature, Need, SpecialRow, feature_sets, overrides
from jaxserve.execution.step_inputs import Blob, BlobLayout, row_tables
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.plan import StepPlan


class StepNeeds(NamedTuple):
    """What a plan asks of its program, and where its rows go.

    Attributes:
        features: names of the features that its rows need.
        special: (index among the plan's samples, features) of each that needs a costly feature.
        single: compute rows that bring one token, which lie behind the rows that decode.
        lanes: the other compute rows that bring their tokens, which are lanes of the region.
    """

    features: frozenset[str]
    special: list[tuple[int, frozenset[str]]]
    single: list[int]
    lanes: list[int]

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """Those of the prefill region, in its order."""
        rows = plan.rows
        return [Chunk(rows.requests[r], rows.starts[r], rows.lengths[r]) for r in self.lanes]


class PackedRows(NamedTuple):
    """A plan as the operand of a program.

    Attributes:
        blob: int32[layout.size].
        rows: index among the program's samples of each sample of the plan.
    """

    blob: np.ndarray
    rows: Sequence[int]


class PlainStep(NamedTuple):
    """A blob of rows that decode and need nothing else; the next step's is often the same."""

    layout: BlobLayout
    slots: list[int]
    blob: np.ndarray


class RowPacker:
    """Writes blobs; remembers what the requests in the slots need.

    Args:
        max_num_seqs: slots; row `max_num_seqs` is the trash row.
        features: of the engine.
        brings_tokens: rows that decode bring their token as well: the host has seen it, and the
            device that embeds it has not.
    """

    def __init__(
        self, max_num_seqs: int, features: Sequence[Feature], *, brings_tokens: bool = False
    ):
        self._trash = max_num_seqs
        self._brings_tokens = brings_tokens
        self._features = features
        self._of_chunks = [f for f in features if overrides(f, "needed_by_chunk")]
        self._fast = feature_sets(features).fast
        self._owner: list[Request | None] = [None] * max_num_seqs
        self._always: dict[int, frozenset[str]] = {}  # by slot: what its rows need in every step
        self._at_times: dict[int, list[Feature]] = {}  # by slot: what they may need
        self._prompt_len = np.zeros(max_num_seqs + 1, np.int32)
        self._last: PlainStep | None = None
        self._left_out: set[str] = set()
        self._hooked: dict[int, frozenset[str]] = {}  # by slot: what computing its tokens needs
        self._table, self._token_table = row_tables(features)
        self._rows = np.zeros((max_num_seqs + 1, self._table.width), np.int32)
        self._token_rows = np.zeros((max_num_seqs + 1, self._token_table.width), np.int32)
        self._columns: dict[BlobLayout, tuple[slice | np.ndarray, slice | np.ndarray]] = {}
        rule = StopRule(frozenset(), frozenset(), 0, 1)
        greedy = SamplingParams(temperature=0.0)
        idle = AddGroup(["idle"], [0], [0], greedy, rule, [], Queueing(0.0))
        self._idle = Request("idle", idle)
        self._write_row(self._trash, self._idle)

    def add(self, features: Sequence[Feature]) -> None:
        """Take further features, behind those it has; requests in slots do without them."""
        self._features = [*self._features, *features]
        self._table, self._token_table = row_tables(self._features)
        for name, table in (("_rows", self._table), ("_token_rows", self._token_table)):
            before = getattr(self, name)
            more = np.zeros((len(before), table.width - before.shape[1]), np.int32)
            setattr(self, name, np.concatenate([before, more], axis=1))
        self._columns = {}
        self._write_row(self._trash, self._idle)

    def _columns_of(self, layout: BlobLayout) -> tuple[slice | np.ndarray, slice | np.ndarray]:
        """Where the columns of a program's tables are among all."""
        found = self._columns.get(layout)
        if found is None:
            rows = layout.row_table.places_in(self._table)
            found = rows, layout.token_table.places_in(self._token_table)
            self._columns[layout] = found
        return found

    def _bind(self, request: Request, slot: int) -> None:
        """Learn what the request that got `slot` needs."""
        if self._owner[slot] is request:
            return
        self._owner[slot] = request
        self._last = None
        self._always.pop(slot, None)
        self._at_times.pop(slot, None)
        self._hooked.pop(slot, None)
        self._prompt_len[slot] = request.num_prompt
        if request.request_id in self._left_out:
            self._rows[slot] = self._rows[self._trash]
            self._token_rows[slot] = self._token_rows[self._trash]
            return
        try:
            self._bind_features(request, slot)
        except Exception as error:
            raise RowError(request.request_id) from error

    def leave_out(self, request_id: str) -> None:
        """Pack the rows of a request as if it asked for nothing: it has to end with this step.

        Raises:
            ValueError: they are packed so already.
        """
        if request_id in self._left_out:
            raise ValueError(f"request {request_id} is left out already")
        self._left_out.add(request_id)
        for slot, owner in enumerate(self._owner):
            if owner is not None and owner.request_id == request_id:
                self._owner[slot] = None
                self._bind(owner, slot)

    def forget_left_out(self) -> None:
        """Those that were left out have ended."""
        self._left_out.clear()

    def _bind_features(self, request: Request, slot: int) -> None:
        needs = [(f, f.need(request)) for f in self._features if f.special or f.on_demand]
        for feature, need in needs:
            if not isinstance(need, Need):
                raise TypeError(f"`need` of feature {feature.name} is {need!r}, not a Need")
        hooked = [f.name for f, need in needs if not f.special and need is not Need.NEVER]
        if hooked:
            self._hooked[slot] = frozenset(hooked)
        always = frozenset(f.name for f, need in needs if f.special and need is Need.ALWAYS)
        at_times = [f for f, need in needs if need is Need.AT_TIMES]
        if always:
            self._always[slot] = always
        if at_times:
            self._at_times[slot] = at_times
        for feature, need in needs:
            if need is not Need.NEVER:
                feature.bind(request, slot)
        self._write_row(slot, request)

    def _write_row(self, slot: int, request: Request) -> None:
        for feature in self._features:
            if feature.row is not None:
                value = feature.row_of(request)
                self._table.write(self._rows[slot], feature.name, value)
            if feature.token_row is not None:
                values = feature.token_row_of(request)
                self._token_table.write(self._token_rows[slot], feature.name, values)

    def needs(self, plan: StepPlan) -> StepNeeds:
        """What the plan asks of its program; learns of new slot owners."""
        features = self._fast
        rows, samples = plan.rows, plan.samples
        single: list[int] = []
        lanes: list[int] = []
        if plan.tokens:
            for part in (rows, samples):
                for index in range(plan.num_decode, len(part)):
                    self._bind(part.requests[index], part.slots[index])
            times = Counter(samples.rows[plan.num_decode :])
            for row in plan.tokens:
                chunk = Chunk(rows.requests[row], rows.starts[row], rows.lengths[row])
                needed = self._needed_by_chunk(chunk)
                features |= needed
                alone = chunk.length == 1 and times[row] < 2 and not needed
                (single if alone else lanes).append(row)
        if self._hooked:
            self._forget_the_gone()
            for slot in rows.slots:
                features |= self._hooked.get(slot, frozenset())
        special: list[tuple[int, frozenset[str]]] = []
        if self._always or self._at_times:
            self._forget_the_gone()
        if self._always or self._at_times:
            for index, (request, slot) in enumerate(zip(samples.requests, samples.slots)):
                needed_now = self._always.get(slot, frozenset())
                at_times = self._at_times.get(slot)
                if at_times:
                    now = _needed_now(at_times, request)
                    needed_now |= {feature.name for feature in now}
                    if len(now) < len(at_times):
                        self._at_times[slot] = now
                if needed_now:
                    features |= needed_now
                    special.append((index, needed_now))
        return StepNeeds(features, special, single, lanes)

    def _needed_by_chunk(self, chunk: Chunk) -> set[str]:
        if chunk.request.request_id in self._left_out:
            return set()
        try:
            return {f.name for f in self._of_chunks if f.needed_by_chunk(chunk)}
        except Exception as error:
            raise RowError(chunk.request.request_id) from error

    def _forget_the_gone(self) -> None:
        """Drop what is known of requests that have left their slots; one may come back to its."""
        known = {*self._always, *self._at_times, *self._hooked}
        for slot in [slot for slot in known if self._has_left(slot)]:
            self._owner[slot] = None
            self._always.pop(slot, None)
            self._at_times.pop(slot, None)
            self._hooked.pop(slot, None)
        for slot in [slot for slot, found in self._at_times.items() if not found]:
            del self._at_times[slot]

    def _has_left(self, slot: int) -> bool:
        owner = self._owner[slot]
        return owner is None or owner.slot != slot

    def pack(self, plan: StepPlan, needs: StepNeeds, layout: BlobLayout) -> PackedRows:
        """Write a plan into a fresh blob, since a compiled call may read NumPy memory in place."""
        shape, rows = layout.shape, plan.rows
        is_plain = not plan.tokens and not needs.special and shape.num_queries == 1
        is_plain = is_plain and not self._brings_tokens
        last = self._last
        if is_plain and last and last.layout is layout and last.slots == rows.slots:
            flat = last.blob.copy()
            self._pack_updates(plan, layout.updates(flat))
            return PackedRows(flat, range(plan.num_decode))
        flat = np.zeros(layout.size, np.int32)
        blob = layout.views(flat)
        step = blob.step
        decodes = plan.num_decode
        step.slot[:decodes] = rows.slots[:decodes] if plan.tokens else rows.slots
        if decodes < shape.num_decode:
            step.slot[decodes:] = self._trash
        if self._brings_tokens:
            step.start[:decodes] = [1 + start for start in rows.starts[:decodes]]
            newest = [request.output_token_ids[-1] for request in rows.requests[:decodes]]
            step.first[:decodes] = [1 + token for token in newest]
        for place, row in enumerate(needs.single, start=decodes):
            step.slot[place] = rows.slots[row]
            step.start[place] = 1 + rows.starts[row]
            step.first[place] = 1 + plan.tokens[row][0]
        if shape.num_queries > 1:
            count = decodes + len(needs.single)
            step.length[:decodes] = rows.lengths[:decodes]
            step.length[decodes:count] = 1
        self._pack_updates(plan, step.updates)
        slots = step.slot
        if shape.num_prefill:
            self._pack_lanes(plan, needs, layout, blob)
            slots = np.concatenate([step.slot, step.lane_slot])
        step.prompt_len[:] = self._prompt_len[slots]
        row_columns, token_columns = self._columns_of(layout)
        if layout.token_table.width:
            blob.token_rows[:] = self._token_rows[slots][:, token_columns]
        places = self._pack_samples(plan, needs, layout, blob)
        if shape.num_prefill:
            slots = np.concatenate([step.slot, step.sample_slot])
        blob.rows[:] = self._rows[slots][:, row_columns]
        if needs.features is not self._fast:
            known = self._features[: len(step.wanted)]  # others came after the program
            step.wanted[:] = [feature.name in needs.features for feature in known]
        if blob.features:
            self._pack_features(plan, needs, layout, blob, places)
        if is_plain:
            self._last = PlainStep(layout, rows.slots, flat)
        return PackedRows(flat, places)

    def _pack_updates(self, plan: StepPlan, updates: np.ndarray) -> None:
        updates[0], updates[1:] = self._trash, 0
        if plan.page_updates:
            flat = np.fromiter(chain.from_iterable(plan.page_updates), np.int32)
            updates[:, : len(plan.page_updates)] = flat.reshape(-1, 3).T

    def _pack_lanes(self, plan: StepPlan, needs: StepNeeds, layout: BlobLayout, blob: Blob) -> None:
        step, rows = blob.step, plan.rows
        step.lane_slot[:] = self._trash
        step.token_lane[:] = layout.shape.num_lanes
        begin = 0
        for lane, row in enumerate(needs.lanes):
            start, length = rows.starts[row], rows.lengths[row]
            end = begin + length
            step.lane_slot[lane] = rows.slots[row]
            step.lane_start[lane] = begin
            step.lane_length[lane] = length
            step.lane_context[lane] = start
            step.token[begin:end] = plan.tokens[row]
            step.token_lane[begin:end] = lane
            step.token_position[begin:end] = np.arange(start, start + length)
            begin = end

    def _pack_samples(
        self, plan: StepPlan, needs: StepNeeds, layout: BlobLayout, blob: Blob
    ) -> Sequence[int]:
        """Write the slots that sample from the region; returns the places of samples."""
        shape, step, samples = layout.shape, blob.step, plan.samples
        decodes = plan.num_decode
        places: Sequence[int] = range(0, decodes * shape.num_queries, shape.num_queries)
        if shape.num_lanes:
            step.sample_slot[:] = self._trash
        if len(samples) == decodes:
            return places
        single = {row: place for place, row in enumerate(needs.single, start=decodes)}
        lane_of = {row: lane for lane, row in enumerate(needs.lanes)}
        places, count = [*places], 0
        for index in range(decodes, len(samples)):
            row = samples.rows[index]
            if row in single:
                places.append(single[row] * shape.num_queries)
                continue
            lane = lane_of[row]
            step.sample_slot[count] = samples.slots[index]
            step.sample_source[count] = step.lane_start[lane] + step.lane_length[lane] - 1
            places.append(shape.num_decode_tokens + count)
            count += 1
        return places

    def chunks(self, plan: StepPlan, needs: StepNeeds) -> list[Chunk]:
        """Those of the prefill region, in its order; those of requests that are left out idle."""
        return [
            c._replace(request=self._idle) if c.request.request_id in self._left_out else c
            for c in needs.chunks(plan)
        ]

    def _pack_features(
        self,
        plan: StepPlan,
        needs: StepNeeds,
        layout: BlobLayout,
        blob: Blob,
        places: Sequence[int],
    ) -> None:
        shape, samples = layout.shape, plan.samples
        if shape.num_special:
            blob.step.special[:] = shape.num_rows
        by_feature: dict[str, list[SpecialRow]] = {name: [] for name in shape.features}
        for place, (index, needed) in enumerate(needs.special):
            row = places[index]
            own = row if shape.all_special else place
            blob.step.special[place] = row
            for name in needed:
                special = SpecialRow(own, samples.requests[index], samples.slots[index])
                by_feature[name].append(special)
        chunks = self.chunks(plan, needs)
        for feature in self._features:
            if feature.name in blob.features:
                self._pack_feature(
                    feature, blob.features[feature.name], by_feature[feature.name], chunks
                )

    def _pack_feature(
        self, feature: Feature, inputs: Any, rows: list[SpecialRow], chunks: list[Chunk]
    ) -> None:
        try:
            feature.pack(inputs, rows, chunks)
        except Exception:
            # whose row or chunk is it? what is written now is thrown away
            parts: list[SpecialRow | Chunk] = [*rows, *chunks]
            for part in parts:
                try:
                    if isinstance(part, SpecialRow):
                        feature.pack(inputs, [part], [])
                    else:
                        feature.pack(inputs, [], [part])
                except Exception as error:
                    raise RowError(part.request.request_id) from error
            raise


def _needed_now(features: list[Feature], request: Request) -> list[Feature]:
    try:
        return [feature for feature in features if feature.needed_now(request)]
    except Exception as error:
        raise RowError(request.request_id) from error
