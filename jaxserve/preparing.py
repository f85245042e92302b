"""Requests of an event loop are prepared in other threads, where that takes time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from jaxserve.client import EngineClient
from jaxserve.inputs import InputProcessor, Params, PreparedRequest, Prompt
from jaxserve.request import Queueing
from jaxserve.sampling_params import SamplingParams

GRAMMAR_THREADS = 2  # that check grammars of clients


class Preparing:
    """Prepares requests for one client; used by the event loop's thread.

    Args:
        client: who prepares them.

    Attributes:
        count: of requests that are being prepared in other threads.
    """

    def __init__(self, client: EngineClient):
        self._client = client
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "jaxserve-grammar")
        self.count = 0

    async def prepare(
        self, prompt: Prompt, params: Params, request_id: str, queueing: Queueing | None
    ) -> PreparedRequest:
        """As `EngineClient.prepare`."""
        work = (prompt, params, request_id, queueing)
        if InputProcessor.is_quick(prompt, params):
            # two changes of thread cost more than the work, the more the busier the engine is
            return self._client.prepare(*work)
        # a grammar may take seconds to check: texts are not tokenised behind it
        pool = self._grammar_threads if _has_grammar(params) else None
        self.count += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, self._client.prepare, *work)
        finally:
            self.count -= 1

    def close(self) -> None:
        """Begin with no further grammar; those that are checked are waited for by nobody."""
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)


def _has_grammar(params: Params) -> bool:
    return isinstance(params, SamplingParams) and params.structured_outputs is not None
