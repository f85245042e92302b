"""An engine inside the command's own process, used without an event loop of one's own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxserve.config.engine_config import EngineConfig
from server.process_end import ended_by_ctrl_c

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.params.sampling_params import SamplingParams


class LocalEngine:
    """Streams text from an engine in this process; a context manager that ends the engine.

    Args:
        config: the engine's configuration.

    Raises:
        JaxServeError, CheckpointError: the model cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._runner = asyncio.Runner()
        self._count = 0
        print(f"loading {config.model} ...", file=sys.stderr, flush=True)
        with ended_by_ctrl_c():
            from jaxserve.async_engine import AsyncEngine

            self.engine: AsyncEngine = AsyncEngine(config)
            self._runner.run(self.engine.wait_ready())

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.run(self.engine.shutdown())
        self._runner.close()

    def stream(self, prompt: str | dict[str, Any], params: SamplingParams) -> Iterator[str]:
        """New text as it comes; abandoning the iterator aborts the request.

        Raises:
            ValidationError: a prompt or parameter that the engine refuses.
        """
        self._count += 1
        outputs: Any = self.engine.generate(prompt, params, f"local-{self._count}")

        async def following() -> Any:
            return await anext(outputs, None)

        try:
            while (output := self._runner.run(following())) is not None:
                yield output.outputs[0].text
        finally:
            self._runner.run(outputs.aclose())
