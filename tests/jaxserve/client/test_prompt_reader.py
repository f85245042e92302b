"""Prompts become token ids and the places of arrays, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.boundary.prompt_spans import NO_ID, PromptSpan
from jaxserve.client.input_processor import InputProcessor
from jaxserve.errors import ValidationError
from tests.jaxserve.client.test_input_processor import processor
from tests.resolved_config import resolved_config


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": 1}}, "multi_modal_data.image"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"audio": 1}}, "multi_modal_data"),
        ({"prompt": [5]}, "prompt"),
        ({"prompt_token_ids": [5], "cache_salt": ""}, "cache_salt"),
        ({"prompt_token_ids": [5], "cache_salt": 7}, "cache_salt"),
        ({"prompt_token_ids": None}, "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({}, "prompt"),
        (None, "prompt"),
        (b"abc", "prompt"),
    ],
)
def test_what_is_no_prompt_is_named(prompt: Any, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        processor().prepare(prompt, SamplingParams(), "r")
    assert caught.value.field == named


def test_clients_know_that_a_prompt_is_too_long_by_its_words() -> None:
    # the first of langchain and Anthropic's clients; the others of litellm, pydantic-ai
    # and what else reads vLLM's errors
    words = (
        "prompt is too long",
        r"This model's maximum context length is 16 tokens",
        r"your prompt contains at least 16 input tokens",
        r"Please reduce the length of the input prompt\.",
    )
    with pytest.raises(ValidationError, match=".*".join(words)):
        processor().prepare([5] * 16, SamplingParams(), "r")


def embedding(prompt: Any, **params: Any) -> Any:
    model: Any = SimpleNamespace(
        vocab_size=100, eos_token_ids=(2, 3), hidden_size=2, labels=(), images=None
    )
    config = resolved_config(max_model_len=16, enable_prompt_embeds=True)
    return InputProcessor(config, model, None).prepare(prompt, SamplingParams(**params), "r").group


ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_embeddings_take_the_places_of_token_ids() -> None:
    ids = [5, 6, 7, 8, 9]
    group = embedding(
        {"prompt_token_ids": ids, "prompt_embeds": [(1, ROWS[:1]), (np.int64(2), ROWS[1:])]}
    )
    assert group.prompt_token_ids == [5, NO_ID, NO_ID, NO_ID, 9] and ids == [5, 6, 7, 8, 9]
    assert group.spans == [
        PromptSpan("prompt_embeds", 1, 1, (1, 2), ROWS[:1].tobytes()),
        PromptSpan("prompt_embeds", 2, 2, (2, 2), ROWS[1:].tobytes()),
    ]
    whole = embedding({"prompt_embeds": ROWS.astype(np.float64)})
    assert whole.prompt_token_ids == [NO_ID] * 3
    assert whole.spans == [PromptSpan("prompt_embeds", 0, 3, (3, 2), ROWS.tobytes())]
    assert not InputProcessor.is_quick(
        {"prompt_token_ids": ids, "prompt_embeds": [(1, ROWS)]}, SamplingParams()
    )


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([(3, ROWS)], "3 places from 3 on.*of the 5 tokens"),
        ([(-1, ROWS)], "3 places from -1 on"),
        ([(0, ROWS), (2, ROWS)], "3 places from 2 on.*no other span has"),
        ([(2, ROWS), (0, ROWS)], "3 places from 0 on.*no other span has"),
        ([(0, ROWS[:0])], "0 places from 0 on.*one or more"),
        ([ROWS], "a list of ndarray.*pairs"),
        ([(1.0, ROWS)], "pairs"),
        ([(1, ROWS[:, :1])], r"\[3, 1\].*\[tokens, 2\]"),
    ],
)
def test_spans_that_are_refused(spans: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=f"prompt_embeds.*{told}"):
        embedding({"prompt_token_ids": [5] * 5, "prompt_embeds": spans})


def test_what_is_said_of_token_ids_needs_some() -> None:
    asked = {"prompt_logprobs": 0, "repetition_penalty": 2.0}
    embedding({"prompt_token_ids": [5] * 4, "prompt_embeds": [(1, ROWS)]}, **asked)
    with pytest.raises(ValidationError, match="prompt_logprobs"):
        embedding({"prompt_token_ids": [5] * 3, "prompt_embeds": [(0, ROWS)]}, **asked)


def test_keys_of_a_prompt_that_ask_for_nothing_are_accepted() -> None:
    prompt = {"prompt": "", "prompt_token_ids": [5, 6], "multi_modal_data": None}
    prepared = processor().prepare(prompt, SamplingParams(), "r")
    assert (prepared.prompt, prepared.group.prompt_token_ids) == ("", [5, 6])
