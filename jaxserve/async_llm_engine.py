"""`AsyncLLMEngine`: vLLM's asynchronous engine, over `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from jaxserve.async_engine import AsyncEngine
from jaxserve.client.input_processor import Params, Prompt
from jaxserve.config.engine_args import EngineArgs
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.params.lora_request import LoRARequest, refuse_adapter
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.tokenization.tokenizer import Tokenizer


class AsyncLLMEngine:
    """Serves requests from one event loop; every call waits until the engine is ready.

    Args:
        engine: what does it.
    """

    def __init__(self, engine: AsyncEngine):
        self._engine = engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLMEngine:
        """Begin to load; raises ValidationError for a setting that cannot be served."""
        return cls(AsyncEngine(engine_args.create_engine_config()))

    @property
    def is_running(self) -> bool:
        """Whether it is ready and has not ended."""
        return self._engine.is_ready

    @property
    def errored(self) -> bool:
        """Whether an error has ended it."""
        return self._engine.is_dead and self._engine.error is not None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come; leaving the loop aborts it.

        Raises:
            ValidationError: a prompt or parameter that cannot be served.
            EngineDeadError: the engine has ended.
        """
        refuse_adapter(lora_request)
        await self._engine.wait_ready()
        outputs = self._engine.generate(prompt, sampling_params, request_id, priority=priority)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of one prompt, once."""
        async for output in self.generate(prompt, pooling_params, request_id):
            if output.finished:
                yield PoolingRequestOutput.of(output)

    async def abort(self, request_id: str) -> None:
        """End a request, if it is live."""
        await self._engine.abort(request_id)

    async def check_health(self) -> None:
        """Raises EngineDeadError once the engine has ended."""
        if self._engine.is_dead:
            error = self._engine.error
            raise EngineDeadError(str(error or "the engine was shut down")) from error

    async def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ValidationError where the engine has none."""
        await self._engine.wait_ready()
        return self._engine.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Have nothing found any more that was computed so far."""
        await self._engine.wait_ready()
        await self._engine.reset_prefix_cache()
        return True

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Raises ValidationError: there are no adapters yet."""
        refuse_adapter(lora_request)
        return False

    async def remove_lora(self, lora_id: int) -> bool:
        """False: there are no adapters yet, so none of this number."""
        return False

    def shutdown(self) -> asyncio.Task[None]:
        """Begin to end the engine and every request; the task that comes back has ended them."""
        self._engine.begin_shutdown()
        self._ending = asyncio.create_task(asyncio.to_thread(self._engine.client.join))
        return self._ending
