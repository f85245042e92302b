"""Packing of plan rows into the blob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.boundary.prompt_spans import NO_ID, PromptSpan
from jaxserve.errors import RowError
from jaxserve.execution.features import (
    FAST,
    KINDS,
    Chunk,
    Feature,
    SpecialRow,
    feature_sets,
    make_features,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.execution.row_packer import RowPacker
from jaxserve.execution.step_inputs import Blob, BlobLayout
from jaxserve.execution.step_shape import StepShape
from jaxserve.memory.manager import PageUpdate
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.plan import ComputeRows, SampleRows, StepPlan
from tests.jaxserve.execution.engine_facts import (
    FACTS,
    PAGE_SIZE,
    SLOTS,
    VOCAB,
    blob_layout,
    fast,
    full,
)
from tests.jaxserve.execution.engine_facts import packer as make_packer
from tests.jaxserve.requests import make_request


def request(
    prompt: list[int], *, bad_words: list[list[int]] | None = None, seed: int = 0, **params
) -> Request:
    settings = SamplingParams(**params)
    stops = frozenset(settings.stop_token_ids)
    rule = StopRule(frozenset({2}), stops, settings.min_tokens, 16, settings.ignore_eos)
    made = make_request("r", prompt, settings, rule, seed, bad_words=bad_words)
    made.start_prefill()
    return made


def plan_of(
    *chunks: tuple[Request, int, int, int],
    decodes: Sequence[tuple[Request, int]] = (),
    samplers: dict[int, list[tuple[Request, int]]] | None = None,
    lengths: list[int] | None = None,
) -> StepPlan:
    """Rows that decode (request, slot), then chunks (request, slot, start, length).

    A chunk that reaches the last known token samples; `samplers` do from a chunk's row, too.
    """
    plan = StepPlan()
    for request, slot in decodes:
        request.slot = slot
        add_row(plan.rows, request, slot, request.num_tokens - 1, 1)
        add_sample(plan.samples, request, slot, len(plan.rows) - 1)
    if lengths:
        plan.rows.lengths[:] = lengths
    for index, (request, slot, start, length) in enumerate(chunks):
        request.slot, request.num_computed = slot, start + length
        row = len(plan.rows)
        add_row(plan.rows, request, slot, start, length)
        plan.tokens[row] = request.prefill_tokens[start : start + length]
        request.pending = int(start + length == request.prefill_target)
        if request.pending:
            add_sample(plan.samples, request, slot, row)
        for other, of_other in (samplers or {}).get(index, ()):
            other.slot = of_other
            add_sample(plan.samples, other, of_other, row)
    return plan


def add_row(rows: ComputeRows, request: Request, slot: int, start: int, length: int) -> None:
    rows.requests.append(request)
    rows.slots.append(slot)
    rows.starts.append(start)
    rows.lengths.append(length)


def add_sample(samples: SampleRows, request: Request, slot: int, row: int) -> None:
    samples.requests.append(request)
    samples.slots.append(slot)
    samples.rows.append(row)


def pack(plan: StepPlan, shape: StepShape, packer: RowPacker | None = None) -> Blob:
    packer, layout = packer or make_packer(), blob_layout(shape)
    return layout.views(packer.pack(plan, packer.needs(plan), layout).blob)


def forbidden(blob: Blob, row: int) -> list[int]:
    bits = np.unpackbits(blob.features["mask"].forbidden[row].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def allowed(blob: Blob, row: int) -> list[int]:
    return sorted(set(range(VOCAB)) - set(forbidden(blob, row)))


def test_decode_rows_lanes_and_padding() -> None:
    one, two, old = request([3, 4, 5, 6, 7]), request([8, 9]), request([1, 1])
    plan = plan_of((one, 0, 1, 3), (two, 2, 0, 2), decodes=[(old, 3)])
    plan.page_updates = [PageUpdate(0, 1, 9), PageUpdate(2, 0, 11)]
    step = pack(plan, fast(2, 16, 3)).step
    assert step.slot.tolist() == [3, SLOTS]
    assert step.start.tolist() == step.first.tolist() == [0, 0], "the device knows both"
    assert step.length.size == 0, "each row has one token"
    assert step.lane_slot.tolist() == [0, 2, SLOTS]
    assert step.prompt_len.tolist() == [0, 0, 5, 2, 0], "of rows that were never seen, 0"
    assert step.token.tolist()[:6] == [4, 5, 6, 8, 9, 0]
    assert step.token_position.tolist()[:6] == [1, 2, 3, 0, 1, 0]
    assert step.token_lane.tolist() == [0, 0, 0, 1, 1] + [3] * 11
    assert step.lane_start.tolist() == [0, 3, 0]
    assert step.lane_length.tolist() == [3, 2, 0]
    assert step.lane_context.tolist() == [1, 0, 0]
    assert step.sample_slot.tolist() == [2, SLOTS, SLOTS], "one has not reached its last token"
    assert step.sample_source.tolist()[:1] == [4]
    updates = step.updates.T.tolist()
    assert updates[:2] == [[0, 1, 9], [2, 0, 11]]
    assert all(entry == [SLOTS, 0, 0] for entry in updates[2:]), "padding goes to the trash row"


def test_several_sample_from_one_row() -> None:
    front, sibling = request([3, 4, 5]), request([3, 4, 5])
    plan = plan_of((front, 0, 0, 3), samplers={0: [(sibling, 2)]})
    packer, layout = make_packer(), blob_layout(fast(2, 16, 3))
    packed = packer.pack(plan, packer.needs(plan), layout)
    step = layout.views(packed.blob).step
    assert step.sample_slot.tolist() == [0, 2, SLOTS]
    assert step.sample_source.tolist() == [2, 2, 0]
    assert list(packed.rows) == [2, 3], "behind two decode rows"


def test_one_token_of_the_host_lies_behind_the_rows_that_decode() -> None:
    old, forced, scored = request([1, 1]), request([5, 6, 7]), request([8, 9], prompt_logprobs=0)
    plan = plan_of((forced, 2, 2, 1), (scored, 1, 0, 1), decodes=[(old, 3)])
    packer, layout = make_packer(), blob_layout(full(3, 16, 1))
    needs = packer.needs(plan)
    assert (needs.single, needs.lanes) == ([1], [2]), "prompt scores work on the region"
    packed = packer.pack(plan, needs, layout)
    step = layout.views(packed.blob).step
    assert step.slot.tolist() == [3, 2, SLOTS]
    assert step.start.tolist() == [0, 1 + 2, 0] and step.first.tolist() == [0, 1 + 7, 0]
    assert list(packed.rows) == [0, 1]


def test_rows_with_drafts_say_how_many() -> None:
    one, two, forced = request([1, 1]), request([1, 2]), request([5, 6, 7])
    plan = plan_of((forced, 2, 2, 1), decodes=[(one, 3), (two, 0)], lengths=[3, 1])
    packer = make_packer()
    layout = blob_layout(replace(fast(4), num_queries=3))
    packed = packer.pack(plan, packer.needs(plan), layout)
    assert layout.views(packed.blob).step.length.tolist() == [3, 1, 1, 0]
    assert list(packed.rows) == [0, 3, 6], "each row has three samples"


def test_sampling_parameters_travel_by_slot() -> None:
    made = request([1, 2], seed=(7 << 32) + 0xFFFFFFFF, temperature=0.5, top_p=0.9, top_k=5)
    plan = plan_of((made, 1, 0, 2))
    blob, layout = pack(plan, full(2, 16, 1)), blob_layout(full(2, 16, 1))
    row = layout.row_table.read(jnp.asarray(blob.rows))["sampling"]
    assert float(row.temperature[2]) == 0.5
    assert float(row.top_p[2]) == np.float32(0.9)
    assert int(row.top_k[2]) == 5
    assert [int(row.seed_high[2]), int(row.seed_low[2])] == [7, 2**32 - 1]
    assert float(row.temperature[0]) == 0.0, "rows that nobody uses are greedy"
    assert blob.step.prompt_len.tolist() == [0, 0, 2]


def test_a_top_k_beyond_int32_keeps_the_vocabulary() -> None:
    plan = plan_of((request([1, 2], top_k=2**40), 1, 0, 2))
    blob, layout = pack(plan, fast(2, 16, 1)), blob_layout(fast(2, 16, 1))
    assert int(layout.row_table.read(jnp.asarray(blob.rows))["sampling"].top_k[2]) == VOCAB


def test_masks_and_biases() -> None:
    made = request(
        [1, 2],
        bad_words=[[7], [5, 6]],
        logit_bias={3: 4.0},
        allowed_token_ids=[3, 5, 6, 7],
        stop_token_ids=[5],
        min_tokens=2,
    )
    packer = make_packer()
    blob = pack(plan_of((made, 1, 0, 2)), full(2, 16, 1), packer)
    assert allowed(blob, 2) == [3, 6]
    bias = blob.features["bias"]
    assert (bias.row[0], bias.token[0], bias.value[0]) == (2, 3, 4.0)
    assert np.all(bias.row[1:] >= 3), "rows that do not exist"
    made.output_token_ids, made.pending = [6, 5], 1
    blob = pack(plan_of(decodes=[(made, 1)]), full(2, 16, 1), packer)
    assert allowed(blob, 0) == [3, 5], "5 may end it, 6 would follow 5"


def test_words_beyond_the_vocabulary_are_left_out() -> None:
    made = request([1, 2], bad_words=[[VOCAB + 3], [5, VOCAB], [6]])
    blob = pack(plan_of((made, 1, 0, 2)), full(2, 16, 1))
    assert forbidden(blob, 2) == [6]


def test_a_step_says_which_features_it_needs() -> None:
    for params, wanted in (({"logit_bias": {3: 1.0}}, {"bias"}), ({"logprobs": 1}, {"logprobs"})):
        blob = pack(plan_of((request([1, 2], **params), 1, 0, 2)), full(2, 16, 1))
        names = {kind.name for kind, flag in zip(KINDS, blob.step.wanted) if flag}
        assert names == wanted | FAST


def test_special_rows_are_numbered_where_a_program_has_few() -> None:
    plain, made, packer = request([1, 2]), request([3, 4], logit_bias={3: 4.0}), make_packer()
    plan = plan_of((plain, 0, 0, 2), (made, 1, 0, 2))
    blob = pack(plan, full(2, 16, 3, special=2), packer)
    assert blob.step.special.tolist() == [3, 5]
    assert blob.features["bias"].row[0] == 0, "its place, not its row"


def test_min_tokens_holds_an_ignored_end_back_too() -> None:
    packer = make_packer()
    made = request([1, 4], stop_token_ids=[5], min_tokens=2, ignore_eos=True)
    blob = pack(plan_of((made, 1, 0, 2)), full(2, 16, 1), packer)
    assert forbidden(blob, 2) == [2, 5]
    made.output_token_ids, made.pending = [6, 7], 1
    blob = pack(plan_of(decodes=[(made, 1)]), full(2, 16, 1), packer)
    assert forbidden(blob, 0) == []


def test_a_slot_forgets_the_request_before() -> None:
    packer = make_packer()
    first = request([1, 4], allowed_token_ids=[3], logprobs=1)
    assert packer.needs(plan_of((first, 1, 0, 2))).special
    assert packer._always
    first.slot = None
    packer.needs(StepPlan())
    assert not packer._always, "every step would look through its rows for it"
    assert not packer.needs(plan_of((request([1, 4]), 1, 0, 2))).special


def test_a_request_that_comes_back_to_its_slot_needs_what_it_needed() -> None:
    packer = make_packer()
    made = request([1, 4], logprobs=1, min_tokens=9)
    always = packer.needs(plan_of((made, 1, 0, 2))).special
    made.slot = None  # preempted, and a step runs without it
    packer.needs(StepPlan())
    assert packer.needs(plan_of((made, 1, 0, 2))).special == always


def needed_by(made: Request) -> set[str]:
    plan = plan_of((made, 0, 0, made.prefill_target))
    return set(make_packer().needs(plan).features - FAST)


def test_a_request_needs_the_features_that_it_asks_for() -> None:
    assert needed_by(request([1], temperature=0.0)) == set()
    assert needed_by(request([1], top_p=0.9)) == set()
    assert needed_by(request([1], temperature=0.0, logprobs=0)) == {"logprobs"}
    assert needed_by(request([1], presence_penalty=0.1)) == {"penalties"}
    assert needed_by(request([1], logit_bias={1: 1.0})) == {"bias"}
    assert needed_by(request([1], allowed_token_ids=[1])) == {"mask"}
    assert needed_by(request([1], bad_words=[[1]])) == {"mask"}
    assert needed_by(request([1], min_tokens=1)) == {"mask"}
    assert needed_by(request([1, 2], prompt_logprobs=1)) == {"prompt_scores"}
    assert needed_by(request([1], prompt_logprobs=1)) == set(), "nothing to score"


def test_min_tokens_needs_masks_only_until_it_is_reached() -> None:
    made, packer = request([1], temperature=0.0, min_tokens=2), make_packer()
    packer.needs(plan_of((made, 0, 0, 1)))
    seen = []
    for step in range(1, 4):
        made.output_token_ids, made.pending = [5] * step, 1
        needs = packer.needs(plan_of(decodes=[(made, 0)]))
        seen.append(len(needs.special))
    assert seen == [1, 0, 0]


def test_embeddings_of_a_step_lie_one_behind_the_other() -> None:
    facts = FACTS._replace(hidden_size=2, max_prefill_tokens=16)
    features = make_features(facts, lambda setting: setting == "enable_prompt_embeds")
    (feature,) = (one for one in features if one.name == "prompt_embeds")
    shape = replace(full(2, 16, 3), features=feature_sets(features).full)
    layout = BlobLayout(shape, features, facts, PAGE_SIZE)
    packer = RowPacker(SLOTS, features)
    rows = np.arange(20, dtype="<f4").reshape(10, 2)

    def span(start: int, given: np.ndarray, part: str = "prompt_embeds") -> PromptSpan:
        return PromptSpan(part, start, len(given), given.shape, given.tobytes())

    spans = [span(0, rows[:1], "of another feature"), span(1, rows[:3]), span(4, rows[3:9])]
    mixed = request([7] + [NO_ID] * 9 + [8, 9])
    whole = request([NO_ID])
    mixed.asked = replace(mixed.asked, spans=spans)
    whole.asked = replace(whole.asked, spans=[span(0, rows[9:])])

    def packed(plan: StepPlan) -> tuple[list[int], list[list[float]]]:
        needs = packer.needs(plan)
        blob = layout.views(packer.pack(plan, needs, layout).blob)
        sent = feature.step_buffers(packer.chunks(plan, needs))
        return blob.features["prompt_embeds"].row.tolist(), sent[:, 0].tolist()

    row, sent = packed(plan_of((whole, 0, 0, 1), (request([3, 4]), 1, 0, 2), (mixed, 2, 2, 4)))
    assert row == [1, 0, 0, 2, 3, 4, 5] + [0] * 9, "one token alone lies in the region as well"
    assert sent == [18.0, 2.0, 4.0, 6.0, 8.0], "rows that the step does not compute are not sent"
    assert packed(plan_of((mixed, 2, 9, 3)))[0][:4] == [1, 0, 0, 0]
    for start, length in ((10, 2), (0, 1)):
        other = packer.needs(plan_of((mixed, 2, start, length)))
        assert "prompt_embeds" not in other.features, "its other chunks run on programs without"
    assert [(one.start, one.length) for one in feature.key_spans(mixed)] == [(1, 3), (4, 6)]


@arrays
class OfTokens:
    """A number of each region token."""

    number: Any = array("C")


class Numbering(Feature):
    name = "numbering"
    special = False
    inputs = OfTokens

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return chunk.request.seed > 0

    def pack(self, inputs: OfTokens, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        inputs.number[: len(chunks)] = [chunk.length for chunk in chunks]


def test_a_feature_of_every_program_says_something_of_tokens_in_each_of_them() -> None:
    features = (*make_features(FACTS), Numbering(FACTS))
    shape = replace(fast(2, 16, 3), features=feature_sets(features).fast)
    layout, packer = BlobLayout(shape, features, FACTS, PAGE_SIZE), RowPacker(SLOTS, features)
    plan = plan_of((request([5, 6], seed=1), 0, 0, 2), (request([7], seed=1), 1, 0, 1))
    needs = packer.needs(plan)
    assert needs.lanes == [0, 1] and needs.features == shape.features
    blob = layout.views(packer.pack(plan, needs, layout).blob)
    assert blob.features["numbering"].number.tolist()[:3] == [2, 1, 0]
    decode = replace(fast(4), features=shape.features)
    layout = BlobLayout(decode, features, FACTS, PAGE_SIZE)
    plan = plan_of((request([8]), 2, 0, 1))
    assert layout.views(packer.pack(plan, packer.needs(plan), layout).blob).step.slot[0] == 2


class Odd(Numbering):
    def pack(self, inputs: OfTokens, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        for chunk in reversed(chunks):
            if chunk.request.seed % 2:
                raise ValueError(f"seed {chunk.request.seed}")


def test_a_chunk_that_a_feature_cannot_pack_is_its_requests_error() -> None:
    features = (*make_features(FACTS), Odd(FACTS))
    shape = replace(fast(2, 16, 3), features=feature_sets(features).fast)
    layout, packer = BlobLayout(shape, features, FACTS, PAGE_SIZE), RowPacker(SLOTS, features)
    asked = [request([5, 6], seed=seed) for seed in (2, 3, 5)]
    for number, one in enumerate(asked):
        one.request_id = f"{number}"
    plan = plan_of(*((one, slot, 0, 2) for slot, one in enumerate(asked)))
    with pytest.raises(RowError) as failed:
        packer.pack(plan, packer.needs(plan), layout)
    assert failed.value.request_id == "1"
    assert str(failed.value.__cause__) == "seed 3", "not what another request has asked for"


def test_what_features_say_of_a_chunk_is_its_own_behind_one_that_is_left_out() -> None:
    gone, scored = request([3, 4, 5]), request([6, 7, 8], prompt_logprobs=0)
    gone.request_id = "gone"
    packer = make_packer()
    packer.leave_out("gone")
    blob = pack(plan_of((gone, 0, 0, 3), (scored, 1, 0, 3)), full(2, 16, 2), packer)
    assert blob.features["prompt_scores"].target.tolist() == [0, 0, 0, 7, 8] + [0] * 11


def test_every_blob_is_fresh_memory() -> None:
    packer, layout, plan = make_packer(), blob_layout(fast(2)), StepPlan()
    needs = packer.needs(plan)
    first, second = packer.pack(plan, needs, layout), packer.pack(plan, needs, layout)
    assert not np.shares_memory(first.blob, second.blob)


def test_a_step_like_the_one_before_is_packed_like_any_other() -> None:
    one, two = request([5] * 9, seed=3), request([6] * 4, temperature=0.7)
    packer, layout = make_packer(), blob_layout(fast(4))
    start = plan_of((one, 1, 0, 9), (two, 3, 0, 4))
    packer.needs(start)
    updates = [[PageUpdate(1, 2, 7), PageUpdate(3, 1, 8)], [], [PageUpdate(1, 3, 9)]]
    for changed in updates:
        plan = plan_of(decodes=[(one, 1), (two, 3)])
        plan.page_updates = changed
        other = make_packer()
        other.needs(start)
        packed, fresh = (p.pack(plan, p.needs(plan), layout) for p in (packer, other))
        np.testing.assert_array_equal(packed.blob, fresh.blob)
        assert list(packed.rows) == list(fresh.rows)
    third = request([1] * 5, temperature=0.2)
    packer.needs(plan_of((third, 3, 0, 5)))
    plan = plan_of(decodes=[(one, 1), (third, 3)])
    blob = layout.views(packer.pack(plan, packer.needs(plan), layout).blob)
    assert blob.step.prompt_len[1] == 5
