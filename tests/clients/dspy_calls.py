"""Calls a server with dspy, as a hosted vLLM."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from the web

import dspy
from asked import ASK, PIXEL, Sum, run


class Served(dspy.LM):
    """dspy believes that a model it does not know has neither schemas nor tools."""

    supports_response_schema = True
    supports_function_calling = True
    supported_params = frozenset({"response_format", "tools", "tool_choice", "logprobs"})


class Answer(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    answer: Sum = dspy.OutputField()


def model(url: str, kind: type[dspy.LM] = Served, **given: Any) -> dspy.LM:
    settings = {"max_tokens": 100, "temperature": 0.0, "cache": False, "num_retries": 0} | given
    return kind("hosted_vllm/tiny", api_base=f"{url}/v1", api_key="none", **settings)


def plain(url: str) -> None:
    (text,) = model(url, dspy.LM)(ASK)
    assert text and len(model(url, dspy.LM, n=2, temperature=1.0)(ASK)) == 2


def typed(url: str) -> None:
    with dspy.context(lm=model(url), adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Answer)(question=ASK).answer, Sum)
        assert isinstance(asyncio.run(dspy.Predict(Answer).acall(question=ASK)).answer, Sum)


def refused(url: str) -> None:
    with dspy.context(lm=model(url), adapter=dspy.ChatAdapter()):
        picture = dspy.Image(f"data:image/png;base64,{PIXEL}")
        for call, words in (
            (lambda: dspy.Predict("image: dspy.Image -> word")(image=picture), "image_url"),
            (lambda: model(url, dspy.LM, temperature=-1.0)(ASK), "temperature"),
        ):
            try:
                call()
            except Exception as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{words} was accepted")


if __name__ == "__main__":
    run(plain, typed, refused)
