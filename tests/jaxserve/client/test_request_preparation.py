"""Slow requests are prepared beside the event loop, and no grammar keeps others waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from jaxserve.client.request_preparation import RequestPreparation
from jaxserve.errors import ValidationError


class Inputs:
    """Texts of prompts are prepared at once, but for those that are in `tried`."""

    def __init__(self) -> None:
        self.tried: dict[str, Future[None]] = {}
        self.threads: list[str] = []
        self.fetched: list[str] = []

    @property
    def prompts(self) -> Inputs:
        return self

    def is_quick(self, prompt: Any, params: Any) -> bool:
        return prompt == "quick"

    def begin_check(self, params: Any, client: str) -> Future[None] | None:
        return self.tried.get(params)

    def begin_images(self, prompt: Any) -> Future[Any] | None:
        if not isinstance(prompt, dict):
            return None
        self.fetched.append(prompt["multi_modal_data"])
        done: Future[Any] = Future()
        done.set_result("prompt with pixels")
        return done

    def check_beside_images(self, prompt: Any, params: Any, queueing: Any) -> None:
        if params == "wrong":
            raise ValidationError("temperature", -1, "a number >= 0")

    def prepare(self, prompt: Any, params: Any, *more: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return prompt


def test_many_that_are_tried_take_no_thread() -> None:
    inputs: Any = Inputs()
    preparing = RequestPreparation()

    def prepare(prompt: str, params: str = "") -> Any:
        return preparing.prepare(inputs, prompt, params, "id", None)  # type: ignore[arg-type]

    async def main() -> None:
        inputs.tried = {f"slow {number}": Future() for number in range(100)}
        slow = [asyncio.ensure_future(prepare("p", params)) for params in inputs.tried]
        while not all(future for future in inputs.tried.values()) or preparing.count < 100:
            await asyncio.sleep(0)
        assert await prepare("quick") == "quick"
        assert await asyncio.wait_for(prepare("text"), 20) == "text"
        assert len(inputs.threads) == 2 and inputs.threads[0] == "MainThread" != inputs.threads[1]
        one, other, *rest = slow
        first, second = inputs.tried["slow 0"], inputs.tried["slow 1"]
        first.set_result(None)
        second.set_exception(ValidationError("json", 1, "what compiles"))
        assert await one == "p"
        with pytest.raises(ValidationError, match="what compiles"):
            await other
        for task in rest:
            task.cancel()
        await asyncio.wait(rest)
        assert preparing.count == 0
        assert all(future.done() for future in inputs.tried.values()), "what is dropped is told so"

    asyncio.run(main())


def test_no_image_is_fetched_for_a_request_that_is_refused_without_it() -> None:
    inputs: Any = Inputs()

    async def main() -> None:
        preparing, prompt = RequestPreparation(), {"multi_modal_data": "url"}
        for params in ("right", "wrong"):
            done = preparing.prepare(inputs, prompt, params, "id", None)  # type: ignore[arg-type]
            if params == "right":
                assert await done == "prompt with pixels"
            else:
                with pytest.raises(ValidationError, match="temperature"):
                    await done

    asyncio.run(main())
    assert inputs.fetched == ["url"]
