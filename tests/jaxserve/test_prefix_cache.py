"""The prefix cache of a real engine: the same tokens, logprobs and penalties, computed once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.engine.integrity import logger
from tests.jaxserve import oracle
from tests.jaxserve.test_engine import CASE, ONE_LAYER, SIZES, essence, random_params
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def llm(model_folder, make_llm) -> LLM:
    return make_llm(model_folder(CASE, **ONE_LAYER), **SIZES)  # pages of 8 tokens


def sharing(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that begin with a part of one of three prefixes."""
    prefixes = oracle.prompts(3, VOCAB_SIZE, 1, seed=4)
    prefixes = [[(token * place) % VOCAB_SIZE for place in range(80)] for (token,) in prefixes]
    return [
        rng.choice(prefixes)[: rng.randint(0, 80)] + oracle.prompts(1, VOCAB_SIZE, 30, index)[0]
        for index in range(count)
    ]


def assert_equal(one: RequestOutput, other: RequestOutput) -> None:
    assert essence(one) == essence(other)
    for mine, its in zip(one.outputs, other.outputs):
        for a, b in zip(mine.logprobs or [], its.logprobs or []):
            assert list(a) == list(b)
            assert [v.logprob for v in a.values()] == pytest.approx(
                [v.logprob for v in b.values()], abs=1e-4
            )
    for a, b in zip((one.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:]):
        assert a is not None and b is not None and list(a) == list(b)


@pytest.mark.slow
def test_what_is_generated_does_not_depend_on_the_cache(llm, model_folder, make_llm) -> None:
    rng = random.Random(5)
    prompts = sharing(rng, 20)
    params = [random_params(rng, index) for index in range(len(prompts))]
    params += [
        SamplingParams(n=3, seed=7, max_tokens=9, repetition_penalty=1.5, logprobs=1),
        SamplingParams(seed=7, max_tokens=9, presence_penalty=1.5, temperature=0.0, logprobs=2),
    ]
    prompts += [prompts[0], prompts[0]]
    off = make_llm(model_folder(CASE, **ONE_LAYER), enable_prefix_caching=False, **SIZES)
    expected = off.generate(prompts, params, use_tqdm=False)
    assert not any(output.num_cached_tokens for output in expected)
    before = llm.stats()
    first = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().num_preemptions > before.num_preemptions, "the test means to preempt"
    assert sum(output.num_cached_tokens > 0 for output in first + again) > 10
    for output in first + again:
        asked = output.prompt_logprobs is not None
        assert not (asked and output.num_cached_tokens), "its prompt has to be computed"
    for one, two, plain in zip(first, again, expected):
        assert_equal(one, plain)
        assert_equal(two, plain)
    stats = llm.stats().pages
    found = sum(output.num_cached_tokens for output in first + again)
    assert stats.num_found - before.pages.num_found >= found > 0
    llm.client.engine.scheduler.check_integrity()


@pytest.mark.slow
def test_another_turn_of_a_chat_finds_question_and_answer(llm) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    question = oracle.prompts(1, VOCAB_SIZE, 1, seed=11)[0] * 20
    (first,) = llm.generate([question], params, use_tqdm=False)
    told = question + first.outputs[0].token_ids
    (second,) = llm.generate([[*told, 5, 6]], params, use_tqdm=False)
    assert second.num_cached_tokens == (len(told) - 1) // 8 * 8
    llm.reset_prefix_cache()
    (plain,) = llm.generate([[*told, 5, 6]], params, use_tqdm=False)
    assert plain.num_cached_tokens == 0 and essence(plain) == essence(second)


def test_what_was_planned_and_not_computed_is_not_found(llm, monkeypatch) -> None:
    params, tokens = SamplingParams(temperature=0.0, max_tokens=4), [17, *range(3, 60)]

    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.client.engine.runner, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([tokens], params, use_tqdm=False)
    (found,) = llm.generate([tokens], params, use_tqdm=False)
    assert found.num_cached_tokens == 0
    llm.reset_prefix_cache()
    (plain,) = llm.generate([tokens], params, use_tqdm=False)
    assert essence(found) == essence(plain)


@pytest.mark.slow
def test_keys_that_the_length_of_the_prompt_decides_are_not_shared(model_folder, make_llm) -> None:
    folder = model_folder("llama_rope_dynamic", **ONE_LAYER)
    llm = make_llm(folder, **SIZES | {"max_model_len": 128})
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    tokens = [(7 * place) % VOCAB_SIZE for place in range(110)]
    short, long = tokens[:48], tokens  # the rope is stretched beyond 64

    def run(prompt: list[int]) -> RequestOutput:
        return llm.generate([prompt], params, use_tqdm=False)[0]

    plain = run(long)
    llm.reset_prefix_cache()
    run(short)
    found = run(long)
    assert_equal(found, plain)
    assert found.num_cached_tokens == 0
    again = run(long)
    assert again.num_cached_tokens > 0
    assert_equal(again, plain)


def test_a_salt_and_a_reset_keep_requests_apart(llm) -> None:
    params, tokens = SamplingParams(temperature=0.0, max_tokens=2), [9] * 40

    def found(salt: str | None = None) -> int:
        prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
        return llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens

    assert [found(), found(), found("a"), found("a"), found("b"), found()] == [0, 32, 0, 32, 0, 32]
    assert llm.reset_prefix_cache()
    assert [found(), found("a"), found("a")] == [0, 0, 32]


def test_the_memory_report_tells_what_the_metrics_tell(llm, capsys) -> None:
    llm.generate([[5] * 20], SamplingParams(max_tokens=2), use_tqdm=False)
    told = llm.memory_report()
    printed = capsys.readouterr().out
    samples = {
        sample.name.removeprefix("jaxserve:").removesuffix("_total"): sample.value
        for family in llm.client.metrics.registry.collect()
        for sample in family.samples
    }
    assert told["kv_pages"] == SIZES["num_pages"] - 1 and told["kv_pages_cached"] > 0
    assert told["kv_pool_bytes"] == 25 * 8 * llm.footprint.kv_bytes_per_token
    for name, value in told.items():
        assert name in printed and samples[name] == pytest.approx(value)


def test_active_bytes_are_those_of_computed_tokens(llm) -> None:
    client = llm.client
    params = SamplingParams(max_tokens=60, ignore_eos=True, n=2)
    client.add(client.prepare([7] * 21, params, "one"))
    seen = []
    while client.has_work:
        client.outputs()
        pages, running = client.stats().pages, client.engine.scheduler.running
        if len(running) == 2:
            owned = {page: 0 for request in running for page in request.pages}
            for request in running:
                for place, page in enumerate(request.pages):
                    owned[page] = max(0, min(8, request.num_computed - 8 * place), owned[page])
            assert pages.num_active == len(owned) and pages.num_tokens == sum(owned.values())
            seen.append(pages.num_tokens)
    assert len(seen) > 20


def test_what_is_lost_is_counted_and_logged_when_the_engine_is_idle(
    llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []
    engine = llm.client.engine
    monkeypatch.setattr(logger, "exception", lambda *message: logged.append(message))
    monkeypatch.setattr(engine._integrity, "_next", 0.0)
    (page,) = engine.scheduler.pages.pool.allocate(1)
    for _ in range(2):  # the second time is too early for another check
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.stats().num_integrity_failures == 1 == len(logged)
    assert llm.memory_report()["integrity_failures"] == 1
    engine.scheduler.pages.pool.release([page])
