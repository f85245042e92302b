"""The client of several engines of one model, each in a process of its own.

A request is prepared once and goes to one engine, whose `ProcessClient` has it to its end. The
others know nothing of it: an engine that dies has hurt its own requests alone. The ledger says
which engine has which request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.boundary.engine_view import EngineView
from jaxserve.boundary.messages import WOKEN_BY, Action, AddGroup, EngineStats, StepOutput
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.step_history import StepHistory
from jaxserve.client.engine_client import counted, work_of
from jaxserve.client.input_processor import InputProcessor, PreparedRequest
from jaxserve.client.live_request import LiveRequest
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.isolation.looks import Looks
from jaxserve.isolation.places import places, settings_of_engine
from jaxserve.isolation.process_client import ProcessClient
from jaxserve.isolation.routing import Routing
from jaxserve.isolation.supervisor import again
from jaxserve.observability.numbered_log import NumberedLog
from jaxserve.observability.step_clock import ClientClock
from jaxserve.observability.trace_recorder import TraceRecorder
from jaxserve.observability.united_metrics import UnitedMetrics
from jaxserve.outputs import RequestOutput
from jaxserve.processes.launch import EarlyProcess
from jaxserve.processes.wire import Ready
from jaxserve.scheduling.ledger import Ledger, RequestWork
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# after these an engine finds nothing that it was sent before
EMPTIES = frozenset({Action.RESET_PREFIX_CACHE, *WOKEN_BY})


class ReplicaClient:
    """Serves by `data_parallel_size` engines; used as an `EngineClient` is, by one thread.

    The first engine is loaded alone: it fetches what is not here, compiles what is not cached, and
    settles how long contexts may be. Then the others are loaded, and it serves meanwhile.

    Args:
        asked, clock, notify, isolation: see `ProcessClient`.
        early: the first engine's process, where it has been started already.

    Attributes:
        metrics: of the requests and all engines.
        on_step: told of each step of any engine, before its tokens are taken in.

    Raises:
        ValidationError: the machine has too few devices.
    """

    def __init__(
        self,
        asked: EngineConfig,
        clock: ClientClock,
        notify: Callable[[], None],
        isolation: Isolation,
        early: EarlyProcess | None = None,
    ):
        self.on_step: Callable[[StepOutput], None] | None = None
        self.asked = asked
        self._places = places(asked)
        self._make = partial(ProcessClient, clock=clock, notify=notify, isolation=isolation)
        first = self._client(asked, 0, early=early, on_loaded=self._load_others)
        # those that have been started: the first one, then all
        self._engines: tuple[ProcessClient, ...] = (first,)
        self._is_closing = False
        self._given_up: set[int] = set()
        self._routing: Routing[int] | None = None
        self._looks = Looks()
        self.metrics = UnitedMetrics(lambda: [one.metrics for one in self._engines])

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._first.start()

    # -- what it is ------------------------------------------------------------------------------

    @property
    def _first(self) -> ProcessClient:
        return self._engines[0]

    @property
    def config(self) -> ResolvedConfig:
        return self._first.config

    @property
    def ready(self) -> Ready | None:
        """What the first engine has said of itself; None until it is loaded."""
        return self._first.ready

    @property
    def model_config(self) -> ModelFacts:
        return self._first.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValidationError where the engines have none."""
        return self._first.tokenizer

    @property
    def inputs(self) -> InputProcessor:
        """Prepares requests; set once the first engine is loaded."""
        return self._first.inputs

    @property
    def ledger(self) -> Ledger:
        """The admitted requests of all engines, and the room for more."""
        return self._first.ledger

    @property
    def histories(self) -> list[StepHistory]:
        """The last steps of each engine."""
        return [one.history for one in self._engines]

    @property
    def pids(self) -> list[int | None]:
        """Of the engines' processes; None for one that has none."""
        return [one.pid for one in self._engines]

    @property
    def is_ready(self) -> bool:
        """True while an engine serves."""
        return any(one.is_ready for one in self._engines)

    @property
    def is_restarting(self) -> bool:
        """True while none serves, because those that did have died and the next ones load."""
        return not self.is_ready and any(one.is_restarting for one in self._engines)

    @property
    def states(self) -> list[str]:
        """What each engine that was started does, in a word."""
        return [_state(one) for one in self._engines]

    @property
    def silence(self) -> str | None:
        """Why all engines that serve seem to hang; None: one does not, or none serves."""
        told = [one.silence for one in self._engines if one.is_ready]
        return None if None in told or not told else told[0]

    @property
    def is_dead(self) -> bool:
        """True once no engine will serve any more."""
        return all(one.is_dead for one in self._engines)

    @property
    def error(self) -> BaseException | None:
        """What has ended an engine, the last of those that have ended."""
        return next((one.error for one in self._engines[::-1] if one.error is not None), None)

    @error.setter
    def error(self, error: BaseException) -> None:
        for one in self._engines:
            one.error = error

    @property
    def recorder(self) -> TraceRecorder | None:
        """None: nothing is written."""
        return None

    @recorder.setter
    def recorder(self, recorder: TraceRecorder) -> None:
        """Raises ValidationError: what is recorded is the load of one engine."""
        allowed = "1 where a trace is recorded, which is that of one engine"
        raise ValidationError("data_parallel_size", self.asked.data_parallel_size, allowed)

    @property
    def is_paused(self) -> bool:
        """Whether the engines were told to begin no step."""
        return self._first.is_paused

    @property
    def asleep(self) -> list[Action]:
        """What the engines were told that they sleep as they do."""
        return self._first.asleep

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished."""
        return any(one.is_loaded and one.has_work for one in self._engines)

    def check_alive(self) -> None:
        """Raises EngineDeadError while there is none that serves or will serve again."""
        if not self.is_ready and not self.is_restarting:
            self._first.check_alive()

    def death(self) -> EngineDeadError:
        """What every caller is told, a new error each; one that was only closed says so."""
        closed = (one for one in self._engines if one.error is None)
        return next(closed, self._engines[-1]).death()

    def stats(self) -> EngineStats:
        """The newest snapshots of all engines, added up."""
        return self.metrics.stats

    # -- requests --------------------------------------------------------------------------------

    def check_room(self, client: str = "", requests: int = 1) -> None:
        """Refuse requests of a client before any work is spent on them; see `Ledger.check`.

        Raises:
            QueueFullError: too much waits already, by the configured limits.
        """
        with counted(self.metrics.record_refused):
            self.ledger.check(client, requests)

    def admit(self, prepared: Sequence[PreparedRequest]) -> None:
        """Choose engines for the requests of one call and admit them, all or none.

        Raises:
            ValidationError: an id is in use, or one like it has ended an engine twice.
            QueueFullError: too much waits already, by the configured limits.
        """
        for one in prepared:
            for engine in self._engines:
                engine.refuse_guilty(one)
            if self.ledger.is_admitted(one.request_id):
                raise ValidationError("request_id", one.request_id, "an id that is not in use")
        # what is refused is sent to no engine, and routing remembers nothing of it
        with counted(self.metrics.record_refused):
            self.ledger.check_call([work_of(one.group, 0, self.model_config) for one in prepared])
        asked: dict[str, RequestWork] = {}
        work = self._work()
        for one in prepared:
            number = self._route(one.group, one.keys, work)
            asked[one.request_id] = mine = work_of(one.group, number, self.model_config)
            work[number] += mine.num_prompt + mine.sequences * mine.output_work
        self.ledger.take(asked)

    def add(self, prepared: PreparedRequest) -> None:
        """Begin a request with its engine; one that was not admitted is admitted first.

        Raises:
            ValidationError: its id is in use, or one like it has ended an engine twice.
            QueueFullError: too much waits already, by the configured limits.
            EngineDeadError: the engines have ended.
        """
        self.check_alive()
        request_id = prepared.request_id
        is_new = not self.ledger.is_admitted(request_id)
        if is_new:
            self.admit([prepared])
        number = self.ledger.engine_of(request_id)
        assert number is not None
        try:
            if self._engines[number].is_dead:  # it was given up since it was chosen
                number = self._route(prepared.group, prepared.keys, self._work())
                self.ledger.moved(request_id, number)
            self._engines[number].add(prepared)
        except BaseException:
            if is_new:
                self.ledger.ended(request_id)
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now. Returns its last output; None if it is not live."""
        engine = self._of(request_id)
        return None if engine is None else engine.abort(request_id)

    def drop(self, request_id: str) -> None:
        """End a request now without a last output: its caller has gone."""
        engine = self._of(request_id)
        if engine is not None:
            engine.drop(request_id)

    def stop(self, sequence_ids: Sequence[str]) -> list[str]:
        """End sequences that met a stop string where their text is made; the requests that end."""
        return [name for one in self._engines if one.is_loaded for name in one.stop(sequence_ids)]

    def num_generated(self, request_id: str) -> int:
        """Tokens so far of all sequences of a request; 0 of one that has ended."""
        engine = self._of(request_id)
        return 0 if engine is None else engine.num_generated(request_id)

    def outputs(self) -> list[RequestOutput]:
        """New outputs of all engines, and the last outputs of requests that timed out.

        Requests of an engine that is given up go on with another one, or fail where they may be why
        it died or none serves. Raises EngineDeadError if nothing more can come.
        """
        is_dead = self.is_dead  # nothing comes after that
        found: list[RequestOutput] = []
        for number, one in enumerate(self._engines):
            is_lost = one.is_dead
            try:
                found += one.outputs()
            except EngineDeadError:  # it may have died since
                is_lost = True
            if is_lost and number not in self._given_up:
                self._given_up.add(number)
                if one.is_loaded:
                    for_good = self._is_closing or not (self.is_ready or self.is_restarting)
                    for live in one.give_up(for_good=for_good):
                        self._move(live)
                if not self._is_closing:
                    logger.error("engine %d is given up: %s", number, one.error)
            if not one.is_ready and self._routing is not None:
                self._routing.forget(number)
                self.ledger.lost(number)
        if not found and is_dead:
            raise self.death()
        return found

    def take_failures(self) -> dict[str, Exception]:
        """Requests that ended without a last output since the last call, and their errors."""
        return {name: error for one in self._engines for name, error in one.take_failures().items()}

    def next_deadline(self) -> float | None:
        """The latest time, by the clock, of the next call of `outputs`; None: no deadline."""
        times = [one.next_deadline() for one in self._engines]
        return min((one for one in times if one is not None), default=None)

    # -- all engines -----------------------------------------------------------------------------

    def control(self, action: Action, folder: str = "") -> None:
        """Ask for something of all engines; see `Control`. Each records into a folder of its own.

        The client tells an engine that loads to pause or to sleep once the engine is ready.
        """
        if self._routing is not None and action in EMPTIES:
            for number, _ in enumerate(self._engines):
                self._routing.forget(number)
        if action is Action.START_PROFILE:
            self._looks.profile = folder
        for number, one in enumerate(self._engines):
            one.control(action, str(Path(folder, f"engine-{number}")) if folder else "")

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches; running requests go on."""
        self.control(Action.RESET_PREFIX_CACHE)

    def look(self) -> None:
        """Ask for a view of all engines that serve, which comes with the outputs of their steps."""
        self._looks.begin(self._engines)

    def take_view(self) -> EngineView | None:
        """The view of all engines, once they have answered; of one that has died there is none."""
        return self._looks.take(self._engines)

    def close(self) -> None:
        """End the engines and free their device memory."""
        self._is_closing = True
        for one in self._engines:
            one.close()

    def join(self) -> None:
        """Wait for the processes, which `close` ends."""
        for one in self._engines:
            one.join()

    # -- within ----------------------------------------------------------------------------------

    def _client(self, asked: EngineConfig, number: int, **more: Any) -> ProcessClient:
        """The client of one engine."""
        place, log = self._places[number], NumberedLog(logger, number)
        own = settings_of_engine(asked, number)
        client = self._make(own, place=place, number=number, log=log, **more)
        client.on_step = self._stepped
        return client

    def _stepped(self, step: StepOutput) -> None:
        if self.on_step is not None:
            self.on_step(step)

    def _load_others(self, ready: Ready) -> None:
        """Called in a thread of the first engine's, before it serves."""
        shared, others = self._first.shared, len(self._places) - 1
        asked = replace(
            again(self.asked, ready),
            served_model_name=self.asked.model_names,
            data_parallel_size=others,  # that share the memory that is free now
        )
        engines = [self._client(asked, one, shared=shared) for one in range(1, others + 1)]
        cache = ready.config.cache
        self._routing = Routing[int](cache.page_size, cache.num_pages)
        self._engines = (self._first, *engines)
        for engine in engines:
            if not self._is_closing:
                engine.start()

    def _of(self, request_id: str) -> ProcessClient | None:
        """The engine that has a request, or is to have it."""
        number = self.ledger.engine_of(request_id)
        return None if number is None else self._engines[number]

    def _candidates(self) -> list[int]:
        """Engines that may be sent something: those that step, else those that will."""
        of = {number: one for number, one in enumerate(self._engines) if not one.is_dead}
        ready = [number for number, one in of.items() if one.is_ready]
        steps = [number for number in ready if of[number].silence is None]
        loading = [number for number, one in of.items() if one.is_restarting]
        return steps or ready or loading or [0]

    def _work(self) -> dict[int, float]:
        """What the engines that may be chosen have to compute, in tokens."""
        return {number: float(self.ledger.work(number)) for number in self._candidates()}

    def _move(self, live: LiveRequest) -> None:
        """Have another engine go on with a request."""
        assert live.group is not None
        number = self._route(live.group, (), self._work())
        self.ledger.moved(live.request_id, number)
        self._engines[number].take_over(live)

    def _route(self, group: AddGroup, keys: Sequence[bytes], work: dict[int, float]) -> int:
        assert self._routing is not None
        client, session = group.queueing.client, group.queueing.session
        names = [f"session {session} {client}"] if session else []
        names += [] if group.cache_salt is None else [f"salt {group.cache_salt}"]
        num_prompt = len(group.prompt_token_ids)
        return self._routing.choose(work, num_prompt, keys, names=names, client=client)


def _state(engine: ProcessClient) -> str:
    if engine.is_ready:
        return "ok" if engine.silence is None else "silent"
    return "dead" if engine.is_dead else "restarting" if engine.is_restarting else "loading"
