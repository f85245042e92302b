"""`LLMEngine`: vLLM's engine whose steps the caller runs, one at a time."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any, Self

from jaxserve.client.engine_calls import EngineCalls, OpenedEngine
from jaxserve.client.engine_client import LocalClient
from jaxserve.client.input_processor import Params
from jaxserve.client.prompt_reader import Prompt
from jaxserve.client.vllm_config import ModelNames, VllmNames
from jaxserve.config.engine_args import EngineArgs
from jaxserve.errors import ValidationError
from jaxserve.observability.engine_gauges import load_line
from jaxserve.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.params.lora_request import LoRARequest
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.request.queueing import Queueing
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Output = RequestOutput | PoolingRequestOutput


class LLMEngine(EngineCalls):
    """Requests are added under ids of the caller's, and the caller runs the steps.

    `LLMEngine.from_engine_args(EngineArgs(...))` makes one; `LLM.llm_engine` is that of an `LLM`.

    Args:
        opened: the engine.

    Attributes:
        vllm_config: what it was made with, under vLLM's names.
        engine_core: whose `shutdown` closes it.
    """

    def __init__(self, opened: OpenedEngine):
        super().__init__(opened)
        self.vllm_config = VllmNames.of(opened.plan.config, opened.plan.model_path)
        self.engine_core = EngineCore(self.client)
        self._failures: dict[str, Exception] = {}

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """An engine of vLLM's arguments.

        Args:
            engine_args: the arguments.
            usage_context: vLLM's, passed over.
            stat_loggers: None: `get_metrics` has the values.
            enable_multiprocessing: False: the engine is in this process.

        Raises:
            ValidationError: an argument that cannot be served.
        """
        if stat_loggers is not None:
            raise ValidationError("stat_loggers", stat_loggers, "None: get_metrics has the values")
        if enable_multiprocessing:
            raise ValidationError("enable_multiprocessing", True, "False, or an AsyncLLMEngine")
        return cls(OpenedEngine(**dataclasses.asdict(engine_args)))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.get_tokenizer()

    @property
    def model_config(self) -> ModelNames:
        """`vllm_config.model_config`."""
        return self.vllm_config.model_config

    def is_sleeping(self) -> bool:
        """Whether `wake_up` is needed before anything can be run."""
        return self._opened.sleeping.is_sleeping

    def reset_encoder_cache(self) -> None:
        """`reset_mm_cache`: there is one cache of images."""
        self.reset_mm_cache()

    def do_log_stats(self) -> None:
        """A line of the log: queues, pages and the steps so far."""
        logger.info(load_line(self.stats()))

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
        self._check_ready(lora_request)
        self._check_none_enqueued()
        if not isinstance(request_id, str) or request_id in self._opened.stepped:
            raise ValidationError("request_id", request_id, "text that no unfinished request has")
        waited = 0.0 if arrival_time is None else time.time() - arrival_time
        if waited < 0:
            raise ValidationError("arrival_time", arrival_time, "a time.time() that is past")
        queueing = Queueing(time.monotonic() - waited, priority)
        [tokens] = self._tokenised([prompt], tokenization_kwargs)
        prepared = self.client.prepare(tokens, params, request_id, queueing)
        self.client.admit([prepared])
        self.client.add(prepared)
        self._opened.stepped[request_id] = isinstance(params, PoolingParams)
        return request_id

    def step(self) -> list[Output]:
        """Run one step. Returns the outputs that it brought.

        Raises:
            ValidationError: a request that a feature has refused; the others go on. Or there are
                requests of `LLM.enqueue`, whose outputs `wait_for_completion` takes.
            EngineDeadError: the engine has ended.
        """
        self._check_none_enqueued()
        if self._failures:
            request_id, error = self._failures.popitem()
            self._opened.stepped.pop(request_id, None)
            raise error
        found: list[Output] = []
        for output in self.client.outputs():
            is_vector = self._opened.stepped.get(output.request_id, False)
            if output.finished:
                self._opened.stepped.pop(output.request_id, None)
            output.weights_version = self._opened.requests.weights_version
            found.append(PoolingRequestOutput.of(output) if is_vector else output)
        self._failures |= self.client.take_failures()
        return found

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests; ids that are not live are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._failures.pop(request_id, None)
            if self._opened.stepped.pop(request_id, None) is not None:
                self.client.abort(request_id)

    def _check_none_enqueued(self) -> None:
        if enqueued := self._opened.requests.enqueued:
            allowed = "none: call wait_for_completion first"
            raise ValidationError("enqueued requests", len(enqueued), allowed)

    def has_unfinished_requests(self) -> bool:
        return bool(self._opened.stepped)

    def get_num_unfinished_requests(self) -> int:
        return len(self._opened.stepped)


class EngineCore:
    """What vLLM's scripts end an engine by: `llm.llm_engine.engine_core.shutdown()`."""

    def __init__(self, client: LocalClient):
        self._client = client

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the engine; no request is waited for, whatever the `timeout`."""
        self._client.close()
