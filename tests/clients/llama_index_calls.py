"""Calls a server with llama-index, as a chat model and as responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from asked import ASK, PIXEL, Sum, add, run
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

CHAT = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content=ASK)]
TOOL = FunctionTool.from_defaults(add)


def connection(url: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 2048,
    }


def chats(url: str, **given: Any) -> OpenAILike:
    return OpenAILike(**connection(url) | {"max_tokens": 100, "temperature": 0} | given)


def plain(url: str) -> None:
    responses = OpenAILikeResponses(**connection(url), max_output_tokens=100, temperature=0)
    for model in (chats(url), responses):
        whole = model.chat(CHAT).message.content
        *_, last = model.stream_chat(CHAT)
        assert whole and last.message.content == whole
        assert asyncio.run(model.achat(CHAT)).message.content == whole
    assert chats(url, is_chat_model=False).complete(ASK).text
    assert chats(url, logprobs=True, top_logprobs=1).chat(CHAT).logprobs


def tools(url: str) -> None:
    told = chats(url).chat_with_tools([TOOL], ASK, tool_required=True)
    assert chats(url).get_tool_calls_from_response(told)[0].tool_name == "add"


def typed(url: str) -> None:
    for native in (True, False):
        model = chats(url, should_use_structured_outputs=native).as_structured_llm(Sum)
        assert isinstance(model.complete(ASK).raw, Sum), native


def embeddings(url: str) -> None:
    model = OpenAILikeEmbedding(model_name="tiny", api_base=f"{url}/v1", api_key="none")
    assert model.get_text_embedding("x")


def a_picture(url: str) -> None:
    blocks = [TextBlock(text="What is it?"), ImageBlock(image=PIXEL, image_mimetype="image/png")]
    try:
        chats(url).chat([ChatMessage(role="user", blocks=blocks)])
    except openai.BadRequestError as error:
        assert "image" in str(error)
    else:
        raise AssertionError("a picture was accepted")


if __name__ == "__main__":
    run(plain, tools, typed, embeddings, a_picture)
