"""Images in the messages of a body: taken where the model reads them, else refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ValidationError
from jaxserve.tokenization.message_text import IMAGE_PART
from server.protocol.anthropic_blocks import add_message
from server.protocol.chat import ChatCompletionRequest
from server.protocol.conversation import Conversation, PartCounter
from server.protocol.response_items import add_items

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


TEXT = {"type": "text", "text": "a"}
OF_CHAT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "eA=="}


def blocks(*content: Any) -> list[dict[str, Any]]:
    conversation = Conversation()
    add_message(conversation, {"role": "user", "content": [*content]}, "messages[0]", PartCounter())
    return conversation.messages


def items(*content: Any, role: str = "user") -> list[dict[str, Any]]:
    conversation = Conversation()
    add_items(conversation, [{"role": role, "content": [*content]}])
    return conversation.messages


def test_images_of_other_apis_become_those_of_chats() -> None:
    (message,) = blocks(TEXT, {"type": "image", "source": SOURCE}, TEXT)
    assert message["content"] == [TEXT, OF_CHAT, TEXT]
    part = {"type": "input_image", "image_url": OF_CHAT["image_url"]["url"], "file_id": None}
    assert items(part, TEXT) == [{"role": "user", "content": [OF_CHAT, TEXT]}]
    assert items(TEXT, TEXT) == blocks(TEXT, TEXT) == [{"role": "user", "content": "a\na"}]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"type": "file", "file_id": "x"}, "source.type"),
        (SOURCE | {"media_type": "image/png,x"}, "source.media_type"),
        (SOURCE | {"data": 5}, "source.data"),
        ({"type": "url"}, "source.url"),
        (None, "source"),
    ],
)
def test_sources_that_are_none(source: Any, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        blocks(TEXT, {"type": "image", "source": source})
    assert caught.value.field == f"messages[0].content[1].{field}"


def test_items_with_images_that_are_none() -> None:
    given = {"type": "input_image", "image_url": "data:,x"}
    for wrong, role, field in (
        (given | {"file_id": "file_1"}, "user", "file_id"),
        (given | {"image_url": {"url": "data:,x"}}, "user", "image_url"),
        (given, "system", "type"),
    ):
        with pytest.raises(ValidationError) as caught:
            items(wrong, role=role)
        assert caught.value.field == f"input[0].content[0].{field}"
