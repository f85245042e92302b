"""Calls a server with litellm: python litellm_calls.py URL."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from the web

import litellm

ASK = [{"role": "user", "content": "What is the sum of two and three?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def main(url: str) -> None:
    given = {
        "model": "hosted_vllm/tiny",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": ASK,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = litellm.completion(**given)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0
    pieces = litellm.completion(**given, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == text
    called = litellm.completion(**given | {"max_tokens": 100}, tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "add" and "a" in call.function.arguments
    vectors = litellm.embedding(
        model="hosted_vllm/tiny", input=["x", "y"], api_base=f"{url}/v1", api_key="none"
    )
    assert len(vectors.data) == 2
    message = litellm.completion(**given | {"model": "anthropic/tiny", "api_base": url})
    assert message.choices[0].message.content == text, "as a client of /v1/messages"
    try:
        litellm.completion(**given | {"temperature": -1})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a temperature of -1 was accepted")


if __name__ == "__main__":
    main(sys.argv[1])
    print("ok")
