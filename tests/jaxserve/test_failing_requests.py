"""An error of one request ends that request and no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.client.output_processor import OutputProcessor
from jaxserve.engine.features import EngineFeatures
from jaxserve.errors import ValidationError
from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.features.prompt_scores import PromptScores
from jaxserve.params.beam_search_params import BeamSearchParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MARKED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=7)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(
        str(bundled_model_path()),
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        num_pages=20,
        compile_ahead=2,
        compile_in_background=False,
    )


def check_others_go_on(llm: LLM, caplog: Any, marked: SamplingParams = MARKED) -> None:
    """The second prompt, which asks for seven logprobs, fails."""
    expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        found = llm.generate(PROMPTS, [GREEDY, marked, GREEDY], use_tqdm=False)
    assert {one.finish_reason for one in found[1].outputs} == {"error"}
    for index in (0, 2):
        assert found[index].outputs[0].token_ids == expected[index]
        assert found[index].outputs[0].finish_reason == "length"
    assert "planted" in caplog.text
    engine = llm.client.engine  # type: ignore[attr-defined]
    engine.scheduler.check_integrity()
    assert not engine.has_work and not engine.scheduler.running


def is_marked(request: Any) -> bool:
    return request.params.logprobs == 7


def test_adding(llm: LLM, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EngineFeatures.prepare

    def prepare(self: Any, request: Any) -> None:
        if is_marked(request):
            raise IndexError("planted")
        real(self, request)

    monkeypatch.setattr(EngineFeatures, "prepare", prepare)
    check_others_go_on(llm, caplog)


@pytest.mark.parametrize("method", ["bind", "needed_by_chunk"])
@pytest.mark.parametrize("n", [1, 3])
def test_binding(
    llm: LLM, caplog: Any, monkeypatch: pytest.MonkeyPatch, method: str, n: int
) -> None:
    # chunks are shown to features that may need some
    feature = Logprobs if method == "bind" else PromptScores
    real = getattr(feature, method)

    def failing(self: Any, given: Any, *rest: Any) -> Any:
        if is_marked(given.request if method == "needed_by_chunk" else given):
            raise IndexError("planted")
        return real(self, given, *rest)

    monkeypatch.setattr(feature, method, failing)
    marked = SamplingParams(temperature=0.5, max_tokens=6, logprobs=7, n=n)
    check_others_go_on(llm, caplog, marked)


def test_packing(llm: LLM, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Logprobs.pack

    def pack(self: Any, inputs: Any, rows: Any, *rest: Any) -> None:
        if any(is_marked(row.request) for row in rows):
            raise IndexError("planted")
        real(self, inputs, rows, *rest)

    monkeypatch.setattr(Logprobs, "pack", pack)
    check_others_go_on(llm, caplog)


@pytest.mark.parametrize("method", ["prepare", "bind", "pack"])
@pytest.mark.parametrize("n", [1, 3])
def test_what_a_feature_refuses_is_its_callers_error(
    llm: LLM, caplog: Any, monkeypatch: pytest.MonkeyPatch, method: str, n: int
) -> None:
    expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    kind: Any = EngineFeatures if method == "prepare" else Logprobs
    real = getattr(kind, method)

    def refusing(self: Any, *given: Any) -> Any:
        requests = [row.request for row in given[1]] if method == "pack" else given[:1]
        if any(is_marked(one) for one in requests):
            raise ValidationError("extra_args.own.strength", "a lot", "a number")
        return real(self, *given)

    monkeypatch.setattr(kind, method, refusing)
    engine = llm.client.engine  # type: ignore[attr-defined]
    marked = SamplingParams(temperature=0.5, max_tokens=6, logprobs=7, n=n)
    told = r"extra_args\.own\.strength='a lot' is not supported: a number"
    with caplog.at_level(logging.ERROR), pytest.raises(ValidationError, match=told):
        llm.generate(PROMPTS, [GREEDY, marked, GREEDY], use_tqdm=False)
    assert not caplog.text, "it is no fault of the engine's"
    llm.enqueue(PROMPTS[1], marked)
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == expected
    with pytest.raises(ValidationError, match=told):
        llm.wait_for_completion(use_tqdm=False)
    engine.scheduler.check_integrity()
    assert not engine.has_work and not engine.scheduler.running


def test_making_text(llm: LLM, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OutputProcessor._take_reports

    def take(self: Any, live: Any, sequence: Any, *rest: Any) -> None:
        if sequence.params.logprobs == 7 and sequence.num_tokens == 3:
            raise ValueError("planted")
        real(self, live, sequence, *rest)

    monkeypatch.setattr(OutputProcessor, "_take_reports", take)
    check_others_go_on(llm, caplog)


def test_a_beam(llm: LLM, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Logprobs.bind

    def bind(self: Any, request: Any, *rest: Any) -> None:
        if request.output_token_ids:
            raise IndexError("planted")
        real(self, request, *rest)

    monkeypatch.setattr(Logprobs, "bind", bind)
    with caplog.at_level(logging.ERROR):
        (found,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4))
    assert {one.finish_reason for one in found.sequences} == {"error"}
    engine = llm.client.engine  # type: ignore[attr-defined]
    engine.scheduler.check_integrity()
    assert not engine.has_work
