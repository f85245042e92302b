"""The asyncio front: the engine runs in a thread or a process of its own, callers await outputs.

The event loop's thread uses the client, which makes text of the tokens; a thread of the client's
wakes it with one `call_soon_threadsafe` a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxserve.boundary.engine_view import EngineView
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.step_history import StepHistory
from jaxserve.client.input_processor import Params, PreparedRequest
from jaxserve.client.output_queue import OutputQueue
from jaxserve.client.prompt_reader import Prompt
from jaxserve.client.relayed_request import RelayedRequest, Tell
from jaxserve.client.request_preparation import RequestPreparation
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import EngineDeadError, PausedError, ShutdownError, ValidationError
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.step_clock import ClientClock
from jaxserve.observability.united_metrics import UnitedMetrics
from jaxserve.outputs import RequestOutput
from jaxserve.request.queueing import Queueing
from jaxserve.scheduling.ledger import Ledger
from jaxserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.client.front_client import FrontClient
    from jaxserve.client.thread_client import ThreadClient
    from jaxserve.isolation.process_client import ProcessClient
    from jaxserve.isolation.replicas import ReplicaClient
    from jaxserve.processes.launch import EarlyProcess

logger = logging.getLogger(__name__)

TIMER_SLACK_S = 0.001  # resolution of the loop's timers
DRAIN_POLL_S = 0.02
DRAIN_POLLS = 2  # a request that is prepared opens its stream between two of them
VIEW_TIMEOUT_S = 5.0


class AsyncEngine:
    """Serves requests concurrently from one event loop.

    Args:
        asked: what the user asked for; `self.config` is what became of it, once ready.
        start: load in the background at once; else `start()` does.
        isolation: run the engine in a process of its own, which is started again when it dies or
            hangs, or as many of them as `data_parallel_size` says; None: in a thread of this one.
        early: that process, where it has been started already.
        make: makes another client, of the clock of the thread that uses it and what wakes that.

    Attributes:
        client: what serves its requests.
        clock: measures the time of the thread that uses it.
        is_isolated: the engine has a process of its own.
        is_draining: True once `drain` or `shutdown` has been called.
        on_ended: told of each request that has ended, with its last output if it had one.
        refusal: why requests are refused for now; None: they are not.
    """

    def __init__(
        self,
        asked: EngineConfig,
        *,
        start: bool = True,
        isolation: Isolation | None = None,
        early: EarlyProcess | None = None,
        make: Callable[[ClientClock, Callable[[], None]], FrontClient | ProcessClient]
        | None = None,
    ):
        self.clock = ClientClock(whole_thread=True)
        self.client: ThreadClient | ProcessClient | ReplicaClient | FrontClient
        if make is None:
            self.client = self._make_client(asked, isolation, early)
        else:
            self.client = make(self.clock, self._wake)
        self.is_isolated = isolation is not None
        self.on_ended: Callable[[PreparedRequest, RequestOutput | None], None] | None = None
        self.is_draining = False
        self.refusal: str | None = None
        self._preparing = RequestPreparation()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, OutputQueue | RelayedRequest] = {}
        self._looking: asyncio.Future[EngineView] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when it comes
        self._aborted_early: set[str] = set()  # while their prompts were tokenised
        if start:
            self.start()

    def _make_client(
        self, config: EngineConfig, isolation: Isolation | None, early: EarlyProcess | None
    ) -> ThreadClient | ProcessClient | ReplicaClient:
        # imported here: an engine in another process needs no jax in this one
        if isolation is None:
            from jaxserve.client.thread_client import ThreadClient

            return ThreadClient(config, self.clock, self._wake)
        if config.data_parallel_size > 1:
            from jaxserve.isolation.replicas import ReplicaClient

            return ReplicaClient(config, self.clock, self._wake, isolation, early)
        from jaxserve.isolation.process_client import ProcessClient

        return ProcessClient(config, self.clock, self._wake, isolation, early)

    def start(self) -> None:
        """Begin to load; returns at once."""
        self.client.start()

    @property
    def asked(self) -> EngineConfig:
        return self.client.asked

    @property
    def config(self) -> ResolvedConfig:
        return self.client.config

    @property
    def metrics(self) -> Metrics | UnitedMetrics:
        return self.client.metrics

    @property
    def histories(self) -> list[StepHistory]:
        """The last steps of each engine."""
        return self.client.histories

    @property
    def is_ready(self) -> bool:
        """True once the engine is warmed up, until it ends; False while a dead one is replaced."""
        return self.client.is_ready

    @property
    def is_restarting(self) -> bool:
        """True while the engine has died and the next one loads: requests wait for it."""
        return self.client.is_restarting

    @property
    def silence(self) -> str | None:
        """Why the engine seems to hang, for people: requests go on when it does; else None."""
        return self.client.silence

    @property
    def states(self) -> list[str]:
        """What each of several engines does: ok, loading, restarting, silent or dead."""
        return self.client.states

    @property
    def is_dead(self) -> bool:
        """True once the engine has ended for good, by an error or by `shutdown`."""
        return self.client.is_dead

    @property
    def error(self) -> BaseException | None:
        """What has ended the engine."""
        return self.client.error

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, once ready.

        Raises:
            ValidationError: the engine has none.
        """
        return self.client.tokenizer

    @property
    def model_config(self) -> ModelFacts:
        return self.client.model_config

    @property
    def max_model_len(self) -> int:
        return self.config.scheduler.max_model_len

    async def wait_ready(self) -> None:
        """Wait until the engine is warmed up.

        Raises:
            Exception: what loading raised.
        """
        self._use_loop()
        while not self.client.is_ready:
            if self.client.is_dead:
                raise self.error or EngineDeadError("the engine was shut down while it loaded")
            await asyncio.sleep(0.02)

    def warm_up(self) -> None:
        """Begin to start what the first constraint needs, once ready."""
        self.client.inputs.warm_up()

    def generate(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prepare a request and stream its outputs; see `prepare` and `stream`.

        Args:
            priority: the smallest goes first, where the policy is "priority".
            timeout: seconds from now when it ends wherever it is, with finish_reason "abort" and
                stop_reason "timeout".
        """
        queueing = Queueing(self.clock.now(), priority, timeout)
        return self._stream(request_id, lambda: self.prepare(prompt, params, request_id, queueing))

    async def prepare(
        self, prompt: Prompt, params: Params, request_id: str, queueing: Queueing | None = None
    ) -> PreparedRequest:
        """Check and tokenise one request, which the engine learns of when it is streamed.

        Args:
            prompt: text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            params: sampling parameters, whose `output_kind` says what each output holds; those of a
                beam search; or what is wanted of the prompt's hidden states.
            request_id: unique among live requests.
            queueing: when the client asked, how urgent it is and how long it waits; now when None.

        Raises:
            ValidationError: a prompt or parameter that cannot be served.
            EngineDeadError: the engine has ended.
        """
        self.client.check_alive()
        return await self._preparing.prepare(
            self.client.inputs, prompt, params, request_id, queueing
        )

    async def with_places(self, tokens: list[int], images: Mapping[str, Any]) -> list[int]:
        """See `RequestPreparation.with_places`. Raises EngineDeadError: the engine has ended."""
        self.client.check_alive()
        return await self._preparing.with_places(self.client.inputs, tokens, images)

    @property
    def ledger(self) -> Ledger:
        """What was let in and has not ended, once ready."""
        return self.client.ledger

    def check_room(self, client: str = "", requests: int = 1) -> None:
        """Refuse requests of a client before any work is spent on them.

        Raises:
            QueueFullError: too much waits already, by the configured limits.
            EngineDeadError: the engine has ended, or is not ready.
        """
        self.client.check_alive()
        self.client.check_room(client, requests)

    @contextmanager
    def admitted(self, prepared: Sequence[PreparedRequest]) -> Iterator[None]:
        """Lets the requests of one call in, all of them or none; they are streamed in the block.

        Raises:
            ValidationError: an id is in use.
            QueueFullError: too much waits already, by the configured limits.
            EngineDeadError: the engine has ended.
        """
        self.client.check_alive()
        self.client.admit(prepared)
        try:
            yield
        finally:
            for one in prepared:
                self.client.ledger.ended(one.request_id)

    def stream(
        self, prepared: PreparedRequest, *, on_drop: Callable[[int], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; closing the iterator aborts it.

        Args:
            prepared: the request.
            on_drop: told how many tokens it has got when it is aborted so.

        Raises:
            ValidationError: the request's id is in use (before any output).
            QueueFullError: too much waits already (before any output).
            PausedError: requests are refused for now (before any output).
            EngineDeadError: the engine has ended.
        """

        async def ready() -> PreparedRequest:
            return prepared

        return self._stream(prepared.request_id, ready, on_drop)

    async def _stream(
        self,
        request_id: str,
        prepare: Callable[[], Awaitable[PreparedRequest]],
        on_drop: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.client.check_alive()
        if request_id in self._streams:
            raise ValidationError("request_id", request_id, "an id that is not in use")
        self._use_loop()
        if not self._streams:
            self.clock.resume()
        stream = self._streams[request_id] = OutputQueue()
        finished = False
        last: RequestOutput | None = None
        prepared: PreparedRequest | None = None
        try:
            prepared = await prepare()
            stream.kind = prepared.params.output_kind
            self.client.check_alive()
            if self.refusal is not None:
                raise PausedError(self.refusal)
            self.client.add(prepared)
            self._set_timer()
            if request_id in self._aborted_early:
                await self.abort(request_id)
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                last = item
                yield item
        finally:
            del self._streams[request_id]
            self._aborted_early.discard(request_id)
            if not finished:
                if on_drop is not None:
                    on_drop(self.client.num_generated(request_id))
                self.client.drop(request_id)
            self._set_timer()  # a deadline is gone with it
            if prepared is not None and self.on_ended is not None:
                self.on_ended(prepared, last)

    def relay(self, prepared: Sequence[PreparedRequest], tell: Tell) -> None:
        """Begin the requests of one call, whose text another process makes.

        That process has their tokens of `client.on_step`.

        Args:
            prepared: all of them, or none, are let in.
            tell: told of each request its last output, or the error that ends it.

        Raises:
            ValidationError, QueueFullError, PausedError, EngineDeadError: see `stream`.
        """
        self._use_loop()
        self.client.check_alive()
        if self.refusal is not None:
            raise PausedError(self.refusal)
        if not self._streams:
            self.clock.resume()

        def end(name: str, item: RequestOutput | BaseException) -> None:
            self._streams.pop(name, None)
            tell(name, item)

        self.client.admit(prepared)
        try:
            for one in prepared:
                self.client.add(one)
                self._streams[one.request_id] = RelayedRequest(one.request_id, end)
        except BaseException:
            for one in prepared:
                self.end_relayed(one.request_id)
                self.client.ledger.ended(one.request_id)
            raise
        self._set_timer()

    def end_relayed(self, request_id: str) -> None:
        """End a request of `relay` now: its caller has gone."""
        if self._streams.pop(request_id, None) is not None:
            self.client.drop(request_id)
            self._set_timer()

    def stop_relayed(self, sequence_ids: Sequence[str]) -> list[str]:
        """End sequences of `relay` that met a stop string elsewhere; the requests that end."""
        over = self.client.stop(sequence_ids)
        for request_id in over:
            self._streams.pop(request_id, None)
        self._set_timer()
        return over

    def unread_bytes(self, request_id: str) -> int:
        """About the bytes of a stream's outputs that are not read yet; 0 without a stream."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else stream.num_bytes()

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort"."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        output = self.client.abort(request_id)
        if output is None:
            self._aborted_early.add(request_id)
        else:
            stream.put_nowait(output)

    async def reset_prefix_cache(self) -> None:
        """Have nothing found any more that was computed so far; requests that run go on."""
        self.client.check_alive()
        self.client.reset_prefix_cache()

    async def view(self, seconds: float = VIEW_TIMEOUT_S) -> EngineView | None:
        """The engine as it is after its next step; None where none comes within `seconds`.

        Whoever asks meanwhile gets the same one.
        """
        if not self.is_ready:
            return None
        loop = self._use_loop()
        if self._looking is None:
            self._looking = loop.create_future()
            self.client.look()
        looking = self._looking
        try:
            return await asyncio.wait_for(asyncio.shield(looking), seconds)
        except TimeoutError:
            if self._looking is looking:  # an engine that has died takes the question with it
                self._looking = None
            return None

    @property
    def live_requests(self) -> list[str]:
        """Ids of the requests that are streamed, or prepared for it."""
        return [*self._streams]

    async def settle(self) -> EngineView:
        """Wait until the engine has done all that it was sent; it as it is then.

        Raises:
            EngineDeadError: it has ended.
        """
        await self._seen()  # this view may have been asked for before
        return await self._seen()

    async def _seen(self) -> EngineView:
        while (view := await self.view()) is None:
            self.client.check_alive()
            await asyncio.sleep(DRAIN_POLL_S)  # another engine loads, or the step is long
        return view

    async def drain(self, seconds: float, is_entering: Callable[[], bool] = bool) -> bool:
        """Wait until running requests have finished; False if some have not after that time.

        Whoever asks is told by `is_draining` to send no more.

        Args:
            is_entering: whether more requests were let in that are not known here yet.
        """
        self.is_draining = True
        deadline = self.clock.now() + seconds
        quiet = 0
        while quiet < DRAIN_POLLS and self.clock.now() < deadline and not self.is_dead:
            if self.is_ready:
                self.client.inputs.drain()
            busy = self._streams or self._preparing.count or is_entering()
            quiet = 0 if busy else quiet + 1
            if quiet < DRAIN_POLLS:
                await asyncio.sleep(DRAIN_POLL_S)
        return not self._streams

    async def shutdown(self) -> None:
        """End the engine; requests that have not finished end with a ShutdownError."""
        self.begin_shutdown()
        await asyncio.to_thread(self.client.join)

    def begin_shutdown(self) -> None:
        """The same without waiting for the end."""
        self.is_draining = True
        for request_id, stream in [*self._streams.items()]:
            self.client.abort(request_id)
            stream.put_nowait(ShutdownError("the engine was shut down before this was finished"))
        self.client.close()

    def _use_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs; what an earlier one was to do is gone with it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer, self._due, self._looking = loop, None, None, None
        return loop

    def _deliver(self) -> None:
        """Hand out what the engine has sent."""
        is_dead = self.client.is_dead  # the loop is not woken after that
        try:
            outputs = self.client.outputs()
        except EngineDeadError:
            return self._fail_streams()
        except Exception as error:
            # the streams of this step can never be completed: end the engine rather than hang
            self.client.error = error
            self.client.close()
            self._fail_streams()
            raise
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)
        view = self.client.take_view()
        if view is not None and self._looking is not None:
            if not self._looking.done():
                self._looking.set_result(view)
            self._looking = None
        for request_id, failure in self.client.take_failures().items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put_nowait(failure)
        if is_dead:
            self._fail_streams()
        self._set_timer()

    def _set_timer(self) -> None:
        """Have `_deliver` called when the next deadline has come."""
        assert self._loop is not None
        due = self.client.next_deadline()
        if due == self._due or self._loop.is_closed():
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            left = max(0.0, due - self.clock.now()) + TIMER_SLACK_S  # a timer may come early
            self._timer = self._loop.call_later(left, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._due = None
        self._deliver()

    def _fail_streams(self) -> None:
        for stream in [*self._streams.values()]:
            stream.put_nowait(self.client.death())

    # -- called in a thread of the client's -------------------------------------------------------

    def _wake(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # the loop was closed between the check and the call: no stream is read any more
            logger.debug("event loop closed while a step ran")
