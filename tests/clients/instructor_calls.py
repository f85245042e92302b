"""Calls a server with instructor, in every mode of its clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from asked import MESSAGES, Sum, run
from instructor.core import IncompleteOutputException, InstructorRetryException

Mode = instructor.Mode
SURE = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON_SCHEMA,
    Mode.JSON_O1,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)
# nothing holds the model to the schema here, and this one does not know it
HOPED = (Mode.JSON, Mode.MD_JSON, Mode.PARALLEL_TOOLS)
ASKED: Any = {"model": "tiny", "response_model": Sum, "messages": MESSAGES, "max_tokens": 100}


def client(url: str, mode: Any, kind: Any = openai.OpenAI) -> Any:
    return instructor.from_openai(
        kind(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode
    )


def create(client: Any, **given: Any) -> Any:
    return client.chat.completions.create(**ASKED, max_retries=1, **given)


def modes(url: str) -> None:
    for mode in SURE:
        assert isinstance(create(client(url, mode), temperature=0), Sum), mode


def modes_that_the_model_must_know(url: str) -> None:
    for mode in HOPED:
        response_model: Any = Iterable[Sum] if mode is Mode.PARALLEL_TOOLS else Sum
        asked = ASKED | {"response_model": response_model}
        try:
            client(url, mode).chat.completions.create(**asked, max_retries=1)
        except InstructorRetryException as error:
            assert "Error code" not in str(error), error
        except IncompleteOutputException:
            pass


def modes_of_anthropic(url: str) -> None:
    plain = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    for mode in (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS):
        assert isinstance(create(instructor.from_anthropic(plain, mode=mode)), Sum), mode


def streams(url: str) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        *_, last = client(url, mode).chat.completions.create_partial(**ASKED, temperature=0)
        assert last.right is not None, mode


def others(url: str) -> None:
    found, raw = client(url, Mode.TOOLS).chat.completions.create_with_completion(**ASKED)
    assert isinstance(found, Sum) and raw.usage.completion_tokens > 0
    assert isinstance(asyncio.run(create(client(url, Mode.TOOLS, openai.AsyncOpenAI))), Sum)


if __name__ == "__main__":
    run(modes, modes_that_the_model_must_know, modes_of_anthropic, streams, others)
