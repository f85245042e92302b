"""Conversations that are none are refused with the name of the argument."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.client.chat_prompts import chat_prompts
from jaxserve.errors import ValidationError
from jaxserve.tokenization.tokenizer import Tokenizer

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "messages",
    ["text", ["text"], None, 5, USER, [5], [USER, "text"], [[USER], "text"], [[USER, 5]]],
)
def test_what_is_no_conversation_is_refused_whole(messages: Any) -> None:
    tokenizer: Any = None  # which is not reached
    with pytest.raises(ValidationError, match="a list of messages such as") as caught:
        chat_prompts(tokenizer, messages, None, chat_template=None, keep_control_tokens=False)
    assert (caught.value.field, caught.value.value) == ("messages", messages)


def test_templates_get_contents_as_text_or_as_parts() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    part = {"type": "text", "text": "b"}
    messages = [USER, {"role": "user", "content": [part]}]

    def rendered(content_format: str, **more: Any) -> Any:
        (prompt,) = chat_prompts(
            Tokenizer(bundled_model_path()),
            messages,
            None,
            chat_template=template,
            keep_control_tokens=False,
            add_generation_prompt=False,
            continue_final_message=False,
            content_format=content_format,
            **more,
        )
        return prompt

    assert rendered("auto")["prompt"] == rendered("string")["prompt"] == "ab"
    assert rendered("openai")["prompt"] == str([part | {"text": "a"}]) + str([part])
    with pytest.raises(ValidationError, match="chat_template_content_format='text'"):
        rendered("text")
    bare = rendered("auto")["prompt_token_ids"]
    assert rendered("auto", add_special_tokens=True)["prompt_token_ids"][-len(bare) :] == bare
