"""`LLMEngine`: vLLM's engine whose steps the caller runs, one at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxserve.client.input_processor import Params, Prompt
from jaxserve.errors import ValidationError
from jaxserve.llm import LLM
from jaxserve.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.params.lora_request import LoRARequest
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.request.queueing import Queueing
from jaxserve.tokenization.tokenizer import Tokenizer

Output = RequestOutput | PoolingRequestOutput


class LLMEngine(LLM):
    """An `LLM` whose requests are added under ids of the caller's, and whose steps the caller runs.

    `LLMEngine.from_engine_args(EngineArgs(...))` makes one.
    """

    def __init__(self, model: str, **settings: Any):
        super().__init__(model, **settings)
        self._unfinished: dict[str, bool] = {}  # whether it asks for a vector, by id
        self._failures: dict[str, Exception] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return self.get_tokenizer()

    def _check_ready(self, lora_request: LoRARequest | None) -> None:
        """Refuse calls that run to their end while there are requests that `step` runs."""
        super()._check_ready(lora_request)
        if self._unfinished:
            allowed = "none: run step until has_unfinished_requests is false"
            raise ValidationError("unfinished requests", len(self._unfinished), allowed)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request. Returns its id.

        Args:
            request_id: of the caller's; no two unfinished requests have the same.
            prompt: as of `LLM.generate`.
            params: `SamplingParams` or `PoolingParams`.
            arrival_time: seconds of `time.time()`, not in the future; None: now.
            lora_request: None.
            tokenization_kwargs: as of `LLM.generate`.
            priority: the smallest goes first, with `scheduling_policy="priority"`.

        Raises:
            ValidationError: a request that cannot be served.
        """
        super()._check_ready(lora_request)
        if enqueued := self._requests.enqueued:
            allowed = "none: call wait_for_completion first"
            raise ValidationError("enqueued requests", len(enqueued), allowed)
        if not isinstance(request_id, str) or request_id in self._unfinished:
            raise ValidationError("request_id", request_id, "text that no unfinished request has")
        waited = 0.0 if arrival_time is None else time.time() - arrival_time
        if waited < 0:
            raise ValidationError("arrival_time", arrival_time, "a time.time() that is past")
        queueing = Queueing(time.monotonic() - waited, priority)
        tokens = self._tokenization(tokenization_kwargs).apply(prompt, self.client)
        prepared = self.client.prepare(tokens, params, request_id, queueing)
        self.client.admit([prepared])
        self.client.add(prepared)
        self._unfinished[request_id] = isinstance(params, PoolingParams)
        return request_id

    def step(self) -> list[Output]:
        """Run one step. Returns the outputs that it brought.

        Raises:
            ValidationError: a request that a feature has refused; the others go on.
            EngineDeadError: the engine has ended.
        """
        if self._failures:
            request_id, error = self._failures.popitem()
            self._unfinished.pop(request_id, None)
            raise error
        found: list[Output] = []
        for output in self.client.outputs():
            is_vector = self._unfinished.get(output.request_id, False)
            if output.finished:
                self._unfinished.pop(output.request_id, None)
            found.append(PoolingRequestOutput.of(output) if is_vector else output)
        self._failures |= self.client.take_failures()
        return found

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests; ids that are not live are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if self._unfinished.pop(request_id, None) is not None:
                self.client.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished)
