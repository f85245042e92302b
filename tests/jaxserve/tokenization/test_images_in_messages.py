"""Images in messages: taken out of them, and where chat templates see them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.client.chat_prompts import chat_prompts, taken_apart
from jaxserve.client.images import ImageUrl
from jaxserve.errors import ValidationError
from jaxserve.tokenization import Tokenizer
from jaxserve.tokenization.message_text import IMAGE_PART, without_images
from tests.image_models import IMAGE, save_tokenizer

URL = "data:image/png;base64,AAAA"
PART = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def prompts(tokenizer: Tokenizer, messages: Any, **how: Any) -> list[Any]:
    how = {"add_generation_prompt": True, "continue_final_message": False} | how
    return chat_prompts(
        tokenizer, messages, None, chat_template=None, keep_control_tokens=False, **how
    )


def test_images_are_taken_out_in_their_order() -> None:
    found: list[Any] = []
    own = object()
    content = ["a", PART, {"type": "text", "text": "b"}, {"type": "image", "image": own}]
    left = without_images(content, "m", found)
    assert found == [URL, own] and left == ["a", IMAGE_PART, content[2], IMAGE_PART]
    messages, images = taken_apart([*said(PART, "x"), {"role": "user", "content": "<image>"}])
    assert images == [ImageUrl(URL)] and messages[1]["content"] == "<image>"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url"}, "m[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "m[0].image_url.url"),
        ({"type": "image"}, "m[0].image"),
        ({"type": "image", "image": "a.png"}, "m[0].image"),
    ],
)
def test_images_that_are_none(part: Any, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        without_images([part], "m", [])
    assert caught.value.field == field


def test_a_template_places_images_and_text_does_not(tokenizer: Tokenizer) -> None:
    (prompt,) = prompts(tokenizer, said("<image> is it?", PART, PART))
    assert prompt["prompt"] == "USER: <image>\n<image>\n<image> is it? ASSISTANT:"
    assert prompt["prompt_token_ids"].count(IMAGE) == 2, "the user's own is text"
    assert prompt["multi_modal_data"] == {"image": [ImageUrl(URL)] * 2}
    (plain,) = prompts(tokenizer, [{"role": "user", "content": "hello"}])
    assert plain["prompt"] == "USER: hello ASSISTANT:" and "multi_modal_data" not in plain


def test_a_template_that_asks_for_text_gets_text(tokenizer: Tokenizer) -> None:
    asks = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    how: Any = {"add_generation_prompt": False, "continue_final_message": False}
    how |= {"chat_template": asks, "mark": False}
    both = [{"role": "user", "content": "a"}, {"role": "user", "content": ["b", IMAGE_PART, "c"]}]
    assert tokenizer.render_chat(both, **how) == "ab<image>c"
    assert tokenizer.render_chat(said("a", "b"), **how) == "a\nb"
