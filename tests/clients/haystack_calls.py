"""Calls a server with haystack, as chats and as responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from asked import ASK, PIXEL, Sum, run
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import Tool
from haystack.utils import Secret

CHAT = [ChatMessage.from_system("Be short."), ChatMessage.from_user(ASK)]
TOOL = Tool("add", "Add two numbers.", Sum.model_json_schema(), lambda left, right: left + right)


def connection(url: str) -> dict[str, Any]:
    return {
        "api_key": Secret.from_token("none"),
        "model": "tiny",
        "api_base_url": f"{url}/v1",
        "max_retries": 0,
    }


def chats(url: str, **given: Any) -> OpenAIChatGenerator:
    asked = {"max_tokens": 100, "temperature": 0} | given
    return OpenAIChatGenerator(**connection(url), generation_kwargs=asked)


def responses(url: str, **given: Any) -> OpenAIResponsesChatGenerator:
    asked = {"max_output_tokens": 100, "temperature": 0} | given
    return OpenAIResponsesChatGenerator(**connection(url), generation_kwargs=asked)


def plain(url: str) -> None:
    for kind in (chats, responses):
        pieces: list[Any] = []
        (whole,) = kind(url).run(CHAT)["replies"]
        (streamed,) = kind(url).run(CHAT, streaming_callback=pieces.append)["replies"]
        assert whole.text and whole.text == streamed.text == "".join(p.content for p in pieces)
        assert asyncio.run(kind(url).run_async(CHAT))["replies"][0].text == whole.text
    assert len(chats(url, n=2, temperature=1).run(CHAT)["replies"]) == 2
    assert chats(url, logprobs=True).run(CHAT)["replies"][0].meta["logprobs"]


def tools(url: str) -> None:
    for kind in (chats, responses):
        asked = kind(url, tool_choice="required", parallel_tool_calls=False)
        (told,) = asked.run(CHAT, tools=[TOOL])["replies"]
        assert told.tool_calls[0].tool_name == "add"
        result = ChatMessage.from_tool("3", origin=told.tool_calls[0])
        assert kind(url).run([*CHAT, told, result], tools=[TOOL])["replies"][0].text


def an_agent(url: str) -> None:
    asked = chats(url, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(chat_generator=asked, tools=[TOOL], exit_conditions=["add"])
    *_, last = agent.run([ChatMessage.from_user(ASK)])["messages"]
    assert last.tool_call_result.result.isdigit()


def typed(url: str) -> None:
    for asked in (chats(url, response_format=Sum), responses(url, text_format=Sum)):
        Sum.model_validate_json(asked.run(CHAT)["replies"][0].text)


def embeddings(url: str) -> None:
    assert OpenAITextEmbedder(**connection(url)).run("x")["embedding"]


def a_picture(url: str) -> None:
    picture = ImageContent(base64_image=PIXEL, mime_type="image/png")
    for kind in (chats, responses):
        try:
            kind(url).run([ChatMessage.from_user(content_parts=[picture])])
        except openai.BadRequestError as error:
            assert "image" in str(error)
        else:
            raise AssertionError("a picture was accepted")


if __name__ == "__main__":
    run(plain, tools, an_agent, typed, embeddings, a_picture)
