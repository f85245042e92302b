"""A step plan becomes a blob: the only code that writes what `BlobLayout` describes."""

from __future__ import annotations

import numpy as np

from jaxserve.execution import batch as columns
from jaxserve.execution.batch import BlobLayout
from jaxserve.request import Request
from jaxserve.sampling.variant import Variant
from jaxserve.sampling_params import SamplingParams, seed_words
from jaxserve.scheduling.plan import StepPlan

NEVER = np.float32(-np.inf)


def base_variant(params: SamplingParams) -> Variant:
    """The smallest variant that serves every step of a request with these parameters.

    `min_tokens` and prompt logprobs need a larger one in some steps only, see `row_variant`.
    """
    if params.logit_bias or params.allowed_token_ids is not None or params.bad_words:
        return Variant.MASKED
    if params.has_penalties or params.needs_logprobs:
        return Variant.RICH
    if params.is_greedy:
        return Variant.GREEDY
    return Variant.FILTERED if params.needs_filters else Variant.PLAIN


class RowPacker:
    """Writes blobs; remembers each slot's sampling parameters and masks while a request owns it.

    Args:
        max_num_seqs: slots; row `max_num_seqs` is the trash row.
        vocab_size: V of the logits.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int):
        self._trash = max_num_seqs
        self._vocab_size = vocab_size
        self._owner: list[Request | None] = [None] * max_num_seqs
        self._variant = [Variant.GREEDY] * max_num_seqs
        self._has_min_tokens: set[int] = set()
        self._mask: list[np.ndarray | None] = [None] * max_num_seqs
        self._prompt_len = np.zeros(max_num_seqs + 1, np.int32)
        self._params = np.zeros((max_num_seqs + 1, columns.NUM_ROW_PARAMS), np.int32)
        self._float_params = self._params.view(np.float32)
        self._write_params(self._trash, SamplingParams(temperature=0.0), seed=0)

    def _bind(self, request: Request, slot: int) -> None:
        """Remember the parameters of the request that got `slot`."""
        if self._owner[slot] is request:
            return
        self._owner[slot] = request
        self._variant[slot] = base_variant(request.params)
        if request.stop_rule.min_tokens:
            self._has_min_tokens.add(slot)
        else:
            self._has_min_tokens.discard(slot)
        self._mask[slot] = self._static_mask(request)
        self._write_params(slot, request.params, request.seed)
        self._prompt_len[slot] = request.num_prompt

    def plan_variant(self, plan: StepPlan) -> Variant:
        """The smallest variant that serves every row of the plan; learns of new slot owners."""
        requests, slots = [*plan.decode.requests], [*plan.decode.slots]
        scored = False
        for lane in plan.lanes:
            self._bind(lane.request, lane.slot)
            if lane.samples:
                requests.append(lane.request)
                slots.append(lane.slot)
            scored = scored or scores_prompt(lane.request, lane.start)
        if scored:
            return Variant.SCORED
        if not self._has_min_tokens.isdisjoint(slots) and any(map(_must_go_on, requests)):
            return Variant.MASKED
        return max(map(self._variant.__getitem__, slots), default=Variant.GREEDY)

    def pack(self, plan: StepPlan, layout: BlobLayout) -> np.ndarray:
        """A fresh blob for `plan`; fresh because a compiled call may read NumPy memory in place."""
        shape = layout.shape
        blob = np.zeros(layout.size, np.int32)
        views = layout.views(blob)
        slot = views["slot"]
        slot[:] = self._trash
        if plan.decode:
            count = len(plan.decode)
            slot[:count] = plan.decode.slots
            views["position"][:count] = plan.decode.positions
        updates = views["updates"]
        updates[0] = self._trash
        if plan.page_updates:
            updates[:, : len(plan.page_updates)] = np.array(plan.page_updates, np.int32).T
        if shape.num_prefill:
            self._pack_lanes(plan, layout, views)
        views["prompt_len"][:] = self._prompt_len[slot]
        if shape.variant >= Variant.PLAIN:
            views["params"][:] = self._params[slot]
        if shape.variant >= Variant.MASKED:
            self._pack_bias(plan, layout, views["bias"])
        return blob

    def _pack_lanes(self, plan: StepPlan, layout: BlobLayout, views: dict[str, np.ndarray]) -> None:
        first_row = layout.shape.num_decode
        views["token_lane"][:] = layout.shape.num_lanes
        begin = 0
        for index, lane in enumerate(plan.lanes):
            end = begin + lane.length
            last = lane.start + lane.length
            tokens = lane.request.prefill_tokens
            views["slot"][first_row + index] = lane.slot
            views["position"][first_row + index] = last - 1
            views["token"][begin:end] = tokens[lane.start : last]
            views["token_lane"][begin:end] = index
            views["token_position"][begin:end] = np.arange(lane.start, last)
            views["lane_start"][index] = begin
            views["lane_length"][index] = lane.length
            views["lane_context"][index] = lane.start
            if layout.shape.variant >= Variant.SCORED:
                following = tokens[lane.start + 1 : last + 1]
                views["target"][begin : begin + len(following)] = following
            begin = end

    def _pack_bias(self, plan: StepPlan, layout: BlobLayout, bias: np.ndarray) -> None:
        first_lane = layout.shape.num_decode
        rows = [*zip(range(first_lane), plan.decode.requests, plan.decode.slots)]
        rows += [
            (first_lane + index, lane.request, lane.slot)
            for index, lane in enumerate(plan.lanes)
            if lane.samples
        ]
        for index, request, slot in rows:
            mask = self._mask[slot]
            if mask is not None:
                bias[index] = mask
            if _must_go_on(request):
                rule = request.stop_rule
                ends = rule.eos_token_ids | rule.stop_token_ids
                bias[index, [t for t in ends if t < self._vocab_size]] = NEVER
            for word in request.bad_words:
                if len(word) > 1 and request.output_token_ids[1 - len(word) :] == word[:-1]:
                    bias[index, word[-1]] = NEVER

    def _static_mask(self, request: Request) -> np.ndarray | None:
        """The part of the bias that does not change from step to step."""
        params = request.params
        if base_variant(params) < Variant.MASKED:
            return None
        mask = np.zeros(self._vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            mask[:] = NEVER
            mask[params.allowed_token_ids] = 0.0
        for token, value in (params.logit_bias or {}).items():
            mask[int(token)] += value
        for word in request.bad_words:
            if len(word) == 1:
                mask[word[0]] = NEVER
        return mask

    def _write_params(self, slot: int, params: SamplingParams, seed: int) -> None:
        floats, ints = self._float_params[slot], self._params[slot]
        floats[columns.TEMPERATURE] = 0.0 if params.is_greedy else params.temperature
        floats[columns.TOP_P] = params.top_p
        floats[columns.MIN_P] = params.min_p
        floats[columns.PRESENCE] = params.presence_penalty
        floats[columns.FREQUENCY] = params.frequency_penalty
        floats[columns.REPETITION] = params.repetition_penalty
        # more than the vocabulary keeps all of it, and may be more than an int32 holds
        ints[columns.TOP_K] = min(params.top_k, self._vocab_size)
        words = np.array(seed_words(seed), np.uint32)
        ints[columns.SEED_HIGH : columns.SEED_LOW + 1] = words.view(np.int32)


def scores_prompt(request: Request, start: int) -> bool:
    """Whether a chunk that begins at `start` yields prompt logprobs that are still wanted.

    They are reported with the first token, so a request that recomputes more than its prompt after
    a preemption wants none.
    """
    wanted = request.params.prompt_logprobs is not None and not request.output_token_ids
    return wanted and start < request.num_prompt - 1


def _must_go_on(request: Request) -> bool:
    """True while `min_tokens` holds back end-of-sequence and stop tokens."""
    rule = request.stop_rule
    return len(request.output_token_ids) + request.pending - 1 < rule.min_tokens
