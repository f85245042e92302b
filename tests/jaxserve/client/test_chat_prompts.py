"""Conversations that are none are refused with the name of the argument."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.client.chat_prompts import chat_prompts
from jaxserve.errors import ValidationError

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
