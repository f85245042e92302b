"""Images in the messages of a body: taken where the model reads them, else refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ValidationError
from jaxserve.tokenization.message_text import IMAGE_PART
from server.protocol.chat import ChatCompletionRequest

PART = {"type": "image_url", "image_url": {"url": "data:,x"}}


def body(*parts: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": [*parts]}]}
    )


def test_they_are_taken() -> None:
    found: list[str] = []
    (message,) = body("a", PART, PART).render_messages(found)
    assert found == ["data:,x"] * 2 and message["content"] == ["a", IMAGE_PART, IMAGE_PART]
    (message,) = body("a", "b").render_messages(found)
    assert message["content"] == "a\nb" and len(found) == 2


@pytest.mark.parametrize("part", [PART, IMAGE_PART, {"type": "image", "image": "data:,x"}])
def test_a_model_of_text_refuses_them(part: Any) -> None:
    with pytest.raises(ValidationError, match="reads text alone"):
        body("a", part).render_messages()


@pytest.mark.parametrize("part", [IMAGE_PART, {"type": "image", "image": "data:,x"}])
def test_images_that_only_code_has_are_refused(part: Any) -> None:
    with pytest.raises(ValidationError, match=r"messages\[0\].content\[1\].type='image'"):
        body("a", part).render_messages([])
