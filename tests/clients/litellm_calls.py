"""Calls a server with litellm, as a hosted vLLM and as Anthropic's API."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from the web

import litellm
from asked import ASK, MESSAGES, PIXEL, Sum, run

TOOL = {"type": "function", "function": {"name": "add", "parameters": Sum.model_json_schema()}}
VLLM: Any = {"model": "hosted_vllm/tiny", "api_key": "none"}


def asked(url: str, **given: Any) -> dict[str, Any]:
    return {
        **VLLM,
        "api_base": f"{url}/v1",
        "messages": MESSAGES,
        "max_tokens": 100,
        "temperature": 0,
    } | given


def plain(url: str) -> None:
    whole = litellm.completion(**asked(url))
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(**asked(url), stream=True))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
    told = asyncio.run(litellm.acompletion(**asked(url)))
    assert told.choices[0].message.content == text
    message = litellm.completion(**asked(url, model="anthropic/tiny", api_base=url))
    assert message.choices[0].message.content == text, "as a client of /v1/messages"
    assert litellm.completion(**asked(url), logprobs=True).choices[0].logprobs.content


def tools_and_formats(url: str) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        given: Any = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        told = litellm.completion(**asked(url, **given))
        (call,) = told.choices[0].message.tool_calls
        chunks = list(litellm.completion(**asked(url, **given), stream=True))
        (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert streamed.function == call.function and call.function.name == "add"
        # litellm leaves out additionalProperties, so there may be more
        assert '"left":' in call.function.arguments
    told = litellm.completion(**asked(url), response_format=Sum)
    Sum.model_validate_json(told.choices[0].message.content)


def embeddings_and_responses(url: str) -> None:
    base = f"{url}/v1"
    assert len(litellm.embedding(input=["x", "y"], api_base=base, **VLLM).data) == 2
    assert litellm.responses(input=ASK, api_base=base, **VLLM).output[0].content[0].text


def ranks(url: str) -> None:
    """As vLLM's rerank, and in the shapes of Jina and Cohere."""
    found = []
    for provider, base in (("hosted_vllm", url), ("jina_ai", url), ("cohere", url)):
        base += "" if provider == "hosted_vllm" else "/v1/rerank"
        given: Any = {"query": "one", "documents": ["two", "one"], "top_n": 1}
        told = litellm.rerank(f"{provider}/tiny", api_base=base, api_key="none", **given)
        found += [one["index"] for one in told.results]
    assert found == [1, 1, 1]


def errors(url: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    many = [{"role": "user", "content": "one " * 9000}]
    for expected, given in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.BadRequestError, {"messages": [{"role": "user", "content": [picture]}]}),
        (litellm.ContextWindowExceededError, {"messages": many}),
        (litellm.NotFoundError, {"model": "hosted_vllm/other"}),
        (litellm.Timeout, {"timeout": 0.001}),
    ):
        try:
            litellm.completion(**asked(url, **given), num_retries=0)
        except expected:
            pass
        else:
            raise AssertionError(f"{given} was accepted")


if __name__ == "__main__":
    run(plain, tools_and_formats, embeddings_and_responses, ranks, errors)
