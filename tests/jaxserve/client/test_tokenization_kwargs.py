"""How `tokenization_kwargs` make tokens of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.client.tokenization_kwargs import Tokenization
from jaxserve.errors import ValidationError
from jaxserve.tokenization.tokenizer import Tokenizer

CONTEXT = 16
TEXT = "one two three"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model_path())


def test_text_is_cut_with_the_tokens_around_it_or_without(tokenizer: Tokenizer) -> None:
    whole, bare = tokenizer.encode(TEXT), tokenizer.encode(TEXT, add_special_tokens=False)

    def kept(**given: Any) -> list[int]:
        found: Any = Tokenization.of(given, CONTEXT).apply(TEXT, tokenizer)
        assert found["prompt"] == TEXT
        return found["prompt_token_ids"]

    assert kept(add_special_tokens=False) == bare
    assert kept(add_special_tokens=True) == whole
    assert kept(add_special_tokens=False, truncate_prompt_tokens=2) == bare[-2:]
    assert kept(add_special_tokens=False, truncation=True, max_length=2) == bare[-2:]
    right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert kept(add_special_tokens=False, **right) == bare[:2]
    assert kept(truncate_prompt_tokens=-1) == whole


def test_mappings_keep_what_else_they_say() -> None:
    cut = Tokenization.of({"truncate_prompt_tokens": 2}, CONTEXT)
    given = {"prompt_token_ids": [1, 2, 3], "cache_salt": "s"}
    assert cut.apply(given, None) == {"prompt_token_ids": [2, 3], "cache_salt": "s"}
    embeds = {"prompt_embeds": object()}
    assert cut.apply(embeds, None) is embeds
    assert Tokenization.of({"padding": False}, CONTEXT).apply(TEXT, None) is TEXT


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"do_lower_case": True}, "do_lower_case=True"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"truncate_prompt_tokens": 17}, "truncate_prompt_tokens=17"),
        ({"truncate_prompt_tokens": "2"}, "truncate_prompt_tokens='2'"),
        ({"truncation_side": "up"}, "truncation_side='up'"),
        ({"add_special_tokens": 1}, "add_special_tokens=1"),
        (["truncation"], "a mapping of"),
    ],
)
def test_what_is_refused(given: Any, field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        Tokenization.of(given, CONTEXT)
