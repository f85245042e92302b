"""Prompts and parameters become requests, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import SamplingParams
from jaxserve.client.input_processor import InputProcessor
from jaxserve.errors import ValidationError
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams, Thoughts
from jaxserve.tokenization.tokenizer import Tokenizer
from tests.resolved_config import resolved_config


def processor(tokenizer: Any = None) -> InputProcessor:
    model: Any = SimpleNamespace(vocab_size=100, eos_token_ids=(2, 3), labels=(), images=None)
    return InputProcessor(resolved_config(max_model_len=16), model, tokenizer)


def test_the_tokenizers_end_token_ends_a_text_too() -> None:
    tokenizer = SimpleNamespace(eos_token_id=7, vocab_size=100)

    def ends(inputs: InputProcessor, **options: Any) -> frozenset[int]:
        prepared = inputs.prepare([5], SamplingParams(**options), "r")
        return prepared.group.stop_rule.end_token_ids

    assert ends(processor(tokenizer)) == {2, 3, 7}
    assert ends(processor(SimpleNamespace(eos_token_id=None, vocab_size=100))) == {2, 3}
    assert ends(processor()) == {2, 3}
    assert ends(processor(tokenizer), ignore_eos=True) == frozenset()


def test_what_ends_a_repetition_is_in_the_stop_rule() -> None:
    asked = RepetitionDetectionParams(2, 1, 3)
    group = processor().prepare([5], SamplingParams(repetition_detection=asked), "r").group
    assert group.stop_rule.repetition == asked and group.params.repetition_detection is None


def test_parameters_must_leave_a_token_to_sample() -> None:
    inputs = processor()
    inputs.prepare([5], SamplingParams(allowed_token_ids=[2, 3]), "r")
    for ignore_eos in (False, True):
        params = SamplingParams(allowed_token_ids=[2, 3], min_tokens=1, ignore_eos=ignore_eos)
        with pytest.raises(ValidationError, match="allowed_token_ids"):
            inputs.prepare([5], params, "r")


def test_a_request_has_the_engines_stream_interval_unless_it_says_otherwise() -> None:
    model: Any = SimpleNamespace(vocab_size=100, eos_token_ids=(2, 3), labels=(), images=None)
    inputs = InputProcessor(resolved_config(max_model_len=16, stream_interval=4), model, None)
    for given, expected in ((None, 4), (1, 1), (2, 2)):
        params = SamplingParams(stream_interval=given)
        assert inputs.prepare([5], params, "r").params.stream_interval == expected
        assert params.stream_interval == given
    assert processor().prepare([5], SamplingParams(), "r").params.stream_interval is None


def test_a_constraint_that_begins_at_once_has_no_thoughts_to_bound() -> None:
    tokenizer = Tokenizer(bundled_model_path())
    model: Any = SimpleNamespace(
        vocab_size=tokenizer.vocab_size, eos_token_ids=(2, 3), labels=(), images=None
    )
    inputs = InputProcessor(resolved_config(max_model_len=16), model, tokenizer)
    tags = Thoughts("<think>", "</think>", is_open=True)

    def thoughts(**asked: Any) -> Any:
        constraint = StructuredOutputsParams(**asked) if asked else None
        params = SamplingParams(
            thinking_token_budget=5, thoughts=tags, structured_outputs=constraint
        )
        return inputs.prepare([5], params, "r").group.thoughts

    assert thoughts() == tags and thoughts(regex="a+", thoughts=tags) == tags
    assert thoughts(regex="a+") is None
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    with pytest.raises(ValidationError, match=r"thinking_token_budget=5.*structural_tag"):
        thoughts(structural_tag=tag)


def test_long_lists_are_not_checked_in_the_event_loop() -> None:
    assert InputProcessor.is_quick([5], SamplingParams(stop_token_ids=[1, 2]))
    assert not InputProcessor.is_quick([5] * 5000, SamplingParams())
    assert not InputProcessor.is_quick([5], SamplingParams(allowed_token_ids=[1] * 5000))
    assert not InputProcessor.is_quick([5], SamplingParams(bad_words=["x"]))


class Letters:
    """A tokenizer of one token a letter; it notes how long the texts were."""

    eos_token_id, vocab_size = 200, 300

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return [ord(one) for one in text]


def test_tokens_that_the_model_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    inputs = processor(Letters())
    assert "300 tokens" in caplog.text and "the model 100" in caplog.text
    with pytest.raises(ValidationError, match="122") as caught:
        inputs.prepare("az", SamplingParams(), "r")
    assert caught.value.field == "prompt"
    prepared = inputs.prepare("AZ", SamplingParams(bad_words=["z", "B"], min_tokens=1), "r")
    assert prepared.group.bad_words == [[66], [32, 66]]
    assert prepared.group.stop_rule.end_token_ids == {2, 3}, "200 is no token of the model"


def test_a_text_that_cannot_fit_is_not_tokenised_to_its_end() -> None:
    tokenizer = Letters()
    with pytest.raises(ValidationError, match="1000000 characters") as caught:
        processor(tokenizer).prepare("A" * 1_000_000, SamplingParams(), "r")
    assert caught.value.field == "prompt" and max(tokenizer.lengths) <= 2**15


def test_a_long_text_of_few_tokens_fits() -> None:
    class Words(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.lengths.append(len(text))
            return [5] * len(text.split())

    tokenizer = Words()
    prepared = processor(tokenizer).prepare("a" * 200_000 + " b", SamplingParams(), "r")
    assert len(prepared.group.prompt_token_ids) == 2 and tokenizer.lengths[-1] == 200_002


def test_the_output_that_is_asked_for_is_that_of_all_sequences() -> None:
    asked = {(3, 5): 15, (3, None): 3, (1, 7): 7, (1, None): 1}
    for (n, most), tokens in asked.items():
        prepared = processor().prepare([5], SamplingParams(n=n, max_tokens=most), "r")
        assert prepared.group.num_output_asked == tokens


def test_a_search_wider_than_the_cap_is_refused_before_its_prompt_is_read() -> None:
    model: Any = SimpleNamespace(vocab_size=100, eos_token_ids=(2,), labels=(), images=None)
    inputs = InputProcessor(resolved_config(max_beam_width=2), model, None)
    with pytest.raises(ValidationError, match=r"beam_width=3 .*1 to 2, the setting max_beam_width"):
        inputs.prepare([], BeamSearchParams(3, 4), "r")
    for width in (1, 2):
        group = inputs.prepare([5], BeamSearchParams(width, 4), "r").group
        assert len(group.sequence_ids) == width


def test_a_deterministic_engine_seeds_by_the_prompt_and_shrinks_no_search() -> None:
    model: Any = SimpleNamespace(vocab_size=100, eos_token_ids=(2,), labels=(), images=None)

    def seeds(inputs: InputProcessor, prompt: list[int]) -> list[int]:
        return inputs.prepare(prompt, SamplingParams(n=2), "r").group.seeds

    usual = InputProcessor(resolved_config(), model, None)
    fixed = InputProcessor(resolved_config(deterministic=True), model, None)
    other = InputProcessor(resolved_config(deterministic=True, seed=1), model, None)
    assert seeds(fixed, [5, 6]) == seeds(fixed, [5, 6]) != seeds(fixed, [5, 7])
    assert seeds(fixed, [5, 6]) != seeds(other, [5, 6])
    assert seeds(usual, [5, 6]) != seeds(usual, [5, 6])
    search = BeamSearchParams(2, 4, shrink_under_pressure=True)
    assert usual.prepare([5], search, "r")
    with pytest.raises(ValidationError, match=r"shrink_under_pressure=True.*deterministic"):
        fixed.prepare([5], search, "r")
