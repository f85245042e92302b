"""The asyncio front: the engine runs in its own thread, callers await outputs.

The thread owns the engine. Callers reach it through one command queue; it answers with one
`call_soon_threadsafe` a step, and the event loop's thread makes text of the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from checkpoints import CheckpointError
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, EngineStats, StepOutput
from jaxserve.errors import EngineDeadError, JaxServeError, ValidationError
from jaxserve.inputs import InputProcessor, PreparedRequest, Prompt
from jaxserve.loading import load_engine
from jaxserve.models.config import ModelConfig
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.step_times import StepTimes
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Command = Callable[[Engine], None]


class AsyncEngine:
    """Serves requests concurrently from one event loop.

    Args:
        config: what the user asked for; `self.config` is the resolved one once ready.
        start: load in the background at once; else `start()` does.
    """

    def __init__(self, config: EngineConfig, *, start: bool = True):
        self.config = config
        self.error: BaseException | None = None
        self.metrics = Metrics((config.served_model_name or (config.model,))[0])
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_seconds = 0.0  # processor time of the event loop's thread while requests ran
        self._loop_since = 0.0
        self._http_seconds = 0.0
        self._streams: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._aborted_early: set[str] = set()  # while their prompts were tokenised
        self._tokenizer: Tokenizer | None = None
        self._model_config: ModelConfig | None = None
        self._inputs: InputProcessor | None = None
        self._outputs: OutputProcessor | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        if start:
            self.start()

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """True once the engine is warmed up, until it ends."""
        return self._ready.is_set() and not self._ended.is_set()

    @property
    def is_dead(self) -> bool:
        """True once the engine thread has ended, by an error or by `shutdown`."""
        return self._ended.is_set()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, once ready.

        Raises:
            ValidationError: the engine has none.
        """
        if self._tokenizer is None:
            raise ValidationError("skip_tokenizer_init", True, "False where a tokenizer is used")
        return self._tokenizer

    @property
    def model_config(self) -> ModelConfig:
        assert self._model_config is not None, "known once the engine is ready"
        return self._model_config

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None, "known once the engine is ready"
        return self.config.max_model_len

    async def wait_ready(self) -> None:
        """Wait until the engine is warmed up.

        Raises:
            Whatever loading raised.
        """
        while not self._ready.is_set():
            if self._ended.is_set():
                raise self.error or EngineDeadError("the engine was shut down while it loaded")
            await asyncio.sleep(0.02)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one request; closing the iterator aborts it.

        Args:
            prompt: text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            params: sampling parameters; `output_kind` says what each output holds.
            request_id: unique among live requests.
            priority: 0; requests are served first come, first served.
            arrival_time: when the client asked, by `time.monotonic()`; now when None.

        Raises:
            ValidationError: a prompt or parameter that cannot be served (before any output).
            EngineDeadError: the engine has ended.
        """
        if priority != 0:
            raise ValidationError("priority", priority, "0 (first come, first served)")
        self._check_alive()
        assert self._inputs is not None and self._outputs is not None
        if request_id in self._streams:
            raise ValidationError("request_id", request_id, "an id that is not in use")
        if arrival_time is None:
            arrival_time = time.monotonic()
        self._loop = asyncio.get_running_loop()
        stream = self._open_stream(request_id)
        finished = False
        try:
            work = (prompt, params, request_id, arrival_time)
            if self._inputs.is_quick(prompt, params):
                # two changes of thread cost more than the work, the more the busier the engine is
                prepared = self._inputs.prepare(*work)
            else:
                prepared = await asyncio.to_thread(self._inputs.prepare, *work)
            self._check_alive()
            self._outputs.add(prepared)
            if request_id in self._aborted_early:
                await self.abort(request_id)
            else:
                self._commands.put(lambda engine: _add_all(engine, prepared))
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                yield item
        finally:
            del self._streams[request_id]
            self._aborted_early.discard(request_id)
            if not finished:
                self._abort(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort"."""
        output = self._abort(request_id)
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if output is None:
            self._aborted_early.add(request_id)
        else:
            stream.put_nowait(output)

    async def shutdown(self) -> None:
        """Abort what is running and end the engine thread."""
        for request_id in list(self._streams):
            await self.abort(request_id)
        self._stopping = True
        self._commands.put(lambda engine: None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._ended.set()

    def _check_alive(self) -> None:
        if self._ended.is_set():
            raise self._death()
        if not self._ready.is_set():
            raise EngineDeadError("the engine is still loading")

    def _death(self) -> EngineDeadError:
        """What every caller is told, a new error each, with the reason as its cause."""
        error = self.error
        if isinstance(error, EngineDeadError):
            death = EngineDeadError(str(error))
            death.__cause__ = error.__cause__
        else:
            how = "was shut down" if error is None else "has ended with an error"
            death = EngineDeadError(f"the engine {how}: make a new one, or restart the server")
            death.__cause__ = error
        return death

    def _abort(self, request_id: str) -> RequestOutput | None:
        if self._outputs is None:
            return None
        output, sequences = self._outputs.abort(request_id)
        if sequences:
            self._commands.put(lambda engine: _abort_all(engine, sequences))
        return output

    # -- the engine thread ------------------------------------------------------------------

    def _run(self) -> None:
        engine: Engine | None = None
        try:
            engine = self._load()
            self._ready.set()
            self._serve(engine)
        except BaseException as error:
            self.error = error
            # what loading refuses is for people, without a traceback
            if engine is not None or not isinstance(error, (JaxServeError, CheckpointError)):
                logger.exception("the engine thread ended with an error")
        finally:
            self._ended.set()
            self._call_in_loop(self._fail_streams)
            if engine is not None:
                engine.close()

    def _load(self) -> Engine:
        loaded = load_engine(self.config)
        self.config = loaded.config
        self._model_config = loaded.model_config
        self._tokenizer = loaded.tokenizer
        self._inputs = InputProcessor(loaded.config, loaded.model_config, self._tokenizer)
        self._outputs = OutputProcessor(self._tokenizer, self.metrics)
        return loaded.engine

    def _serve(self, engine: Engine) -> None:
        while not self._stopping:
            # an idle engine blocks here until somebody wants something
            self._run_commands(engine, wait=not engine.has_work)
            if engine.has_work and not self._stopping:
                output = engine.step()
                self._call_in_loop(self._deliver, output, engine.stats())
            else:
                self._call_in_loop(self._deliver, StepOutput(), engine.stats())

    def _run_commands(self, engine: Engine, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait)(engine)
            while True:
                self._commands.get_nowait()(engine)
        except queue.Empty:
            return

    def _call_in_loop(self, function: Callable[..., None], *args: Any) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # the loop was closed between the check and the call: nobody is listening any more
            logger.debug("event loop closed; outputs of the last step dropped")

    # -- the event loop's thread ------------------------------------------------------------

    def _deliver(self, step: StepOutput, stats: EngineStats) -> None:
        assert self._outputs is not None
        try:
            processed = self._outputs.process(step)
        except Exception as error:
            # the streams of this step can never be completed: end the engine rather than hang
            self.error = error
            self._stopping = True
            self._commands.put(lambda engine: None)
            self._fail_streams()
            raise
        if processed.stopped:
            stopped = processed.stopped
            self._commands.put(lambda engine: _abort_all(engine, stopped))
        for output in processed.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)
        self.metrics.record_stats(stats._replace(times=self._with_loop_times(stats.times)))

    def _open_stream(self, request_id: str) -> asyncio.Queue[RequestOutput | BaseException]:
        if not self._streams:
            self._loop_since = time.thread_time()  # what is computed while idle is of no step
        stream: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self._streams[request_id] = stream
        return stream

    def _with_loop_times(self, times: StepTimes) -> StepTimes:
        """Adds what this thread has spent: on text, and on everything else that it computes."""
        assert self._outputs is not None
        text = self._outputs.seconds
        # processor time, so that waiting for a socket does not count; never less than before
        now = time.thread_time()
        self._loop_seconds += now - self._loop_since
        self._loop_since = now
        self._http_seconds = max(self._http_seconds, self._loop_seconds - text)
        return replace(times, detokenise=text, http=self._http_seconds)

    def _fail_streams(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(self._death())


def _add_all(engine: Engine, prepared: PreparedRequest) -> None:
    request: Request
    for request in prepared.sequences:
        engine.add(request)


def _abort_all(engine: Engine, sequence_ids: list[str]) -> None:
    for sequence_id in sequence_ids:
        engine.abort(sequence_id)
