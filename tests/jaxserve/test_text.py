"""Text, chat and streaming: a random one-layer model under the bundled tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM, AsyncEngine, EngineConfig, RequestOutput, RequestOutputKind
from jaxserve import SamplingParams as Params
from jaxserve.errors import EngineDeadError, ValidationError
from tests.jaxserve.test_engine_death import engines_made, fail_dispatch

PROMPTS = ["Add 2 and 3.", "用 500 字介绍一下量子力学", "Sort: pear, apple", "x"]


@pytest.fixture(scope="module")
def settings(model_folder) -> dict[str, Any]:
    import json

    vocab = json.loads((bundled_model_path() / "config.json").read_text())["vocab_size"]
    folder = model_folder("llama_gqa", num_hidden_layers=1, vocab_size=vocab)
    return {
        "model": str(folder),
        "tokenizer": str(bundled_model_path()),
        "max_model_len": 160,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "compile_ahead": 2,
        "compile_in_background": False,
    }


@pytest.fixture(scope="module")
def llm(settings) -> LLM:
    return LLM(**settings)


def complete(llm: LLM, prompt: str, **options: Any) -> Any:
    params = Params(**({"seed": 1, "max_tokens": 40, "ignore_eos": True} | options))
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_outputs_come_in_input_order_with_their_text(llm, capsys) -> None:
    outputs = llm.generate(PROMPTS, Params(seed=3, max_tokens=20))
    assert [output.prompt for output in outputs] == PROMPTS
    assert "Processed prompts: 100%" in capsys.readouterr().err
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        done = output.outputs[0]
        ids = done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids
        assert output.prompt_token_ids == tokenizer.encode(output.prompt)
        whole = tokenizer.decode(output.prompt_token_ids + ids, skip_special_tokens=True)
        assert done.text and whole.endswith(done.text)
        assert output.finished and output.metrics.first_token_time is not None


def test_prompts_may_be_text_token_lists_or_mappings(llm) -> None:
    text = "Count the letters"
    ids = llm.get_tokenizer().encode(text)
    params = Params(temperature=0.0, max_tokens=8, ignore_eos=True)
    both = {"prompt": "", "prompt_token_ids": ids}
    forms: list[Any] = [text, ids, {"prompt_token_ids": ids}, {"prompt": text}, both]
    outputs = llm.generate(forms, params, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == [text, None, None, text, ""]
    assert llm.generate(ids, params, use_tqdm=False)[0].prompt_token_ids == ids


def test_per_prompt_params(llm) -> None:
    params = [Params(max_tokens=n, ignore_eos=True, seed=n) for n in (3, 5, 7, 9)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 5, 7, 9]
    with pytest.raises(ValidationError, match="sampling_params"):
        llm.generate(PROMPTS, params[:2], use_tqdm=False)


def test_stop_strings_cut_the_text(llm) -> None:
    free = complete(llm, "x").text
    stop = free[9:12]
    first = free.index(stop)
    cut = complete(llm, "x", stop=[stop])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free[:first], "stop", stop)
    kept = complete(llm, "x", stop=stop, include_stop_str_in_output=True)
    assert kept.text == free[: first + len(stop)]
    later = complete(llm, "x", stop=stop, min_tokens=39)
    assert len(later.token_ids) >= 39
    assert llm.stats().num_running == 0, "a stopped request gives its slot back"


def test_detokenize_false_gives_no_text(llm) -> None:
    done = complete(llm, "x", detokenize=False, logprobs=1)
    assert done.text == "" and len(done.token_ids) == 40
    shown = {entry.decoded_token for position in done.logprobs for entry in position.values()}
    assert shown == {None}


def test_bad_words_never_appear(llm) -> None:
    free = complete(llm, "x", temperature=0.0)
    tokenizer = llm.get_tokenizer()
    pair = next(
        word
        for i in range(2, 30)
        if (word := tokenizer.decode(free.token_ids[i : i + 2])).strip() == word
        and "\ufffd" not in word
        and len(tokenizer.encode(word, add_special_tokens=False)) == 2
    )
    assert pair in free.text
    done = complete(llm, "x", temperature=0.0, bad_words=[pair])
    ids = tokenizer.encode(pair, add_special_tokens=False)
    pairs = list(zip(done.token_ids, done.token_ids[1:]))
    assert tuple(ids) not in pairs


def test_a_request_whose_time_is_over_returns_what_it_has(llm) -> None:
    params = Params(max_tokens=150, ignore_eos=True)
    late = llm.generate(["x", "y"], params, use_tqdm=False, timeout=1e-6)
    for output in late:
        done = output.outputs[0]
        assert (done.finish_reason, done.stop_reason, done.token_ids) == ("abort", "timeout", [])
    assert len(complete(llm, "x", max_tokens=3, ignore_eos=True).token_ids) == 3


def test_priorities_are_one_a_prompt_and_need_their_policy(llm) -> None:
    for priority in ([0], [0, 1], 3):
        with pytest.raises(ValidationError, match="priority"):
            llm.generate(["x", "y"], use_tqdm=False, priority=priority)
    assert len(llm.generate(["x"], Params(max_tokens=1), use_tqdm=False, priority=[0])) == 1


def test_chat_renders_the_template(llm) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    params = Params(temperature=0.0, max_tokens=5, ignore_eos=True)
    one = llm.chat(messages, params, use_tqdm=False)[0]
    two = llm.chat([messages, messages], params, use_tqdm=False)
    expected = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert one.prompt == expected
    assert [o.outputs[0].token_ids for o in two] == [one.outputs[0].token_ids] * 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert llm.chat(parts, params, use_tqdm=False)[0].prompt == expected


def test_chat_refuses_what_it_would_not_say(llm) -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ValidationError, match="reads text alone"):
        llm.chat([{"role": "user", "content": image}], use_tqdm=False)
    for name in ("tokenize", "tools", "add_generation_prompt"):
        with pytest.raises(ValidationError, match=name):
            llm.chat(
                [{"role": "user", "content": "x"}],
                use_tqdm=False,
                chat_template_kwargs={name: True},
            )


def run_async(settings: dict[str, Any], body: Callable[[AsyncEngine], Any]) -> None:
    async def main() -> None:
        engine = AsyncEngine(EngineConfig(**settings))
        try:
            assert not engine.is_ready
            await engine.wait_ready()
            await asyncio.wait_for(body(engine), 120)
        finally:
            await engine.shutdown()
        assert engine.is_dead

    asyncio.run(main())


async def collect(engine: AsyncEngine, prompt: Any, name: str, **options: Any) -> list[Any]:
    params = Params(**({"seed": 1, "max_tokens": 30, "ignore_eos": True} | options))
    return [output async for output in engine.generate(prompt, params, name)]


@pytest.mark.slow
def test_the_async_engine(llm, settings, monkeypatch) -> None:
    """One engine for all of it: loading dominates."""
    made = engines_made(monkeypatch)
    expected = [complete(llm, prompt, max_tokens=30) for prompt in PROMPTS]

    async def body(engine: AsyncEngine) -> None:
        await streams_equal_the_blocking_front(engine, expected)
        await closing_a_stream_aborts(engine)
        await abort_ends_a_stream(engine)
        await a_stream_ends_when_its_time_is_over(engine)
        await bad_requests_leave_it_alive(engine)
        assert gauge(engine, "num_requests_running") == 0.0
        assert gauge(engine, "num_requests_waiting") == 0.0
        assert gauge(engine, "kv_cache_usage_perc") == 0.0
        await a_dead_engine_says_so(engine, lambda: fail_dispatch(made[0]))

    run_async(settings, body)


def gauge(engine: AsyncEngine, name: str) -> float:
    labels = {"model_name": Path(engine.asked.model_names[0]).name, "engine": "0"}
    value = engine.metrics.registry.get_sample_value(f"jaxserve:{name}", labels)
    assert value is not None
    return value


async def until_idle(engine: AsyncEngine) -> None:
    for _ in range(3000):
        if gauge(engine, "num_requests_running") == 0.0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the aborted request keeps its slot")


async def streams_equal_the_blocking_front(engine: AsyncEngine, expected: list[Any]) -> None:
    kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    for kind in kinds:
        streams = await asyncio.gather(
            *(collect(engine, p, f"r{i}", output_kind=kind) for i, p in enumerate(PROMPTS))
        )
        for stream, done in zip(streams, expected):
            check_stream(stream, done, kind)


def check_stream(stream: list[RequestOutput], done: Any, kind: RequestOutputKind) -> None:
    parts = [output.outputs[0] for output in stream]
    assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
    if kind is RequestOutputKind.DELTA:
        assert len(stream) == 30
        assert "".join(part.text for part in parts) == done.text
        assert [t for part in parts for t in part.token_ids] == done.token_ids
    else:
        assert len(stream) == (30 if kind is RequestOutputKind.CUMULATIVE else 1)
        assert (parts[-1].text, parts[-1].token_ids) == (done.text, done.token_ids)


async def closing_a_stream_aborts(engine: AsyncEngine) -> None:
    params = Params(max_tokens=150, ignore_eos=True)
    stream = engine.generate("x", params, "closed")
    async for output in stream:
        if len(output.outputs[0].token_ids) == 3:
            break
    await stream.aclose()
    await until_idle(engine)
    task = asyncio.create_task(collect(engine, "x", "cancelled", max_tokens=150))
    await asyncio.sleep(0)  # the task has begun: its id is in use
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(engine)


async def abort_ends_a_stream(engine: AsyncEngine) -> None:
    stream = engine.generate("x", Params(max_tokens=150, ignore_eos=True), "late abort")
    await anext(stream)
    await engine.abort("late abort")
    outputs = [output async for output in stream]
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    # before the prompt has been tokenised
    task = asyncio.create_task(collect(engine, "x", "early abort", max_tokens=150))
    await asyncio.sleep(0)  # the task has begun: its id is in use
    await engine.abort("early abort")
    outputs = await task
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    await until_idle(engine)


async def a_stream_ends_when_its_time_is_over(engine: AsyncEngine) -> None:
    params = Params(max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    streams = [engine.generate("x", params, f"late{i}", timeout=0.01) for i in range(5)]

    async def last(stream: Any) -> Any:
        return [output async for output in stream][-1].outputs[0]

    for done in await asyncio.gather(*map(last, streams)):
        assert (done.finish_reason, done.stop_reason) == ("abort", "timeout")
    await until_idle(engine)


async def bad_requests_leave_it_alive(engine: AsyncEngine) -> None:
    with pytest.raises(ValidationError, match="prompt"):
        await collect(engine, "", "empty")
    with pytest.raises(ValidationError, match="priority"):
        async for _ in engine.generate("x", Params(), "urgent", priority=1):
            raise AssertionError
    first = asyncio.create_task(collect(engine, "x", "same", max_tokens=120))
    await asyncio.sleep(0)  # the task has begun: its id is in use
    with pytest.raises(ValidationError, match="request_id"):
        await collect(engine, "x", "same")
    assert len((await first)[-1].outputs[0].token_ids) == 120


async def a_dead_engine_says_so(engine: AsyncEngine, fail: Callable[[], None]) -> None:
    task = asyncio.create_task(collect(engine, "x", "doomed", max_tokens=150))
    await asyncio.sleep(0)
    fail()
    with pytest.raises(EngineDeadError) as caught:
        await task
    assert "out of memory" in str(caught.value.__cause__)
    with pytest.raises(EngineDeadError):
        await collect(engine, "x", "late")


def test_a_bad_model_folder_is_reported_by_wait_ready(tmp_path) -> None:
    async def main() -> None:
        engine = AsyncEngine(EngineConfig(model=str(tmp_path)))
        with pytest.raises(ValidationError, match=r"config\.json"):
            await engine.wait_ready()
        await engine.shutdown()

    asyncio.run(main())
