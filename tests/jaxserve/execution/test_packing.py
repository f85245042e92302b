"""What each plan row becomes in the blob."""

from __future__ import annotations

import numpy as np

from jaxserve.execution import batch as columns
from jaxserve.execution.batch import BlobLayout, StepShape
from jaxserve.execution.packing import RowPacker
from jaxserve.memory.manager import PageUpdate
from jaxserve.request import Request, StopRule
from jaxserve.sampling.variant import Variant
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import DecodeRows, PrefillLane, StepPlan

VOCAB, SLOTS = 20, 4


def request(
    prompt: list[int], *, bad_words: list[list[int]] | None = None, seed: int = 0, **params
) -> Request:
    settings = SamplingParams(**params)
    stops = frozenset(settings.stop_token_ids)
    rule = StopRule(frozenset({2}), stops, settings.min_tokens, 16, settings.ignore_eos)
    made = Request("r", prompt, settings, rule, seed, bad_words=bad_words)
    made.start_prefill()
    return made


def lane(made: Request, slot: int, start: int, length: int) -> PrefillLane:
    samples = start + length == made.prefill_target
    made.num_computed = start + length
    made.pending = int(samples)
    return PrefillLane(made, slot, start, length, samples)


def pack(
    plan: StepPlan, shape: StepShape, packer: RowPacker | None = None
) -> dict[str, np.ndarray]:
    packer = packer or RowPacker(SLOTS, VOCAB)
    packer.plan_variant(plan)
    layout = BlobLayout(shape, page_size=16, vocab_size=VOCAB)
    return layout.views(packer.pack(plan, layout))


def test_decode_rows_lanes_and_padding() -> None:
    one, two, old = request([3, 4, 5, 6, 7]), request([8, 9]), request([1, 1])
    plan = StepPlan(
        decode=DecodeRows([old], [3], [7]),
        lanes=[lane(one, 0, 1, 3), lane(two, 2, 0, 2)],
        page_updates=[PageUpdate(0, 1, 9), PageUpdate(2, 0, 11)],
    )
    views = pack(plan, StepShape(2, 16, 3, Variant.GREEDY))
    assert views["slot"].tolist() == [3, SLOTS, 0, 2, SLOTS]
    assert views["position"].tolist() == [7, 0, 3, 1, 0]
    assert views["token"].tolist()[:6] == [4, 5, 6, 8, 9, 0]
    assert views["token_position"].tolist()[:6] == [1, 2, 3, 0, 1, 0]
    assert views["token_lane"].tolist() == [0, 0, 0, 1, 1] + [3] * 11
    assert views["lane_start"].tolist() == [0, 3, 0]
    assert views["lane_length"].tolist() == [3, 2, 0]
    assert views["lane_context"].tolist() == [1, 0, 0]
    updates = views["updates"].T.tolist()
    assert updates[:2] == [[0, 1, 9], [2, 0, 11]]
    assert all(entry == [SLOTS, 0, 0] for entry in updates[2:]), "padding goes to the trash row"


def test_sampling_parameters_travel_by_slot() -> None:
    made = request([1, 2], seed=(7 << 32) + 0xFFFFFFFF, temperature=0.5, top_p=0.9, top_k=5)
    plan = StepPlan(lanes=[lane(made, 1, 0, 2)])
    views = pack(plan, StepShape(2, 16, 1, Variant.RICH))
    row = views["params"][2]
    floats = row.view(np.float32)
    assert floats[columns.TEMPERATURE] == 0.5
    assert floats[columns.TOP_P] == np.float32(0.9)
    assert row[columns.TOP_K] == 5
    assert row[[columns.SEED_HIGH, columns.SEED_LOW]].view(np.uint32).tolist() == [7, 2**32 - 1]
    assert views["prompt_len"].tolist() == [0, 0, 2]


def test_a_top_k_beyond_int32_keeps_the_vocabulary() -> None:
    plan = StepPlan(lanes=[lane(request([1, 2], top_k=2**40), 1, 0, 2)])
    views = pack(plan, StepShape(2, 16, 1, Variant.FILTERED))
    assert views["params"][2, columns.TOP_K] == VOCAB


def test_masks() -> None:
    made = request(
        [1, 2],
        bad_words=[[7], [5, 6]],
        logit_bias={3: 4.0},
        allowed_token_ids=[3, 5, 6, 7],
        stop_token_ids=[5],
        min_tokens=2,
    )
    packer = RowPacker(SLOTS, VOCAB)
    shape = StepShape(2, 16, 1, Variant.MASKED)
    bias = pack(StepPlan(lanes=[lane(made, 1, 0, 2)]), shape, packer)["bias"][2]
    assert np.flatnonzero(np.isfinite(bias)).tolist() == [3, 6]
    assert bias[3] == 4.0
    made.output_token_ids, made.pending = [6, 5], 1
    bias = pack(StepPlan(decode=DecodeRows([made], [1], [4])), shape, packer)["bias"][0]
    assert np.flatnonzero(np.isfinite(bias)).tolist() == [3, 5], "5 may end it, 6 would follow 5"


def test_min_tokens_holds_an_ignored_end_back_too() -> None:
    shape, packer = StepShape(2, 16, 1, Variant.MASKED), RowPacker(SLOTS, VOCAB)
    made = request([1, 4], stop_token_ids=[5], min_tokens=2, ignore_eos=True)
    bias = pack(StepPlan(lanes=[lane(made, 1, 0, 2)]), shape, packer)["bias"][2]
    assert np.flatnonzero(np.isneginf(bias)).tolist() == [2, 5]
    made.output_token_ids, made.pending = [6, 7], 1
    bias = pack(StepPlan(decode=DecodeRows([made], [1], [4])), shape, packer)["bias"][0]
    assert not bias.any()


def variant_of(made: Request) -> Variant:
    return RowPacker(SLOTS, VOCAB).plan_variant(
        StepPlan(lanes=[lane(made, 0, 0, made.prefill_target)])
    )


def test_the_variant_is_the_smallest_that_serves_all_rows() -> None:
    assert variant_of(request([1], temperature=0.0)) is Variant.GREEDY
    assert variant_of(request([1], temperature=1.0)) is Variant.PLAIN
    assert variant_of(request([1], top_p=0.9)) is Variant.FILTERED
    assert variant_of(request([1], temperature=0.0, logprobs=0)) is Variant.RICH
    assert variant_of(request([1], presence_penalty=0.1)) is Variant.RICH
    assert variant_of(request([1], logit_bias={1: 1.0})) is Variant.MASKED
    assert variant_of(request([1], min_tokens=1)) is Variant.MASKED
    assert variant_of(request([1, 2], prompt_logprobs=1)) is Variant.SCORED
    assert variant_of(request([1], prompt_logprobs=1)) is Variant.PLAIN, "nothing to score"


def test_min_tokens_needs_masks_only_until_it_is_reached() -> None:
    made, packer = request([1], temperature=0.0, min_tokens=2), RowPacker(SLOTS, VOCAB)
    packer.plan_variant(StepPlan(lanes=[lane(made, 0, 0, 1)]))
    seen = []
    for step in range(1, 4):
        made.output_token_ids, made.pending = [5] * step, 1
        seen.append(packer.plan_variant(StepPlan(decode=DecodeRows([made], [0], [step]))))
    assert seen == [Variant.MASKED, Variant.GREEDY, Variant.GREEDY]


def test_every_blob_is_fresh_memory() -> None:
    packer, layout = RowPacker(SLOTS, VOCAB), BlobLayout(StepShape(2, 0, 0, Variant.GREEDY), 16, 20)
    first, second = packer.pack(StepPlan(), layout), packer.pack(StepPlan(), layout)
    assert not np.shares_memory(first, second)
