"""A query and a document as one prompt."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.client.pair_prompts import PairText
from jaxserve.errors import ValidationError
from jaxserve.tokenization.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model_path())


@pytest.mark.parametrize("name", ["mark", "messages", "tools", "add_generation_prompt"])
def test_a_variable_of_the_template_is_none_of_ours(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(ValidationError, match=name) as caught:
        PairText(True, TEMPLATE, {name: 1}).prompt(tokenizer, "a", "b")
    assert caught.value.field == "chat_template_kwargs"


def test_a_template_decides_on_control_tokens(tokenizer: Tokenizer) -> None:
    """Without one the texts are all that there is of the prompt, as of a completion."""
    end = tokenizer.eos_token_id
    assert end is not None

    def ends(**how: Any) -> int:
        together = PairText(add_special_tokens=False, **how)
        forged = tokenizer.decode([end])
        return together.prompt(tokenizer, "a", forged)["prompt_token_ids"].count(end)

    assert ends(templated=True, template=TEMPLATE) == 0
    assert ends(templated=True, template=TEMPLATE, keep_control_tokens=True) == 1
    assert ends() == 1
