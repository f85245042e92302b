"""Calls a server with pydantic-ai, as chats and as responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asked import ASK, PIXEL, Sum, run
from pydantic_ai import Agent, BinaryContent, Embedder, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {"temperature": 0.0, "max_tokens": 100, "parallel_tool_calls": False}


def openai_provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


def each(check: Callable[[Any], Awaitable[Any]]) -> Callable[[str], None]:
    def both(url: str) -> None:
        for kind in (OpenAIChatModel, OpenAIResponsesModel):
            asyncio.run(check(kind("tiny", provider=openai_provider(url))))

    both.__name__ = check.__name__
    return both


def agent(model: Any, **given: Any) -> Any:
    return Agent(model, model_settings=SETTINGS, **given)


@each
async def plain(model: Any) -> None:
    told = await agent(model, instructions="Be short.").run(ASK)
    assert told.output and told.usage.output_tokens > 0
    async with agent(model, instructions="Be short.").run_stream(ASK) as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == told.output


@each
async def typed(model: Any) -> None:
    for kind in (Sum, ToolOutput(Sum, name="sum"), NativeOutput(Sum)):
        first = await agent(model, output_type=kind).run(ASK)
        again = await agent(model, output_type=kind).run(ASK, message_history=first.all_messages())
        assert isinstance(first.output, Sum) and isinstance(again.output, Sum)


@each
async def refused(model: Any) -> None:
    picture = BinaryContent(PIXEL.encode(), media_type="image/png")
    for prompt, words in (([picture], "image"), ("one " * 9000, "maximum context length")):
        try:
            await agent(model).run(prompt)
        except ModelHTTPError as error:
            assert error.status_code == 400 and words in str(error)
        else:
            raise AssertionError(f"{words} was accepted")


def embeddings(url: str) -> None:
    embedder = Embedder(OpenAIEmbeddingModel("tiny", provider=openai_provider(url)))
    assert len(asyncio.run(embedder.embed_documents(["x", "y"])).embeddings) == 2


if __name__ == "__main__":
    run(plain, typed, refused, embeddings)
