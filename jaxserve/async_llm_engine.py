"""`AsyncLLMEngine`: vLLM's asynchronous engine, over `AsyncEngine`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.async_engine import AsyncEngine
from jaxserve.boundary.messages import Action
from jaxserve.client.input_processor import Params
from jaxserve.client.prompt_reader import Prompt
from jaxserve.client.sleep import (
    ABORT,
    KEEP,
    MODES,
    WAIT,
    Sleep,
    check_mode,
    check_tags,
    memory_tags,
)
from jaxserve.client.tokenization_kwargs import Tokenization
from jaxserve.client.vllm_config import ModelNames, VllmNames
from jaxserve.config.engine_args import EngineArgs
from jaxserve.config.engine_config import Isolation
from jaxserve.config.profiler_config import FOLDER, ProfilerConfig, check_session
from jaxserve.config.settings import Integer
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.loading.hub import locate
from jaxserve.observability.engine_gauges import load_line
from jaxserve.observability.profiler_trace import new_trace, traces
from jaxserve.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.params.lora_request import LoRARequest, refuse_adapter
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

POLL_S = 0.02
PAUSED, ENDS = "the engine is paused, or sleeps", "the engine is about to end"


class AsyncLLMEngine:
    """Serves requests from one event loop.

    Args:
        engine: what does it.
        profile_folder: where `start_profile` records to.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: AsyncEngine, profile_folder: str = FOLDER):
        self.engine = engine
        self._sleep = Sleep(engine.client)
        self._profile_folder = profile_folder
        self._profile: tuple[Path, list[Path]] | None = None  # where to, and what was there before
        self._is_paused = False
        self._lock = asyncio.Lock()
        self._num_next = 0  # calls that wait for it

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: None = None,
    ) -> AsyncLLMEngine:
        """An engine of vLLM's arguments; returns once it is ready.

        Args:
            engine_args: the arguments.
            start_engine_loop, usage_context: vLLM's, passed over.
            stat_loggers: None: `/metrics` and `AsyncEngine.metrics` are there.

        Raises:
            ValidationError: a setting that cannot be served.
            Exception: what loading raised.
        """
        if stat_loggers is not None:
            raise ValidationError("stat_loggers", stat_loggers, "None")
        folder = ProfilerConfig.of(engine_args.profiler_config).torch_profiler_dir
        config = replace(engine_args, profiler_config=None).create_engine_config()
        isolation = Isolation() if config.data_parallel_size > 1 else None  # a process each
        engine = AsyncEngine(config, isolation=isolation)
        while not engine.is_ready:
            if engine.is_dead:
                raise engine.error or EngineDeadError("the engine was shut down while it loaded")
            time.sleep(POLL_S)
        return cls(engine, folder)

    @property
    def is_running(self) -> bool:
        """Whether it is ready and has not ended."""
        return self.engine.is_ready

    @property
    def errored(self) -> bool:
        """Whether an error has ended it."""
        return self.engine.is_dead and self.engine.error is not None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come; leaving the loop aborts it.

        Args:
            prompt, sampling_params, priority: as of `AsyncEngine.generate`.
            request_id: of the caller's; no two live requests have the same.
            lora_request, tokenization_kwargs: as of `LLM.generate`.
            others: what vLLM has beside; None each.

        Raises:
            ValidationError: a prompt or parameter that cannot be served.
            PausedError: the engine is paused or sleeps.
            EngineDeadError: the engine has ended.
        """
        refuse_adapter(lora_request)
        for name, value in others.items():
            if value is not None:
                raise ValidationError(name, value, "None")
        await self.engine.wait_ready()
        if tokenization_kwargs:
            how = Tokenization.of(tokenization_kwargs, self.engine.max_model_len)
            prompt = how.apply(prompt, self.engine.client)
        outputs = self.engine.generate(prompt, sampling_params, request_id, priority=priority)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of one prompt, once; further arguments are those of `generate`."""
        outputs = self.generate(
            prompt, pooling_params, request_id, lora_request=lora_request, **others
        )
        async for output in outputs:
            if output.finished:
                yield PoolingRequestOutput.of(output)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request or several, those that are live."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            await self.engine.abort(one)

    async def pause_generation(self, *, mode: str = ABORT, clear_cache: bool = True) -> None:
        """Hold requests back until `resume_generation`.

        Args:
            mode: "abort" ends the live ones now, "wait" waits for them; both refuse others. With
                "keep" they stand still, and others wait behind them.
            clear_cache: whether the prefix cache is emptied.

        Raises:
            ValidationError: another mode, or "wait" has given way to the next call of this method,
                `resume_generation`, `sleep` or `wake_up`.
            EngineDeadError: the engine has ended.
        """
        MODES.checked("mode", mode)
        async with self._turn():
            await self._pause(mode, clear_cache=clear_cache)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """What holds requests back or lets them go on is done one call after the other."""
        self._num_next += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_next -= 1
        try:
            yield
        finally:
            self._lock.release()

    async def _pause(self, mode: str, *, clear_cache: bool) -> None:
        await self.engine.wait_ready()
        engine, self._is_paused = self.engine, True
        if mode == KEEP:
            engine.client.control(Action.PAUSE)
        else:
            engine.refusal = PAUSED
            await self.abort(engine.live_requests if mode == ABORT else ())
            if engine.client.is_paused:  # by "keep": what stands still would never end
                engine.client.control(Action.RESUME)
            while mode == WAIT and engine.live_requests:
                await self.check_health()
                if self._num_next:  # it may end a pause whose requests take too long
                    raise ValidationError("mode", mode, "no other call before its requests end")
                await asyncio.sleep(POLL_S)
        await engine.settle()
        if clear_cache:
            await engine.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`.

        Raises:
            ValidationError: the engine sleeps.
        """
        async with self._turn():
            self._resume()

    def _resume(self) -> None:
        self._sleep.check_awake()
        self.engine.refusal, self._is_paused = None, False
        self.engine.client.control(Action.RESUME)

    async def is_paused(self) -> bool:
        """Whether requests are held back."""
        return self._is_paused

    async def sleep(self, level: int = 1, mode: str = ABORT) -> None:
        """Pause, and give device memory away; programs stay compiled.

        Args:
            level: 0 pauses alone; 1 frees pages and weights, which host memory keeps; with 2
                `wake_up` reads the weights again.
            mode: as of `pause_generation`; "keep" goes with level 0.

        Raises:
            ValidationError: another level or mode, or "wait" has given way to another call.
            EngineDeadError: the engine has ended.
        """
        Integer(0, 2).checked("level", level)
        if level:
            check_mode(mode)
        MODES.checked("mode", mode)
        async with self._turn():
            await self._pause(mode, clear_cache=level != 0)
            if level != 0:
                self._sleep.sleep(level)
                await self.engine.settle()

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take the memory again, and go on once all of it is there; whether all is.

        Args:
            tags: some of "weights", "kv_cache" and "scheduling", which takes no memory; None: all.

        Raises:
            ValidationError: another tag.
            EngineDeadError: the engine has ended.
        """
        memory = memory_tags(tags)
        check_tags(memory)
        async with self._turn():
            await self.engine.wait_ready()
            self._sleep.wake_up(memory)
            await self.engine.settle()
            if not self._sleep.is_sleeping:
                self._resume()
            return not self._sleep.is_sleeping

    async def release_kv_cache_memory(self) -> None:
        """Free the pages of an engine that `sleep(0)` has paused; `wake_up` takes them again.

        What the prefix cache had is gone.

        Raises:
            ValidationError: it is not paused by "abort" or "wait", or memory is freed already.
            EngineDeadError: the engine has ended.
        """
        async with self._turn():
            if self.engine.refusal != PAUSED:
                allowed = "one that sleep(0, mode='abort') or sleep(0, mode='wait') has paused"
                state = "paused by 'keep'" if self.engine.client.is_paused else "running"
                raise ValidationError("engine", state, allowed)
            self._sleep.release_kv_cache()
            await self.engine.settle()

    async def is_sleeping(self) -> bool:
        """Whether `wake_up` is needed before anything can be run."""
        return self._sleep.is_sleeping

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to record the work of the engine's process, host and device.

        Args:
            profile_prefix: a folder for this record, in `profiler_config`'s.
            delay_iterations, max_iterations: 0 or None: this and `stop_profile` say when.
            profiler_kwargs: None: those of vLLM's are PyTorch's.

        Raises:
            ValidationError: another value, or a record has begun already, or cannot begin.
            EngineDeadError: the engine has ended.
        """
        check_session(profile_prefix, delay_iterations, max_iterations, profiler_kwargs)
        if self._profile is not None:
            told = str(self._profile[0])
            raise ValidationError("profile_prefix", told, "one record at a time: stop_profile")
        await self.engine.wait_ready()
        folder = Path(self._profile_folder, profile_prefix or "").absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            allowed = f"a folder that can be made ({error})"
            raise ValidationError("torch_profiler_dir", str(folder), allowed) from error
        self._profile = folder, traces(folder)
        self.engine.client.control(Action.START_PROFILE, str(folder))
        if (await self.engine.settle()).profile != str(folder):
            self._profile = None
            allowed = "one that the engine can record into: its log says why it cannot"
            raise ValidationError("torch_profiler_dir", str(folder), allowed)

    async def stop_profile(self) -> Path:
        """End the record; a file for https://ui.perfetto.dev.

        Raises:
            ValidationError: none has begun.
            FileNotFoundError: it is lost; the engine's log says why.
            EngineDeadError: the engine has ended.
        """
        if self._profile is None:
            raise ValidationError("profile", None, "a record that start_profile has begun")
        (folder, before), self._profile = self._profile, None
        self.engine.client.control(Action.STOP_PROFILE)
        while (await self.engine.settle()).profile:
            await asyncio.sleep(POLL_S)
        return new_trace(folder, before)

    async def check_health(self) -> None:
        """Raises EngineDeadError once the engine has ended."""
        if self.engine.is_dead:
            error = self.engine.error
            raise EngineDeadError(str(error or "the engine was shut down")) from error

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ValidationError where the engine has none."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The same."""
        return self.tokenizer

    @property
    def vllm_config(self) -> VllmNames:
        """What the engine was made with, under vLLM's names."""
        return VllmNames.of(self.engine.config, str(locate(self.engine.asked).model))

    @property
    def model_config(self) -> ModelNames:
        """`vllm_config.model_config`."""
        return self.vllm_config.model_config

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Have nothing found any more that was computed so far; the arguments are `LLM`'s."""
        await self.engine.wait_ready()
        await self.engine.reset_prefix_cache()
        return True

    async def reset_mm_cache(self) -> None:
        """Have images encoded again that come again; the prefix cache finds what it found."""
        await self.engine.wait_ready()
        self.engine.client.control(Action.RESET_ENCODER_CACHE)

    async def reset_encoder_cache(self) -> None:
        """The same: there is one cache of images."""
        await self.reset_mm_cache()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Raises ValidationError: there are no adapters yet."""
        refuse_adapter(lora_request)
        return False

    async def remove_lora(self, lora_id: int) -> bool:
        """False: there are no adapters yet, so none of this number."""
        return False

    async def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, *given: Any, **kw: Any
    ) -> None:
        """Raises ValidationError: there are no workers; features are there."""
        allowed = "nothing: there are no workers. features=[...] run inside the step"
        raise ValidationError("collective_rpc", method, f"{allowed} (docs/research.md)")

    def get_num_unfinished_requests(self) -> int:
        """Requests that are streamed, or prepared for it."""
        return len(self.engine.live_requests)

    async def do_log_stats(self) -> None:
        """A line of the log: queues, pages and the steps so far."""
        logger.info(load_line(self.engine.client.stats()))

    def shutdown(self, timeout: float | None = None) -> asyncio.Task[None]:
        """Begin to end the engine and every request; the task that comes back has ended them.

        Args:
            timeout: seconds that running requests have to finish before that; None: none.
        """
        self.engine.refusal = ENDS
        if not timeout:
            self.engine.begin_shutdown()
        self._ending = asyncio.create_task(self._end(timeout))
        return self._ending

    async def _end(self, timeout: float | None) -> None:
        if timeout:
            await self.engine.drain(timeout)
            self.engine.begin_shutdown()
        await asyncio.to_thread(self.engine.client.join)
