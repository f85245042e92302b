"""The sampling fields of requests are those of SamplingParams."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pydantic
import pytest

from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.params.sampling_params import TOKEN_FIELDS, SamplingParams
from server.protocol import requests
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.unsupported import NEUTRAL, REFUSED

OTHER_NAMES = {"max_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind"}
OTHER_NAMES |= {
    "structured_outputs",
    "thoughts",
    "extra_args",
    "flat_logprobs",
    "logits_processors",
}  # goes with few others; of the server
VALUES: dict[str, Any] = {
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [4],
    "bad_words": ["bad"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [4, 5],
    "logprob_token_ids": [6],
    "epsilon_cutoff": 0.1,
    "stream_interval": 4,
    "thinking_token_budget": 9,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "skip_reading_prefix_cache": True,
}
BODIES = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user"}]},
}


def test_a_value_is_known_of_every_field() -> None:
    assert {field.name for field in fields(SamplingParams)} - OTHER_NAMES == VALUES.keys()


@pytest.mark.parametrize("model", BODIES)
def test_no_field_is_called_unsupported(model: Any) -> None:
    # other endpoints refuse them
    of_chat = {"tools", "tool_choice", "chat_template", "kv_transfer_params", "mm_processor_kwargs"}
    others = NEUTRAL.keys() | REFUSED.keys()
    assert not (others - of_chat - {"messages"}) & model.model_fields.keys()


def test_fields_with_token_ids_are_named() -> None:
    types = get_type_hints(SamplingParams)
    having = [f.name for f in fields(SamplingParams) if "[int" in str(types[f.name])]
    assert sorted(having) == sorted(TOKEN_FIELDS)


@pytest.mark.parametrize("model", BODIES)
def test_every_field_reaches_the_parameters(model: Any) -> None:
    body = model.model_validate(BODIES[model] | VALUES)
    assert not body.model_extra
    params = body.sampling_params(max_tokens=9, logprobs=1, prompt_logprobs=None)
    expected = VALUES | {"logit_bias": {5: 1.0}, "max_tokens": 9, "logprobs": None}
    expected["repetition_detection"] = RepetitionDetectionParams(3, 0, 2)
    assert {name: getattr(params, name) for name in expected} == expected
    nothing = model.model_validate(BODIES[model] | dict.fromkeys(VALUES))
    plain = nothing.sampling_params(max_tokens=16, logprobs=None, prompt_logprobs=None)
    assert plain == SamplingParams(output_kind=plain.output_kind)


@pytest.mark.parametrize("name", VALUES)
def test_types_are_strict(name: str) -> None:
    wrong = {"a": "b"} if not isinstance(VALUES[name], dict) else ["a"]
    with pytest.raises(pydantic.ValidationError, match=name):
        CompletionRequest.model_validate({"prompt": "a", name: wrong})


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["a"]}},
        {"response_format": {"type": "json_object"}},
        {},
    ],
)
def test_a_search_has_the_constraint_of_either_field(fields: dict[str, Any]) -> None:
    given = {"prompt": "a", "use_beam_search": True, "n": 2} | fields
    body = CompletionRequest.model_validate(given)
    body.check()
    params = body.sampling_params(max_tokens=9, logprobs=None, prompt_logprobs=None)
    assert isinstance(params, BeamSearchParams) and params.beam_width == 2
    asked = params.structured_outputs
    assert (asked is None) == (not fields)
    if asked is not None:
        assert asked.choice == ["a"] or asked.json_object


def test_a_prompt_has_the_fields_of_its_extra_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "EXTRA_KEYS", ("cache_salt", "priority", "timeout", "adapter"))
    body = CompletionRequest(prompt="a", cache_salt="mine", priority=2)
    assert body.prompt_extras() == {"cache_salt": "mine", "priority": 2}
