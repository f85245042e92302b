"""Prepares an event loop's requests, in other threads where that takes time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from jaxserve.client.images import KEY as MULTI_MODAL
from jaxserve.client.input_processor import InputProcessor, Params, PreparedRequest
from jaxserve.client.prompt_reader import Prompt
from jaxserve.request.queueing import Queueing


class RequestPreparation:
    """Prepares requests of one event loop; used by its thread.

    Attributes:
        count: of requests that other threads prepare now.
    """

    def __init__(self) -> None:
        self.count = 0

    async def prepare(
        self,
        inputs: InputProcessor,
        prompt: Prompt,
        params: Params,
        request_id: str,
        queueing: Queueing | None,
    ) -> PreparedRequest:
        """Like `InputProcessor.prepare`, without blocking the loop."""
        work = (prompt, params, request_id, queueing)
        if inputs.is_quick(prompt, params):
            # two changes of thread cost more than the work, the more the busier the engine is
            return inputs.prepare(*work)
        self.count += 1
        try:
            client = "" if queueing is None else queueing.client
            tried = await asyncio.to_thread(inputs.begin_check, params, client)
            if tried is not None:  # no thread waits for it, and nothing waits behind it
                await asyncio.wrap_future(tried)
            if isinstance(prompt, Mapping) and prompt.get(MULTI_MODAL) is not None:
                await asyncio.to_thread(inputs.check_beside_images, prompt, params, queueing)
            images = inputs.prompts.begin_images(prompt)
            if images is not None:
                prompt = await asyncio.wrap_future(images)
            return await asyncio.to_thread(inputs.prepare, prompt, params, request_id, queueing)
        finally:
            self.count -= 1

    async def with_places(
        self, inputs: InputProcessor, tokens: list[int], images: Mapping[str, Any]
    ) -> list[int]:
        """Token ids in which an image's token stands as often as the image takes places.

        They may be more than the context has. `images` is of a prompt's mapping.

        Raises:
            ValidationError: other images than tokens, or one that cannot be read.
        """
        self.count += 1
        try:
            inputs.prompts.check_images(tokens, images)
            reading: Future[Any] | None = inputs.prompts.begin_images(images)
            if reading is not None:
                images = await asyncio.wrap_future(reading)
            return inputs.prompts.with_places(tokens, images)
        finally:
            self.count -= 1
