"""Logits processors of requests and of engines, beside requests without any."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, logits_processor
from jaxserve.errors import ValidationError
from jaxserve.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

pytestmark = pytest.mark.slow

CASE, LAYERS = "llama_gqa", 2
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7], list(range(3, 43))]


@logits_processor(args={"first": 20}, state=np.int32(0))
def counting(logits, rows, state):
    """Token `first`, then the following ones: by the state alone."""
    wanted = rows.args["first"] + state
    return jnp.where(jnp.arange(logits.shape[1]) == wanted[:, None], 0.0, -jnp.inf), state + 1


@logits_processor(args={"ids": np.full(2, -1), "by": 100.0})
def boost(logits, rows, state):
    hot = (rows.args["ids"][:, :, None] == jnp.arange(logits.shape[1])).any(1)
    return logits + rows.args["by"][:, None] * hot, state


def flat(logits, rows, state):
    return jnp.zeros_like(logits), state


@logits_processor
def follow(logits, rows, state):
    """The token behind the last one: by the history."""
    wanted = rows.token + 1
    return jnp.where(jnp.arange(logits.shape[1]) == wanted[:, None], 0.0, -jnp.inf), state


@pytest.fixture(scope="module")
def llm(model_folder, make_llm) -> LLM:
    folder = model_folder(CASE, num_hidden_layers=LAYERS)
    # what is cached changes which chunks are computed, and with them the last bits
    return make_llm(folder, max_num_seqs=4, enable_prefix_caching=False)


def greedy(*processors: Any, **given: Any) -> SamplingParams:
    asked = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1} | given
    return SamplingParams(logits_processors=processors or None, **asked)


def run(llm: LLM, *params: SamplingParams) -> list[Any]:
    prompts = PROMPTS[: len(params)]
    return [o.outputs[0] for o in llm.generate(prompts, list(params), use_tqdm=False)]


def test_each_row_has_its_own_and_the_others_are_as_they_were(llm) -> None:
    plain = run(llm, *[greedy()] * 4)
    programs = {id(p.call) for p in llm.client.engine.runner.programs.programs}
    mixed = run(llm, greedy(), greedy(counting), greedy(counting.with_args(first=50)), greedy())
    assert mixed[1].token_ids == [20, 21, 22, 23, 24, 25]
    assert mixed[2].token_ids == [50, 51, 52, 53, 54, 55]
    for one, before in ((mixed[0], plain[0]), (mixed[3], plain[3])):
        assert one.token_ids == before.token_ids
    again = run(llm, *[greedy()] * 4)
    assert [(o.token_ids, o.logprobs) for o in again] == [(o.token_ids, o.logprobs) for o in plain]
    kept = {id(p.call) for p in llm.client.engine.runner.programs.programs}
    assert programs <= kept, "the programs without processors are the same"
    (beside,) = (o for o in run(llm, greedy(), greedy(boost.with_args(ids=[7, 9])))[:1])
    idle = run(llm, greedy(), greedy(boost.with_args(by=0.0)))[0]
    assert beside.logprobs == idle.logprobs, "bit by bit, whatever is done to the other row"


def test_processors_work_in_the_order_of_the_list(llm) -> None:
    boosted = boost.with_args(ids=[90])
    first, second, third = run(
        llm, greedy(flat, boosted), greedy(boosted, flat), greedy(flat, boosted, flat)
    )
    assert [one.token_ids[0] for one in (first, second, third)] == [90, 0, 0]
    _, followed = run(llm, greedy(), greedy(follow))
    assert followed.token_ids == [12, 13, 14, 15, 16, 17]
    sampled = run(llm, *[greedy(counting, temperature=1.0, n=2)])
    assert sampled[0].token_ids == [20, 21, 22, 23, 24, 25]


def test_a_state_outlives_a_preemption(model_folder, make_llm) -> None:
    small = make_llm(
        model_folder(CASE, num_hidden_layers=LAYERS), max_num_seqs=3, num_pages=14, max_model_len=64
    )
    prompts = [[n] * 10 for n in (3, 4, 5)]
    params = greedy(counting, max_tokens=30, logprobs=None)
    outputs = small.generate(prompts, params, use_tqdm=False)
    assert small.stats().num_preemptions > 0
    for output in outputs:
        assert output.outputs[0].token_ids == list(range(20, 50))


def test_callables_on_rows(llm) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def ascending(output_token_ids, logits):
        logits[:] = -np.inf
        logits[30 + len(output_token_ids)] = 0.0
        return logits

    def telling(prompt_token_ids, output_token_ids, logits):
        seen.append((list(prompt_token_ids), list(output_token_ids)))
        return logits

    plain = run(llm, greedy(), greedy())
    mixed = run(llm, greedy(), greedy(telling, ascending))
    assert mixed[0].token_ids == plain[0].token_ids
    assert mixed[1].token_ids == [30, 31, 32, 33, 34, 35]
    assert seen[0] == ([0], []), "a row of zeros first, before anything runs"
    assert seen[1:] == [(PROMPTS[1], list(range(30, 30 + n))) for n in range(6)]
    behind = run(llm, greedy(), greedy(ascending, counting, ascending))
    assert behind[1].token_ids == [30, 31, 32, 33, 34, 35]


@pytest.mark.parametrize(
    "wrong", [lambda ids, row: row[: 3 if ids else None], lambda ids, row: 1 / 0]
)
def test_a_callable_that_fails_ends_its_own_request(llm, wrong) -> None:
    with pytest.raises((ValidationError, ZeroDivisionError)):
        run(llm, greedy(), greedy(wrong))
    assert run(llm, greedy())[0].token_ids, "the engine lives"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda output_token_ids, row: row[:3],
        lambda output_token_ids, row: row.astype(np.float64),
        lambda logits, rows, state: (logits[:, :5], state),
        lambda logits, rows, state: (logits.astype(jnp.bfloat16), state),
        lambda logits, rows, state: logits,
        lambda logits, rows, state: (logits + rows.no_such_thing, state),
        logits_processor(lambda logits, rows, state: (logits, state + 1.5), state=np.int32(0)),
        logits_processor(lambda logits, rows, state: (logits, state), reads=["layers.9.residual"]),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_runs(llm, wrong) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(ValidationError, match="logits_processors"):
        run(llm, greedy(), greedy(wrong))
    assert llm.stats().num_steps == steps


class Target(LogitsProcessor):
    """As vLLM's example: requests with `target_token` get no other one."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.targets: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.targets.pop(index, None)
            if params.extra_args and "target_token" in params.extra_args:
                self.targets[index] = params.extra_args["target_token"]
            self.outputs[index] = output
        for one, other, _ in batch_update.moved:
            self.targets.pop(other, None)
            if one in self.targets:
                self.targets[other] = self.targets.pop(one)

    def apply(self, logits):
        for row, token in self.targets.items():
            value = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = value
        return logits


def test_what_an_engine_has_all_its_requests_have(model_folder, make_llm) -> None:
    folder = model_folder(CASE, num_hidden_layers=LAYERS)
    plain = run(make_llm(folder), *[greedy()] * 3)
    wide = make_llm(folder, logits_processors=[counting, Target])
    off = greedy(extra_args={"counting": False})
    to = greedy(extra_args={"counting": False, "target_token": 77}, max_tokens=4)
    found = run(wide, greedy(extra_args={"counting": {"first": 40}}), off, to)
    assert found[0].token_ids == [40, 41, 42, 43, 44, 45]
    assert found[1].token_ids == plain[1].token_ids
    assert found[2].token_ids == [77] * 4
    assert run(wide, greedy())[0].token_ids == [20, 21, 22, 23, 24, 25]
    with pytest.raises(ValidationError, match=r"counting\.first"):
        run(wide, greedy(extra_args={"counting": {"first": "x"}}))
    with pytest.raises(ValidationError, match="a request has the others"):
        make_llm(folder, logits_processors=[lambda ids, row: row])
