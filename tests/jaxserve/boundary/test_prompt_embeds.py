"""Prompts with spans of embeddings between their token ids, against transformers in float32."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jaxserve import LLM, SamplingParams
from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.prompt_embeds import checked_embeds
from jaxserve.boundary.prompt_spans import PARTS, Part, PromptSpan
from jaxserve.errors import ValidationError
from jaxserve.execution.features.prompt_embeds import PromptEmbeds
from jaxserve.request.request import Request
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow  # each starts an engine

CASE, HIDDEN, PAGE = "llama_gqa", 64, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
Spans = list[tuple[int, np.ndarray]]


@pytest.fixture(scope="module")
def model(model_folder: Any) -> torch.nn.Module:
    return oracle.load(model_folder(CASE))


@pytest.fixture(scope="module")
def llm(make_llm: Any, model_folder: Any) -> LLM:
    return make_llm(model_folder(CASE), enable_prompt_embeds=True, enable_embeddings=True)


def table(model: torch.nn.Module) -> np.ndarray:
    return model.get_input_embeddings().weight.detach().numpy()


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, HIDDEN)).astype("f")


def mixed(ids: list[int], spans: Spans, **more: Any) -> dict[str, Any]:
    """A prompt; its ids in the places of spans are others than what the spans say."""
    given = [*ids]
    for start, rows in spans:
        given[start : start + len(rows)] = [3] * len(rows)
    return {"prompt_token_ids": given, "prompt_embeds": spans} | more


def embedded(model: torch.nn.Module, ids: list[int], spans: Spans) -> torch.Tensor:
    """What enters the first layer: [1, T, HIDDEN]."""
    rows = table(model)[ids].copy()
    for start, given in spans:
        rows[start : start + len(given)] = given
    return torch.tensor(rows)[None]


def test_rows_of_the_models_own_table_change_no_token(llm: LLM, model: Any) -> None:
    rng = random.Random(0)
    many = [*oracle.prompts(8, VOCAB_SIZE, 100), [5, 6] * 40, [7], [8, 9]]
    given = []
    for ids in many:
        cuts = sorted(rng.sample(range(len(ids) + 1), min(len(ids) + 1, 4)))
        spans = [(a, table(model)[ids[a:b]]) for a, b in zip(cuts[::2], cuts[1::2])]
        given.append(mixed(ids, spans))
    expected = [one.outputs[0].token_ids for one in llm.generate(many, GREEDY, use_tqdm=False)]
    found = llm.generate([*given, *many], GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == expected * 2
    several = SamplingParams(n=3, temperature=0.4, seed=1, max_tokens=9, ignore_eos=True)
    mine, its = llm.generate([given[1], many[1]], several, use_tqdm=False)
    assert [one.token_ids for one in mine.outputs] == [one.token_ids for one in its.outputs]


def test_any_rows_are_as_in_transformers(llm: LLM, model: Any) -> None:
    ids = oracle.prompts(1, VOCAB_SIZE, 99, seed=3)[0][:1] * 90
    spans = [(0, noise(3)), (29, noise(7, 1)), (36, noise(1, 2)), (70, noise(20, 3))]
    with torch.no_grad():
        out = model(inputs_embeds=embedded(model, ids, spans), output_hidden_states=True)
    wanted = out.hidden_states[-1][0].double().numpy()
    for pooling, vector in (("mean", wanted.mean(0)), ("last", wanted[-1])):
        (found,) = llm.embed([mixed(ids, spans)], pooling, False, use_tqdm=False)
        assert np.abs(np.array(found.outputs.embedding) - vector).max() < 2e-5 * vector.max()


def test_what_is_said_of_token_ids_is_said_where_there_are_some(llm: LLM, model: Any) -> None:
    ids, spans = [5, 6, 7, 8, 9, 5], [(2, noise(2))]
    with torch.no_grad():
        logits = model(inputs_embeds=embedded(model, ids, spans)).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (found,) = llm.generate([mixed(ids, spans)], params, use_tqdm=False)
    assert found.prompt_token_ids == [5, 6, -1, -1, 9, 5]
    told = found.prompt_logprobs
    assert told is not None
    assert [one and [*one] for one in told] == [None, [6], None, None, [9], [5]]
    for place in (1, 4, 5):
        value = float(scores[place - 1, ids[place]])
        assert abs(told[place][ids[place]].logprob - value) < 1e-4
    # neither the last token of the vocabulary nor the one given in the spans' places
    for token, penalised in ((VOCAB_SIZE - 1, False), (3, False), (9, True)):
        bias = {token: 100.0, 11: 70.0}
        repeated = SamplingParams(
            temperature=0.0, max_tokens=1, repetition_penalty=2.0, logit_bias=bias
        )
        (one,) = llm.generate([mixed(ids, spans)], repeated, use_tqdm=False)
        assert one.outputs[0].token_ids == [11 if penalised else token]


def test_equal_spans_are_found_and_a_text_before_others(llm: LLM) -> None:
    text, tail = [5] * 20, [6] * 20  # pages are of 8
    one, other = [(20, noise(12, 5))], [(20, noise(12, 6))]

    def cached(spans: Spans, **more: Any) -> int:
        prompt = mixed(text + [0] * 12 + tail, spans, **more)
        return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert [cached(spans) for spans in (one, other, one, other)] == [0, 16, 48, 48]
    assert [cached(one, cache_salt="s"), cached(other, cache_salt="s")] == [0, 16]
    (plain,) = llm.generate([text + tail], GREEDY, use_tqdm=False)
    assert plain.num_cached_tokens == 16
    late = [(20, one[0][1][:6]), (26, one[0][1][6:])]
    assert cached(late) == 16, "a span is found as a whole"


def test_the_cache_changes_no_token_and_finds_all_that_is_equal(
    make_llm: Any, model_folder: Any
) -> None:
    many = {"enable_prompt_embeds": True, "num_pages": 400, "max_num_batched_tokens": 32}
    caching = make_llm(model_folder(CASE), **many)
    plain = make_llm(model_folder(CASE), **many, enable_prefix_caching=False)
    rng, known = random.Random(1), set[tuple[Any, ...]]()
    for _ in range(24):
        ids, content, spans = list[int](), list[Any](), list[tuple[int, np.ndarray]]()
        for _ in range(rng.randint(1, 4)):
            length, kind = rng.choice([3, 8, 13]), rng.randrange(3)
            if rng.random() < 0.5:
                spans.append((len(ids), noise(length, kind)))
                content += [(length, kind, place) for place in range(length)]
            else:
                content += [5 + kind] * length
            ids += [5 + kind] * length
        found, alone = (
            llm.generate([mixed(ids, spans)], GREEDY, use_tqdm=False)[0] for llm in (caching, plain)
        )
        output = found.outputs[0].token_ids
        assert output == alone.outputs[0].token_ids
        full = [tuple(content[: PAGE * (page + 1)]) for page in range((len(ids) - 1) // PAGE)]
        wanted = next((page for page, held in enumerate(full) if held not in known), len(full))
        assert found.num_cached_tokens == PAGE * wanted
        content += output[:-1]
        known |= {tuple(content[: PAGE * page]) for page in range(1, len(content) // PAGE + 1)}


class Images(PromptEmbeds):
    """A span of two places for each row of pixels, whose embeddings the engine makes."""

    name = "pictures"
    setting = None

    def begins(self, asked: AddGroup) -> Future[Any] | None:
        made: Future[Any] = Future()
        made.set_result({one.start: encoded(np.frombuffer(one.data, "u1")) for one in asked.spans})
        return made if asked.spans else None

    def rows_of(self, request: Request, span: PromptSpan) -> np.ndarray:
        return request.shared[self.name][span.start]


def encoded(pixels: np.ndarray) -> np.ndarray:
    return noise(2 * len(pixels), int(pixels.sum()))


def test_rows_that_the_engine_makes(
    make_llm: Any, model_folder: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = lambda pixels, *_: 2 * len(pixels)  # noqa: E731
    part = Part("enable_prompt_embeds", lambda given, model: given, places)
    monkeypatch.setitem(PARTS, "pictures", part)
    settings = {"enable_prompt_embeds": True, "features": [Images], "max_num_batched_tokens": 16}
    seeing = make_llm(model_folder(CASE), **settings)
    text, tail, cached = [5] * 20, [6] * 8, []
    for seed in (3, 4, 3):
        pixels = np.full(6, seed, np.uint8)
        ids = text + [0] * 12 + tail
        prompt = {"prompt_token_ids": ids, "pictures": [(20, pixels)]}
        (found,) = seeing.generate([prompt], GREEDY, use_tqdm=False)
        (wanted,) = llm.generate([mixed(ids, [(20, encoded(pixels))])], GREEDY, use_tqdm=False)
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        cached.append(found.num_cached_tokens)
    assert cached == [0, 16, 32], "another image shares the text before it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_arrays(dtype: torch.dtype) -> None:
    facts: Any = SimpleNamespace(hidden_size=HIDDEN)
    tensor = torch.tensor(noise(3), requires_grad=True).to(dtype)
    expected = tensor.detach().float().numpy()
    assert (checked_embeds(tensor, facts) == expected).all()
    with pytest.raises(ValidationError, match="floating tensor"):
        checked_embeds(torch.ones((3, HIDDEN), dtype=torch.int32), facts)
