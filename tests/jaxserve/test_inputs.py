"""From prompts and parameters to requests, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import EngineConfig, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.inputs import InputProcessor


def processor(tokenizer: Any = None) -> InputProcessor:
    model: Any = SimpleNamespace(vocab_size=100, eos_token_ids=(2, 3))
    return InputProcessor(EngineConfig(model="m", max_model_len=16), model, tokenizer)


def test_the_tokenizers_end_token_ends_a_text_too() -> None:
    tokenizer = SimpleNamespace(eos_token_id=7)

    def ends(inputs: InputProcessor, **options: Any) -> frozenset[int]:
        prepared = inputs.prepare([5], SamplingParams(**options), "r")
        return prepared.sequences[0].stop_rule.end_token_ids

    assert ends(processor(tokenizer)) == {2, 3, 7}
    assert ends(processor(SimpleNamespace(eos_token_id=None))) == {2, 3}
    assert ends(processor()) == {2, 3}
    assert ends(processor(tokenizer), ignore_eos=True) == frozenset()


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": 1}}, "prompt['multi_modal_data']"),
        ({"prompt": [5]}, "prompt"),
        ({"prompt_token_ids": None}, "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({}, "prompt"),
        (None, "prompt_token_ids"),
        (b"abc", "prompt_token_ids"),
    ],
)
def test_what_is_no_prompt_is_named(prompt: Any, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        processor().prepare(prompt, SamplingParams(), "r")
    assert caught.value.field == named


def test_keys_of_a_prompt_that_ask_for_nothing_are_accepted() -> None:
    prompt = {"prompt": "", "prompt_token_ids": [5, 6], "multi_modal_data": None}
    prepared = processor().prepare(prompt, SamplingParams(), "r")
    assert (prepared.prompt, prepared.prompt_token_ids) == ("", [5, 6])


def test_parameters_must_leave_a_token_to_sample() -> None:
    inputs = processor()
    inputs.prepare([5], SamplingParams(allowed_token_ids=[2, 3]), "r")
    for ignore_eos in (False, True):
        params = SamplingParams(allowed_token_ids=[2, 3], min_tokens=1, ignore_eos=ignore_eos)
        with pytest.raises(ValidationError, match="allowed_token_ids"):
            inputs.prepare([5], params, "r")


def test_long_lists_are_not_checked_in_the_event_loop() -> None:
    assert InputProcessor.is_quick([5], SamplingParams(stop_token_ids=[1, 2]))
    assert not InputProcessor.is_quick([5] * 5000, SamplingParams())
    assert not InputProcessor.is_quick([5], SamplingParams(allowed_token_ids=[1] * 5000))
    assert not InputProcessor.is_quick([5], SamplingParams(bad_words=["x"]))
