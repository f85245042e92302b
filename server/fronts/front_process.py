"""One front as the server has it: its process, what it asks for, and what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from jaxserve.async_engine import AsyncEngine
from jaxserve.boundary.front_messages import (
    AboutModel,
    AddCall,
    Drain,
    FrontReady,
    FrontStart,
    HttpAnswer,
    HttpRequest,
    HttpTaken,
    Left,
    RequestEnd,
    Stopped,
)
from jaxserve.boundary.messages import AddGroup, Body
from jaxserve.client.front_client import failure_of
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.errors import JaxServeError, QueueFullError
from jaxserve.outputs import ERROR, RequestOutput
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.processes.engine_process import EngineProcess
from jaxserve.processes.launch import ANYWHERE, EarlyProcess
from server.fronts.forwarding import is_last
from server.fronts.step_slices import front_of
from server.on_ray.forwarding import Forwarded, messages_of
from server.service import Service

logger = logging.getLogger("jaxserve.server")

MODULE = "server.fronts.child"
END_S = 1.0  # from the end of its socket to its own
HUNG_S = 30.0  # that its event loop may stand: parsing the largest body takes less
FAILED = "the server ended the request with an error"


class FrontProcess:
    """A front. The server's event loop uses it.

    Args:
        start: what it is told first.
        service: of the server.
        app: of the server, which answers what the front does not.
        on_end: told how the process has ended.
        tell_standing: tells fronts how engines stand, where that has changed.

    Attributes:
        name: of the front.
        is_ready: it has said that it answers.
        drained: set once it has no requests any more.

    Raises:
        EngineDeadError: it cannot be started.
    """

    def __init__(
        self,
        start: FrontStart,
        service: Service,
        app: ASGIApp,
        on_end: Callable[[FrontProcess, str], None],
        tell_standing: Callable[[], None],
    ):
        self.name, self.row = start.name, start.row
        self.is_ready = False
        self.drained = asyncio.Event()
        self._service, self._app, self._on_end = service, app, on_end
        self._tell_standing = tell_standing
        self._services = {one.model_names[0]: one for one in service.models}
        self._requests: dict[str, str] = {}  # models of those that have not ended
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._taken: dict[int, asyncio.Event] = {}
        self._turns = self._silent_s = 0.0
        self._loop = asyncio.get_running_loop()
        early = EarlyProcess(MODULE, ANYWHERE, (start.board, start.listener))
        self._process = EngineProcess(MODULE, early)
        self._process.send(start)
        threading.Thread(target=self._read, name="jaxserve-front", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def num_answers(self) -> int:
        """Answers that the server makes for it."""
        return len(self._answers)

    def is_hung(self, turns: float, seconds: float) -> bool:
        """Whether its event loop has not turned for HUNG_S, since it first did.

        Args:
            turns: that it has counted.
            seconds: since the last call, in which it could have been heard.
        """
        stands = turns == self._turns and turns > 0.0
        self._turns, self._silent_s = turns, self._silent_s + seconds if stands else 0.0
        if self._silent_s <= HUNG_S:
            return False
        self._silent_s = 0.0
        return True

    def send(self, body: Body) -> None:
        """Tell it something; what is told to one that has died is lost."""
        self._process.send(body)

    def kill(self) -> None:
        """End the process whatever it does."""
        self._process.kill()

    def wait(self, seconds: float) -> str:
        """How it ended, in words; one that does not within some time is killed."""
        return self._process.wait(seconds)

    def lost(self) -> None:
        """The process has ended: so do its requests."""
        for request_id, model in [*self._requests.items()]:
            self._services[model].engine.end_relayed(request_id)
        self._service.holders.release(self._requests)
        self._requests.clear()
        for task in self._answers.values():
            task.cancel()
        self.drained.set()

    # -- in a thread of its own ------------------------------------------------------------------

    def _read(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while (body := self._process.receive()) is not None:
                self._loop.call_soon_threadsafe(self._take, body)
                del body  # a large one is not kept until the next comes
            how = self._process.wait(END_S)
            self._loop.call_soon_threadsafe(self._on_end, self, how)

    # -- in the loop's thread --------------------------------------------------------------------

    def _take(self, body: Body) -> None:
        match body:
            case AboutModel(model, message):
                self._take_of(model, message)
            case HttpRequest(number):
                self._taken[number] = asyncio.Event()
                task = self._answers[number] = asyncio.ensure_future(self._answer(body))
                task.add_done_callback(partial(self._answered, number))
            case HttpTaken(number, gone):
                self._went_on(number, gone=gone)
            case FrontReady():
                self.is_ready = True
            case Drain():
                self.drained.set()

    def _take_of(self, model: str, body: Body) -> None:
        engine = self._services[model].engine
        match body:
            case AddCall():
                self._add(model, body)
            case Stopped(sequence_ids):
                own = [one for one in sequence_ids if front_of(one) == self.name]
                for request_id in engine.stop_relayed(own):
                    self._over(request_id)
            case Left(request_id):
                if self._requests.get(request_id) == model:
                    engine.end_relayed(request_id)
                    self._over(request_id)

    def _add(self, model: str, call: AddCall) -> None:
        service, first = self._services[model], call.groups[0]
        client = None if service.keys is None else service.keys.named(first.queueing.client)
        prepared = [
            PreparedRequest(name, None, _bare(group.params), group, keys)
            for name, group, keys in zip(call.request_ids, call.groups, call.keys, strict=True)
        ]
        try:
            service.engine.relay(prepared, partial(self._tell, model))
        except Exception as error:
            if not isinstance(error, JaxServeError):
                logger.exception("the requests of a front could not be begun")
            is_full = isinstance(error, QueueFullError)
            client_name = _full_for(service.engine, first) if is_full else None
            for name in call.request_ids:
                self.send(AboutModel(model, failure_of(name, error, client_name)))
            return
        service.holders.hold(call.request_ids, client)
        self._requests |= dict.fromkeys(call.request_ids, model)

    def _tell(self, model: str, request_id: str, item: RequestOutput | BaseException) -> None:
        """The front knows by itself that its tokens have ended a request; all else it is told."""
        self._over(request_id)
        told = _end_of(request_id, item)
        if told is not None:
            self.send(AboutModel(model, told))

    def _over(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._service.holders.release([request_id])

    async def _answer(self, asked: HttpRequest) -> None:
        number, taken = asked.number, self._taken[asked.number]
        state = {"transport": _Transport(partial(self._cut, number))}
        forwarded = Forwarded(_scope(asked.scope), asked.body)
        messages = messages_of(self._app, forwarded, state)
        del asked, forwarded  # the application has the body, and counts it
        try:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    self._tell_standing()  # which the request may have changed
                    self.send(HttpAnswer(number, dict(message)))
                    if not is_last(message):  # behind that the application may have work to do
                        await taken.wait()
                        taken.clear()
        except Exception:  # of whatever the application raises the client is told
            logger.exception("an answer was broken off")
            self.send(HttpAnswer(number, {}))

    def _cut(self, number: int) -> None:
        """End an answer that its client does not read."""
        task = self._answers.get(number)
        if task is not None:
            self.send(HttpAnswer(number, {}))
            task.cancel()

    def _answered(self, number: int, task: asyncio.Task[None]) -> None:
        del self._answers[number], self._taken[number]

    def _went_on(self, number: int, *, gone: bool) -> None:
        task = self._answers.get(number)
        if task is None:
            return
        if gone:
            task.cancel()
        else:
            self._taken[number].set()


class _Transport:
    """What stands for the connection of a request that a front has handed over.

    Args:
        abort: ends the answer.
    """

    def __init__(self, abort: Callable[[], None]):
        self.abort = abort

    def get_write_buffer_size(self) -> int:
        """Nothing waits here: the front takes one message of an answer at a time."""
        return 0


def _full_for(engine: AsyncEngine, group: AddGroup) -> str | None:
    """The client of a request that was refused, where any other of its would be too."""
    client = group.queueing.client
    try:
        engine.ledger.check(client)
    except QueueFullError:
        return client
    return None


def _end_of(request_id: str, item: RequestOutput | BaseException) -> Body | None:
    """The message that tells a front of a request's end; None: the tokens say it."""
    if isinstance(item, BaseException):
        return failure_of(request_id, item)
    if any(one.finish_reason == ERROR for one in item.outputs):
        # where the step says so, the front knows; here it may have happened alone
        return failure_of(request_id, JaxServeError(FAILED))
    cut = next((one for one in item.outputs if one.finish_reason == "abort"), None)
    if cut is None:
        return None
    why = cut.stop_reason
    return RequestEnd(request_id, None if why is None else str(why))


def _bare(params: SamplingParams) -> SamplingParams:
    """Parameters of a request of which no output but the last is made here, and no text."""
    twin = copy.copy(params)
    twin.output_kind, twin.detokenize = RequestOutputKind.FINAL_ONLY, False
    twin.logprobs = twin.prompt_logprobs = twin.logprob_token_ids = None
    return twin


def _scope(plain: dict[str, Any]) -> dict[str, Any]:
    """A scope as it was before it was sent as plain data."""
    told = {name: tuple(plain[name]) for name in ("client", "server") if plain.get(name)}
    return plain | told | {"headers": [(name, value) for name, value in plain["headers"]]}
