"""The client of a front: a process that answers HTTP, before a server that has the engine.

What there is once for all fronts is the server's: which requests are admitted, deadlines, what a
death of the engine means, and the metrics. Text is made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxserve.boundary.front_messages import (
    AddCall,
    EngineStanding,
    Left,
    RequestEnd,
    RequestFailure,
    Stopped,
)
from jaxserve.boundary.messages import Abort, AddGroup, Body, EngineStats, Refusal, StepOutput
from jaxserve.client.engine_client import EngineClient, counted
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import (
    EngineDeadError,
    JaxServeError,
    MessageError,
    PausedError,
    QueueFullError,
    ShutdownError,
    ValidationError,
)
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import ERROR, RequestOutput
from jaxserve.processes.wire import Ready
from jaxserve.tokenization.tokenizer import Tokenizer

# Seconds for which a client's requests are refused here once the server has refused one of them
# that any other would have been refused as well; and clients that are remembered.
FULL_S, MOST_FULL = 0.05, 4096
_ERRORS = {one.__name__: one for one in (PausedError, ShutdownError, EngineDeadError)}


class _Call:
    """The requests of one call, until each has been begun."""

    def __init__(self, count: int):
        self.count = count
        self.begun: list[PreparedRequest] = []


class FrontClient(EngineClient):
    """Serves by the engine of another process's client. Used by one thread.

    Args:
        asked: what the user asked for.
        clock: of the thread that uses the client.
        notify: has the outputs taken, in the thread that uses the client.
        send: sends a message to the server.
        on_refused: told of the limit for which a request was refused here.

    Attributes:
        standing: whether the engine serves, and how full it is.
    """

    def __init__(
        self,
        asked: EngineConfig,
        clock: ClientClock,
        notify: Callable[[], None],
        send: Callable[[Body], None],
        on_refused: Callable[[str], None],
    ):
        super().__init__(asked.model_names[0], asked.metrics_prefix, clock)
        self.asked = asked
        self._received: deque[Body] = deque()
        self.standing = EngineStanding("loading")
        self.error: BaseException | None = None
        self._notify, self._send, self._on_refused = notify, send, on_refused
        self._calls: dict[str, _Call] = {}
        self._full: dict[str, tuple[float, QueueFullError]] = {}  # until when, by client

    def load(self, ready: Ready, name: str) -> None:
        """The engine is loaded; sequence ids of the front of this name begin with it."""
        asked, tokenizer = ready.config.asked, None
        if not asked.skip_tokenizer_init:
            tokenizer = Tokenizer(ready.tokenizer_folder, asked.chat_template)
        # here a part of what waits is known: how long that takes, is the server's to judge
        config = replace(ready.config, asked=replace(asked, max_queue_wait=None))
        self._bind(config, ready.model, tokenizer, ready.page_bytes, ready.model_folder)
        self.inputs.prefix = f"{name}:"

    def take(self, body: Body) -> None:
        """Take in what the server has sent: whether the engine serves, or news of requests."""
        if isinstance(body, EngineStanding):
            self.standing = body
        else:
            self._received.append(body)

    def wake(self) -> None:
        """Have what was taken in delivered."""
        self._notify()

    def start(self) -> None:
        """Nothing: the server has begun to load."""

    @property
    def is_loaded(self) -> bool:
        """Whether the front knows what the engine is."""
        return self._shared is not None

    @property
    def is_ready(self) -> bool:
        """True while the engine serves, or is paused, and the front knows what it is."""
        return self.is_loaded and self.standing.word in ("ok", "paused", "silent")

    @property
    def refusal(self) -> str | None:
        """Why requests are refused for now; None: they are not."""
        return self.standing.text if self.standing.word == "paused" else None

    @property
    def is_restarting(self) -> bool:
        """True while the engine has died and the next one loads."""
        return self.standing.word == "restarting"

    @property
    def silence(self) -> str | None:
        """Why the engine seems to hang, for people; None: it does not."""
        return self.standing.text if self.standing.word == "silent" else None

    @property
    def is_dead(self) -> bool:
        """True once nothing will be served any more."""
        return self.standing.word == "dead"

    def check_alive(self) -> None:
        if self.is_dead:
            raise self.death()

    def death(self) -> EngineDeadError:
        """A new error for each caller."""
        return EngineDeadError(self.standing.text)

    def stats(self) -> EngineStats:
        """What this process has computed, and of the engine how full it is."""
        told, stats = self.standing, self.metrics.stats
        num_pages = self.config.cache.num_pages - 1 if self.is_loaded else 0
        # by them several models are added up
        pages = stats.pages._replace(
            num_pages=num_pages, num_active=round(told.page_usage * num_pages)
        )
        return stats._replace(num_waiting=told.num_waiting, page_usage=told.page_usage, pages=pages)

    def check_room(self, client: str = "", requests: int = 1) -> None:
        with counted(self._on_refused):
            self._check_full(client)
            super().check_room(client, requests)

    def admit(self, prepared: Sequence[PreparedRequest]) -> None:
        """Note the requests of one call, which the server admits or refuses once all are begun."""
        with counted(self._on_refused):
            super().admit(prepared)
        if len(prepared) > 1:
            is_admitted = self.ledger.is_admitted
            self._calls = {name: one for name, one in self._calls.items() if is_admitted(name)}
            self._calls |= dict.fromkeys((one.request_id for one in prepared), _Call(len(prepared)))

    def add(self, prepared: PreparedRequest) -> None:
        super().add(prepared)
        call = self._calls.pop(prepared.request_id, None) or _Call(1)
        call.begun.append(prepared)
        if len(call.begun) < call.count:
            return
        names = [one.request_id for one in call.begun]
        groups, keys = [one.group for one in call.begun], [[*one.keys] for one in call.begun]
        try:
            self._send(AddCall(names, groups, keys))
        except MessageError as error:
            for name in names:
                self._forget_request(name)
            allowed = f"values that can be sent to the engine ({error})"
            raise ValidationError("request", prepared.request_id, allowed) from error

    def outputs(self) -> list[RequestOutput]:
        is_dead, found = self.is_dead, []
        while self._received:
            found += self._take_body(self._received.popleft())
        if not found and is_dead:
            raise self.death()
        return found

    def close(self) -> None:
        """Nothing: the engine is the server's."""
        self._end_checks()

    def join(self) -> None:
        """Nothing: see `close`."""

    # -- within ----------------------------------------------------------------------------------

    def _post(self, body: Body) -> None:
        if isinstance(body, AddGroup):
            return  # `add` sends what belongs together
        assert isinstance(body, Abort), "the server answers what is asked of the whole engine"
        self._send(Stopped(body.sequence_ids))

    def _end_sequences(self, request_id: str, sequences: list[str]) -> None:
        self._forget(request_id)
        if sequences:
            self._send(Left(request_id))

    def _set_deadlines(self, request_id: str, group: AddGroup, *, waits: bool) -> None:
        """Nothing: the server keeps them."""

    def _queued(self, request_id: str) -> None:
        """Nothing: see `_set_deadlines`."""

    def _take_body(self, body: Body) -> list[RequestOutput]:
        match body:
            case StepOutput():
                return self._take(body)
            case RequestEnd(request_id, why):
                output, _ = self._processor.abort(request_id, why)
                self._forget(request_id)
                return [] if output is None else [output]
            case RequestFailure():
                self._fail(body)
        return []

    def _fail(self, told: RequestFailure) -> None:
        error = error_of(told)
        if told.client is not None and isinstance(error, QueueFullError):
            if len(self._full) >= MOST_FULL:
                self._full.clear()
            self._full[told.client] = self._clock.now() + FULL_S, error
        if not self._processor.is_live(told.request_id):
            return  # the same has ended it here
        self._forget_request(told.request_id)
        self._failures[told.request_id] = error

    def _check_full(self, client: str) -> None:
        told = self._full.get(client)
        if told is None:
            return
        until, error = told
        if self._clock.now() < until:
            raise QueueFullError(error.limit, _message(error), error.retry_after)
        del self._full[client]

    def _forget_request(self, request_id: str) -> None:
        self._processor.drop(request_id, finish=ERROR)
        self._forget(request_id)


def failure_of(request_id: str, error: BaseException, client: str | None = None) -> RequestFailure:
    """The message that ends a request with an error; `client`: see `RequestFailure`."""
    name, text = type(error).__name__, str(error)
    match error:
        case QueueFullError():
            told = _message(error), error.limit, error.retry_after, client
            return RequestFailure(request_id, name, *told)
        case ValidationError():
            refusal = Refusal.of(error)
            assert refusal is not None
            return RequestFailure(
                request_id,
                name,
                text,
                field=refusal.field,
                value=refusal.value,
                allowed=refusal.allowed,
            )
    return RequestFailure(request_id, name, text)


def error_of(told: RequestFailure) -> Exception:
    """The error that a message tells of."""
    if told.error == QueueFullError.__name__:
        return QueueFullError(told.limit, told.text, told.seconds)
    if told.error == ValidationError.__name__:
        return Refusal(told.field, told.value, told.allowed).error()
    return _ERRORS.get(told.error, JaxServeError)(told.text)


def _message(error: QueueFullError) -> str:
    """What it was made with."""
    return str(error).removesuffix(f" ({error.limit}); try again later")
