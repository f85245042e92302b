"""Properties of the running engine on one tiny model: what must not change the tokens, and what
must.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax.monitoring
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.boundary.messages import StepEstimate
from jaxserve.boundary.reports import PROMPT_SCORES
from jaxserve.engine.pace import Pace
from jaxserve.errors import ValidationError
from jaxserve.liveness.pulse import Pulse
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

CASE = "llama_gqa"
ONE_LAYER = {"num_hidden_layers": 1}  # compiles fast; depth is test_engine_parity's matter
# few pages and several slots; engines of the same sizes share their compiled programs
SIZES = {"num_pages": 26, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llm(model_folder, make_llm) -> LLM:
    return make_llm(model_folder(CASE, **ONE_LAYER), **SIZES)


@pytest.fixture(scope="module")
def serial(model_folder, make_llm) -> LLM:
    """One that waits for each step before the next one."""
    return make_llm(model_folder(CASE, **ONE_LAYER), overlap=False, **SIZES)


@pytest.fixture(scope="module")
def reference(model_folder) -> Any:
    return oracle.load(model_folder(CASE, **ONE_LAYER))


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Any mixture of options that a batch may meet."""
    options: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0.0, 0.7, 1.3]),
        "top_p": lambda: rng.choice([0.5, 0.95]),
        "top_k": lambda: rng.randint(1, 20),
        "min_p": lambda: 0.1,
        "presence_penalty": lambda: rng.uniform(-1, 1),
        "frequency_penalty": lambda: rng.uniform(-1, 1),
        "repetition_penalty": lambda: rng.uniform(0.8, 1.3),
        "logit_bias": lambda: {rng.randrange(VOCAB_SIZE): 3.0},
        "allowed_token_ids": lambda: rng.sample(range(VOCAB_SIZE), 30),
        "stop_token_ids": lambda: rng.sample(range(VOCAB_SIZE), 5),
        "min_tokens": lambda: rng.randint(1, 5),
        "logprobs": lambda: rng.randint(0, 4),
        "prompt_logprobs": lambda: rng.randint(0, 4),
    }
    chosen = rng.sample(sorted(options), rng.choice([0, 0, 1, 2, 4]))
    values = {name: options[name]() for name in chosen}
    return SamplingParams(seed=seed, max_tokens=rng.randint(6, 80), **values)


def random_workload(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = oracle.prompts(count, VOCAB_SIZE, 100, seed)
    return prompts, [random_params(rng, index) for index in range(count)]


def essence(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


def test_tokens_do_not_depend_on_the_batch_or_the_overlap(llm, serial) -> None:
    prompts, params = random_workload(14, seed=1)
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().num_preemptions > 0, "the test means to preempt"
    alone = [serial.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts, params)]
    for one, other in zip(together, alone):
        assert essence(one) == essence(other)
        assert one.prompt_token_ids == other.prompt_token_ids
        for mine, its in zip(one.outputs, other.outputs):
            if mine.logprobs is not None:
                assert [list(p) for p in mine.logprobs] == [list(p) for p in its.logprobs]


@pytest.mark.parametrize("overlap", [True, False])
def test_completions_of_one_prompt_are_those_of_separate_requests(
    llm, serial, overlap: bool
) -> None:
    """They share the pages of the prompt; its tokens count for penalties and masks all the same."""
    engine = llm if overlap else serial
    (prompt,) = oracle.prompts(1, VOCAB_SIZE, 70, seed=8)
    prompt = (prompt * 70)[:67]
    options = {
        "temperature": 1.2,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logprobs": 2,
        "max_tokens": 12,
    }
    many = SamplingParams(n=6, seed=21, prompt_logprobs=1, **options)
    (together,) = engine.generate([prompt], many, use_tqdm=False)
    alone = [SamplingParams(seed=21 + i, **options) for i in range(6)]
    for completion, single in zip(
        together.outputs, engine.generate([prompt] * 6, alone, use_tqdm=False)
    ):
        assert completion.token_ids == single.outputs[0].token_ids
    assert together.prompt_logprobs is not None and len(together.prompt_logprobs) == len(prompt)
    assert engine.client.engine.scheduler.pages.pool.num_used == 0


def test_nothing_is_compiled_once_the_engine_is_ready(llm) -> None:
    events: list[str] = []

    def listen(name: str, duration: float, **kwargs: Any) -> None:
        if "compile" in name or "trace" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 2 + 1)(3)
        assert events, "the listener hears compilations"
        events.clear()
        prompts, params = random_workload(20, seed=2)
        llm.generate(prompts, params, use_tqdm=False)
        assert events == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_what_steps_may_take_is_told_of_each_program(llm, monkeypatch) -> None:
    engine, told = llm.client.engine, list[StepEstimate]()
    runner, pulse = engine.runner, Pulse()
    assert set(runner.first_runs) == {one.layout.shape for one in runner.programs.programs}
    assert min(runner.first_runs.values()) > 0
    assert runner.step_flops.max_model_len == llm.client.config.scheduler.max_model_len
    monkeypatch.setattr("jaxserve.engine.pace.SLOW_STEP_S", 1e-9)
    engine.pace = Pace(runner, told.append, pulse)
    try:
        prompts, params = random_workload(6, seed=4)
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        engine.pace = None
    assert sum(one.seconds > 0 for one in told) > 5
    assert told[-1] == StepEstimate(0.0, False), "nothing is in flight"


@pytest.mark.slow
def test_an_engine_with_many_programs_gives_the_same_tokens(llm, make_llm, model_folder) -> None:
    prompts, params = random_workload(8, seed=3)
    many = make_llm(model_folder(CASE, **ONE_LAYER), compile_ahead=9, **SIZES)
    programs = [len(one.client.engine.runner.programs.programs) for one in (llm, many)]
    assert programs[0] < programs[1]
    expected = llm.generate(prompts, params, use_tqdm=False)
    for one, other in zip(expected, many.generate(prompts, params, use_tqdm=False)):
        assert essence(one) == essence(other)


def test_logprobs_equal_transformers(llm, reference) -> None:
    prompts = oracle.prompts(5, VOCAB_SIZE, 70, seed=4)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, logprobs=3, prompt_logprobs=2)
    for output in llm.generate(prompts, params, use_tqdm=False):
        done = output.outputs[0]
        tokens = output.prompt_token_ids + done.token_ids
        expected = oracle.logprobs(reference, tokens)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        positions = [*output.prompt_logprobs[1:], *done.logprobs]
        counts = [2] * (len(output.prompt_token_ids) - 1) + [3] * len(done.token_ids)
        for row, (position, count) in enumerate(zip(positions, counts)):
            token = tokens[row + 1]
            assert next(iter(position)) == token, "the token itself comes first, as in vLLM"
            assert len(position) in (count, count + 1)
            assert set(expected[row].topk(count).indices.tolist()) <= set(position)
            for candidate, entry in position.items():
                value = expected[row, candidate].item()
                assert entry.logprob == pytest.approx(value, abs=2e-4)
                assert entry.rank == int((expected[row] > value).sum()) + 1
        total = sum(p[t].logprob for p, t in zip(done.logprobs, done.token_ids))
        assert done.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_of_a_single_token(llm) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    assert llm.generate([[5]], params, use_tqdm=False)[0].prompt_logprobs == [None]


def test_an_abort_during_the_prefill_leaves_no_prompt_logprobs_behind(llm) -> None:
    client = llm.client
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    for steps in (1, 2):
        client.add(client.prepare([7] * 90, params, "aborted"))
        for _ in range(steps):
            assert client.outputs() == []
        client.abort("aborted")
        while client.has_work:
            client.outputs()
        (scores,) = (one for one in client.engine.runner.features if one.name == PROMPT_SCORES)
        assert not scores._scored


def test_penalties_equal_their_definition(llm, reference) -> None:
    prompt = oracle.prompts(1, VOCAB_SIZE, 20, seed=6)[0]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=25,
        ignore_eos=True,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
    )
    done = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    tokens, output = list(prompt), []
    import torch

    for _ in range(25):
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0, -1]
        for token in set(tokens):
            logits[token] *= 1 / 1.2 if logits[token] > 0 else 1.2
        for token in set(output):
            logits[token] -= 0.7 + 0.4 * output.count(token)
        output.append(int(logits.argmax()))
        tokens.append(output[-1])
    assert done.token_ids == output


def greedy(llm: LLM, prompt: list[int], **options: Any) -> Any:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | options))
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def test_stop_rules(llm) -> None:
    prompt = [5, 6, 7, 8]
    free = greedy(llm, prompt, ignore_eos=True).token_ids
    third = free[2]
    first = free.index(third)
    stopped = greedy(llm, prompt, ignore_eos=True, stop_token_ids=[third])
    assert stopped.token_ids == free[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    longer = greedy(llm, prompt, ignore_eos=True, stop_token_ids=[third], min_tokens=first + 2)
    assert third not in longer.token_ids[: first + 2]
    assert len(longer.token_ids) >= first + 2
    assert greedy(llm, prompt, max_tokens=1).finish_reason == "length"


def test_masks(llm) -> None:
    prompt = [9, 10, 11]
    free = greedy(llm, prompt, ignore_eos=True).token_ids
    allowed = [3, 4, 50]
    assert set(greedy(llm, prompt, ignore_eos=True, allowed_token_ids=allowed).token_ids) <= {
        *allowed
    }
    without = greedy(llm, prompt, ignore_eos=True, logit_bias={free[0]: -100.0}).token_ids
    assert free[0] not in without
    forced = greedy(llm, prompt, ignore_eos=True, logit_bias={77: 100.0}).token_ids
    assert set(forced) == {77}


def test_n_completions_differ_and_are_reproducible(llm) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=10, ignore_eos=True)
    first, again = (llm.generate([[4, 5, 6]], params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert essence(first) == essence(again)
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    alone = llm.generate(
        [[4, 5, 6]], SamplingParams(seed=12, max_tokens=10, ignore_eos=True), use_tqdm=False
    )
    assert alone[0].outputs[0].token_ids == first.outputs[1].token_ids


def test_max_model_len_ends_a_request(llm) -> None:
    done = greedy(llm, [5] * 180, max_tokens=None, ignore_eos=True)
    assert len(done.token_ids) == 12 and done.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ([], {}, "prompt"),
        ([5] * 192, {}, "prompt"),
        ([VOCAB_SIZE], {}, "prompt_token_ids"),
        ([1.5], {}, "prompt_token_ids"),
        ([5], {"max_tokens": 193}, "max_tokens"),
        ([5], {"logprobs": 21}, "logprobs"),
        ([5], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ([5] * 190, {"min_tokens": 10, "max_tokens": 20}, "min_tokens"),
        ([5], {"stop": ["a"]}, "stop"),
    ],
)
def test_bad_requests_name_their_field_and_leave_nothing_behind(llm, prompt, options, named):
    with pytest.raises(ValidationError) as caught:
        llm.generate([[1, 2], prompt], SamplingParams(**options), use_tqdm=False)
    assert caught.value.field == named
    assert llm.stats().num_waiting == 0


def test_what_is_no_sampling_params_is_refused(llm) -> None:
    for params in ({"temperature": 0.0}, [None], "greedy", [SamplingParams()] * 2):
        with pytest.raises(ValidationError, match="sampling_params"):
            llm.generate([[1, 2]], params, use_tqdm=False)


def test_text_without_a_tokenizer_is_refused(llm) -> None:
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        llm.generate("text", use_tqdm=False)


def test_a_failing_step_leaves_no_request_behind(llm, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.client.engine.runner, "fetch", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3]], use_tqdm=False)
    assert llm.stats().num_running == 0
    assert greedy(llm, [5, 6]).finish_reason in ("stop", "length")


def test_unknown_settings_are_refused_by_name(model_folder) -> None:
    with pytest.raises(ValidationError, match="max_seqs=3"):
        LLM(model=str(model_folder(CASE, **ONE_LAYER)), max_seqs=3)
    with pytest.raises(ValidationError, match="model="):
        LLM(model="/nowhere/at/all")
    with pytest.raises(ValidationError, match="max_model_len=100000"):
        LLM(
            model=str(model_folder(CASE, **ONE_LAYER)),
            max_model_len=100000,
            skip_tokenizer_init=True,
        )
