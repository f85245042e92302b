"""The features of a program together: against NumPy, and with few or many special rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.features import Facts, make_features
from jaxserve.execution.row_packer import RowPacker
from jaxserve.execution.sample_rows import FEW_SPECIAL, SampleFacts, sample_rows
from jaxserve.execution.step_shape import StepShape
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.plan import ComputeRows, SampleRows, StepPlan
from tests.jaxserve.execution.engine_facts import blob_layout, fast, full
from tests.jaxserve.requests import make_request
from tests.jaxserve.sampling.oracle import log_softmax, penalised

VOCAB, ROWS, LENGTH = 300, 12, 40
FACTS = Facts(VOCAB, 4)


def made(index: int, rng: np.random.Generator, **params) -> Request:
    settings = SamplingParams(**params)
    rule = StopRule(frozenset({2}), frozenset(), settings.min_tokens, 100)
    request = make_request(
        f"r{index}", rng.integers(0, VOCAB, 9).tolist(), settings, rule, seed=index
    )
    request.output_token_ids = rng.integers(0, VOCAB, 6).tolist()
    request.pending = 1
    return request


def mixture(rng: np.random.Generator) -> list[Request]:
    """Rows 1, 4, 5, 8 and 10 need costly features, the others do not."""
    special = {
        1: {"logit_bias": {5: 90.0, 6: -3.0}, "temperature": 0.0},
        4: {"presence_penalty": 1.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        5: {"allowed_token_ids": [7, 31, 32, 299], "logprobs": 3},
        8: {"min_tokens": 12, "temperature": 0.0, "logprobs": 0},
        10: {"repetition_penalty": 0.7, "logit_bias": {9: 2.0}, "temperature": 0.0, "logprobs": 4},
    }
    plain = {0: {"temperature": 0.0}, 3: {"top_k": 3}, 7: {"top_p": 0.5, "min_p": 0.01}}
    return [made(i, rng, **(special | plain).get(i, {})) for i in range(ROWS)]


def run(requests: list[Request], logits: np.ndarray, shape: StepShape):
    packer, layout = RowPacker(ROWS, make_features(FACTS)), blob_layout(shape, FACTS)
    slots = list(range(ROWS))
    for request, slot in zip(requests, slots):
        request.slot = slot
        packer._bind(request, slot)
    history = np.zeros((ROWS + 1, LENGTH), np.int32)
    for slot, request in enumerate(requests):
        tokens = request.prompt_token_ids + request.output_token_ids
        history[slot, : len(tokens)] = tokens
    positions = [r.num_tokens - 1 for r in requests]
    plan = StepPlan(
        rows=ComputeRows(requests, slots, positions, [1] * ROWS),
        samples=SampleRows(requests, slots, [*range(ROWS)]),
    )
    needs = packer.needs(plan)
    blob = packer.pack(plan, needs, layout).blob
    prompt_lens = jnp.asarray([r.num_prompt for r in requests])

    @jax.jit
    def sampled(blob, history, logits):
        known = SampleFacts(jnp.asarray(slots), jnp.asarray(positions), prompt_lens, history)
        tokens, outputs, _ = sample_rows(
            make_features(FACTS), layout, layout.read(blob), known, logits
        )
        return tokens, {name: tuple(jax.tree.leaves(value)) for name, value in outputs.items()}

    tokens, outputs = sampled(blob, jnp.asarray(history), jnp.asarray(logits))
    places = {
        index: index if shape.all_special else place
        for place, (index, _) in enumerate(needs.special)
    }
    return np.asarray(tokens), outputs, places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("special", "many"), [(5, False), pytest.param(FEW_SPECIAL + 3, True, marks=pytest.mark.slow)]
)
def test_special_rows_are_the_same_in_every_program(special: int, many: bool) -> None:
    rng = np.random.default_rng(0)
    requests = mixture(rng)
    if many:
        for index in (0, 2, 3, 6):
            requests[index] = made(index, rng, logit_bias={index: 3.0}, temperature=0.5)
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    tokens, outputs, places = run(requests, logits, full(ROWS, special=special))
    assert sorted(places) == sorted({1, 4, 5, 8, 10} | ({0, 2, 3, 6} if many else set()))
    assert (len(places) > FEW_SPECIAL) == many
    every, all_outputs, _ = run(requests, logits, full(ROWS))
    np.testing.assert_array_equal(tokens, every)
    for index in (5, 8, 10):
        for few, others in zip(outputs["logprobs"], all_outputs["logprobs"]):
            np.testing.assert_array_equal(few[places[index]], others[index])


@pytest.mark.slow
def test_greedy_rows_against_numpy() -> None:
    rng = np.random.default_rng(1)
    requests = mixture(rng)
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    logits[8, 2] = 50.0  # the end, which min_tokens holds back
    tokens, outputs, places = run(requests, logits, full(ROWS, special=5))
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] == 5
    assert tokens[5] in (7, 31, 32, 299)
    assert tokens[8] == np.where(np.arange(VOCAB) == 2, -np.inf, logits[8]).argmax()
    biased = logits[10].copy()
    biased[9] += 2.0
    r = requests[10]
    wanted = penalised(biased, r.prompt_token_ids, r.output_token_ids, repetition=0.7)
    assert tokens[10] == wanted.argmax()
    sampled, rank, top_ids = (np.asarray(x) for x in outputs["logprobs"][:3])
    for index in (5, 8, 10):
        place, raw = places[index], log_softmax(logits[index])
        np.testing.assert_allclose(sampled[place], raw[tokens[index]], rtol=1e-5)
        assert rank[place] == 1 + (raw > raw[tokens[index]]).sum()
        np.testing.assert_array_equal(top_ids[place], np.argsort(-logits[index])[:4])


@pytest.mark.slow
def test_plain_rows_are_those_of_a_fast_program() -> None:
    rng = np.random.default_rng(2)
    requests = [made(i, rng, **({"temperature": 0.0} if i % 3 else {})) for i in range(ROWS)]
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    expected, outputs, _ = run(requests, logits, fast(ROWS))
    assert outputs == {}
    for special in (1, 5, ROWS):
        tokens, _, _ = run(requests, logits, full(ROWS, special=special))
        np.testing.assert_array_equal(tokens, expected)
