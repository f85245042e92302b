"""Calls a server with openai-agents, as chats and as responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from asked import ASK, PIXEL, Sum, add, run

set_tracing_disabled(True)
PLAIN = ModelSettings(temperature=0, max_tokens=100)
DEMANDED = PLAIN.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
TOOL = function_tool(add)


def each(check: Callable[[Any], Awaitable[Any]]) -> Callable[[str], None]:
    async def work(url: str) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                await check(kind("tiny", client))

    def both(url: str) -> None:
        asyncio.run(work(url))

    both.__name__ = check.__name__
    return both


def agent(model: Any, settings: ModelSettings = PLAIN, **given: Any) -> Agent:
    return Agent(name="a", model=model, model_settings=settings, **given)


@each
async def plain(model: Any) -> None:
    told = await Runner.run(agent(model, instructions="Be short."), ASK)
    assert told.final_output and told.context_wrapper.usage.output_tokens > 0
    streamed = Runner.run_streamed(agent(model, instructions="Be short."), ASK)
    assert "raw_response_event" in {event.type async for event in streamed.stream_events()}
    assert streamed.final_output == told.final_output


@each
async def a_loop_of_two_turns(model: Any) -> None:
    told = await Runner.run(agent(model, DEMANDED, tools=[TOOL]), ASK)
    kinds = [item.type for item in told.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds


@each
async def a_tool_whose_result_is_the_answer(model: Any) -> None:
    for choice in ("required", "add"):
        settings = DEMANDED.resolve(ModelSettings(tool_choice=choice))
        asked = agent(model, settings, tools=[TOOL], tool_use_behavior="stop_on_first_tool")
        assert 0 <= int((await Runner.run(asked, ASK)).final_output) <= 18


@each
async def typed(model: Any) -> None:
    told = await Runner.run(agent(model, output_type=Sum), ASK)
    assert isinstance(told.final_output, Sum)


@each
async def handed_over(model: Any) -> None:
    other = Agent(name="other", model=model, model_settings=PLAIN)
    told = await Runner.run(agent(model, DEMANDED, handoffs=[other]), ASK)
    assert told.last_agent.name == "other" and told.final_output


@each
async def a_session(model: Any) -> None:
    session = SQLiteSession("x")
    for _ in range(2):
        await Runner.run(agent(model, DEMANDED, tools=[TOOL]), ASK, session=session)
    assert len(await session.get_items()) == 8


@each
async def a_picture(model: Any) -> None:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
    try:
        await Runner.run(agent(model), [{"role": "user", "content": [picture]}])
    except openai.BadRequestError as error:
        assert "image" in str(error)
    else:
        raise AssertionError("a picture was accepted")


if __name__ == "__main__":
    run(
        plain,
        a_loop_of_two_turns,
        a_tool_whose_result_is_the_answer,
        typed,
        handed_over,
        a_session,
        a_picture,
    )
