"""An agent of openai-agents with a calculator, two turns: python agents_loop.py URL."""

from __future__ import annotations

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # else traces are sent to api.openai.com

asked: list[tuple[int, int]] = []


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    asked.append((a, b))
    return a * b


def main(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asked.clear()
        agent = Agent(
            name="calculator",
            instructions="You are a helpful assistant.",
            tools=[multiply],
            model=kind("tiny", client),
            model_settings=ModelSettings(temperature=0),
        )
        first = Runner.run_sync(agent, "What is 1234 * 567?", max_turns=2)
        assert "699678" in first.final_output, first.final_output
        question = {"role": "user", "content": "Multiply 24 by 310."}
        second = Runner.run_sync(agent, [*first.to_input_list(), question], max_turns=2)
        assert "7440" in second.final_output, second.final_output
        assert asked == [(1234, 567), (24, 310)], asked


if __name__ == "__main__":
    main(sys.argv[1])
    print("ok")
