"""The clients of an engine: prompts in, outputs out, wherever the engine runs.

A client checks requests, sends messages and makes text of the tokens that come back; the engine
sees neither strings nor callers.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from jaxserve.boundary.engine_view import EngineView
from jaxserve.boundary.image_facts import facts_of
from jaxserve.boundary.messages import (
    WOKEN_BY,
    Abort,
    Action,
    AddGroup,
    Body,
    Control,
    EngineStats,
    StepOutput,
)
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.prompt_spans import IMAGES
from jaxserve.boundary.step_history import StepHistory
from jaxserve.client.deadlines import Deadlines
from jaxserve.client.input_processor import InputProcessor, Params, PreparedRequest
from jaxserve.client.output_processor import OutputProcessor
from jaxserve.client.prompt_reader import Prompt
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import QueueFullError, ValidationError
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.request_lives import RequestLives
from jaxserve.observability.step_clock import ClientClock
from jaxserve.observability.trace_recorder import TraceRecorder
from jaxserve.outputs import TIMEOUT, RequestOutput
from jaxserve.processes.wire import Ready
from jaxserve.request.queueing import Queueing
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.ledger_accounts import RequestWork
from jaxserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.loading.engine_build import (
        LoadedEngine,  # imports jax, which a client of a process can do without
    )


logger = logging.getLogger(__name__)


class Shared(NamedTuple):
    """What the clients of several engines of one model have in common.

    Attributes:
        inputs: prepares requests.
        ledger: the admitted requests of all.
        tokenizer: None where `skip_tokenizer_init` is set.
    """

    inputs: InputProcessor
    ledger: Ledger
    tokenizer: Tokenizer | None


class EngineClient(ABC):
    """Serves requests. One thread uses it; `prepare` alone may be called from any thread.

    Clients differ in how messages get to the engine and back.

    Attributes:
        config: of the engine; set once the engine is loaded.
        metrics: of the requests and the engine.
        history: the engine's last steps.
        is_paused: the engine was told to begin no step.
        asleep: what the engine was told that it sleeps as it does: which way to free its memory,
            then which part to take back; empty while it is awake.
        recorder: writes the load down; None: nothing is written.
        on_step: told of each step, before its tokens are taken in.
        ready: what an engine in a process of its own has said of itself; None: nothing.
        number: of its engine, where a server has several.
        shared: set once the engine is loaded.
    """

    config: ResolvedConfig
    resumes: ClassVar[bool] = False  # whether requests may be sent to a second engine
    # whether a request ends that has waited for max_queue_wait: not where a call waits for itself
    refuses_late: ClassVar[bool] = True

    def __init__(
        self,
        model_name: str,
        metrics_prefix: str,
        clock: ClientClock,
        number: int = 0,
        shared: Shared | None = None,
    ):
        self.number = number
        self.metrics = Metrics(_label(model_name), metrics_prefix, str(number))
        self.history = StepHistory()
        self._clock = clock
        self._deadlines = Deadlines()
        self._queue_deadlines = Deadlines()  # of first steps
        self._failures: dict[str, Exception] = {}
        self._view: EngineView | None = None
        self.is_paused = False
        self.asleep: list[Action] = []
        self._shared = shared
        self.recorder: TraceRecorder | None = None
        self.on_step: Callable[[StepOutput], None] | None = None
        self.ready: Ready | None = None

    def _bind(
        self,
        config: ResolvedConfig,
        model: ModelFacts,
        tokenizer: Tokenizer | None,
        page_bytes: int,
        folder: str = "",
    ) -> None:
        """Called once the engine is loaded.

        Args:
            config: with the engine's decisions.
            model: facts of the model that it serves.
            tokenizer: None when `skip_tokenizer_init` is set; what clients share has another one.
            page_bytes: of one KV page over all layers and devices.
            folder: of the model's files.
        """
        self.config = config
        self._model_config = model
        if self._shared is None:
            engines = config.asked.data_parallel_size
            self._shared = Shared(
                InputProcessor(config, model, tokenizer, folder),
                Ledger(config, self._clock.now, engines),
                tokenizer,
            )
        self.page_bytes = page_bytes
        self.metrics.set_engine(config, page_bytes)
        self._processor = OutputProcessor(
            self.shared.tokenizer, self.metrics, self._clock, keeps_groups=self.resumes
        )
        if self.recorder is not None:
            self.recorder.begin(config)

    @abstractmethod
    def _post(self, body: Body) -> None:
        """Send a message to the engine."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raises EngineDeadError once the engine has failed or was closed."""

    @abstractmethod
    def outputs(self) -> list[RequestOutput]:
        """New outputs since the last call, and the last outputs of requests that timed out.

        Raises EngineDeadError if nothing more can come.
        """

    @property
    def model_config(self) -> ModelFacts:
        return self._model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValidationError where the engine has none."""
        tokenizer = self.shared.tokenizer
        if tokenizer is None:
            raise ValidationError("skip_tokenizer_init", True, "False where a tokenizer is used")
        return tokenizer

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished."""
        return self._processor.has_live

    def prepare(
        self, prompt: Prompt, params: Params, request_id: str, queueing: Queueing | None = None
    ) -> PreparedRequest:
        """Check and tokenise one request; see `InputProcessor.prepare`."""
        return self.inputs.prepare(prompt, params, request_id, queueing)

    @property
    def shared(self) -> Shared:
        """What it has in common with clients of other engines; set once the engine is loaded."""
        assert self._shared is not None
        return self._shared

    @property
    def inputs(self) -> InputProcessor:
        """Prepares requests."""
        return self.shared.inputs

    @property
    def ledger(self) -> Ledger:
        """The admitted requests, and the room for more."""
        return self.shared.ledger

    @property
    def states(self) -> list[str]:
        """What each of several engines does; empty where there is one."""
        return []

    @property
    def histories(self) -> list[StepHistory]:
        """The last steps of each engine, of which there is one."""
        return [self.history]

    def admit(self, prepared: Sequence[PreparedRequest]) -> None:
        """Admit the requests of one call, all or none; the caller adds or ends each of them next.

        Raises:
            ValidationError: an id is in use.
            QueueFullError: too much waits already, by the configured limits.
        """
        for one in prepared:
            self._check_id(one.request_id)
        model = self.model_config
        works = {one.request_id: work_of(one.group, self.number, model) for one in prepared}
        with counted(self.metrics.record_refused):
            self.ledger.admit(works)

    def add(self, prepared: PreparedRequest) -> None:
        """Begin a request; one that was not admitted is admitted first.

        Raises:
            ValidationError: its id is in use.
            QueueFullError: too much waits already, by the configured limits.
            EngineDeadError: the engine has ended.
        """
        request_id = prepared.request_id
        if not self.ledger.is_admitted(request_id):
            self.admit([prepared])
        elif self._processor.is_live(request_id):
            self._check_id(request_id)
        try:
            self._post(prepared.group)
        except BaseException:
            self.ledger.ended(request_id)
            raise
        self._processor.add(prepared)
        if self.recorder is not None:
            self.recorder.added(request_id, prepared.group)
        self._set_deadlines(request_id, prepared.group, waits=True)

    def _set_deadlines(self, request_id: str, group: AddGroup, *, waits: bool) -> None:
        """Start the deadlines of a request; `waits`: for its first step."""
        turn = group.queueing
        if turn.timeout is not None:
            self._deadlines.add(request_id, turn.arrival_time + turn.timeout)
        if waits and not _waits_first(group):
            self._queued(request_id)

    def next_deadline(self) -> float | None:
        """The latest time, by the clock, of the next call of `outputs`; None: no deadline."""
        times = (self._deadlines.next, self._queue_deadlines.next)
        return min((one for one in times if one is not None), default=None)

    def check_room(self, client: str = "", requests: int = 1) -> None:
        """Refuse requests of a client before any work is spent on them; see `Ledger.check`.

        Raises:
            QueueFullError: too much waits already, by the configured limits.
        """
        with counted(self.metrics.record_refused):
            self.ledger.check(client, requests)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now. Returns its last output; None if it is not live."""
        return self._end(request_id, None)

    def take_failures(self) -> dict[str, Exception]:
        """Requests that ended without a last output since the last call, and their errors."""
        found, self._failures = self._failures, {}
        return found

    def num_generated(self, request_id: str) -> int:
        """Tokens so far of all sequences of a request; 0 of one that has ended."""
        return self._processor.num_generated(request_id)

    def drop(self, request_id: str) -> None:
        """End a request now without a last output: its caller has gone."""
        self._end_sequences(request_id, self._processor.drop(request_id))

    def stop(self, sequence_ids: Sequence[str]) -> list[str]:
        """End sequences that met a stop string where their text is made; the requests that end."""
        found = self._processor.stop(sequence_ids)
        if found:
            self._post(Abort([*sequence_ids]))
        for request_id, _ in found:
            self.ledger.sequence_ended(request_id)
        over = [request_id for request_id, is_over in found if is_over]
        for request_id in over:
            self._forget(request_id)
        return over

    def stats(self) -> EngineStats:
        """The engine's newest snapshot: queues, pages, steps, where their time went."""
        return self.metrics.stats

    def control(self, action: Action, folder: str = "") -> None:
        """Ask for something of the engine as a whole; see `Control`."""
        match action:
            case Action.PAUSE | Action.RESUME:
                self.is_paused = action is Action.PAUSE
            case Action.SLEEP | Action.DEEP_SLEEP | Action.RELEASE_KV_CACHE:
                self.asleep = [action]
            case Action.WAKE_WEIGHTS | Action.WAKE_KV_CACHE:
                self.asleep.append(action)
                if WOKEN_BY.get(self.asleep[0], frozenset()).issubset(self.asleep):
                    self.asleep = []
        levels = {Action.SLEEP: 1, Action.DEEP_SLEEP: 2, Action.RELEASE_KV_CACHE: None}
        self.metrics.record_sleep(levels[self.asleep[0]] if self.asleep else 0)
        self._post(Control(action, folder))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests go on."""
        self.control(Action.RESET_PREFIX_CACHE)

    def look(self) -> None:
        """Ask for a view of the engine, which comes with the outputs of a step."""
        self.control(Action.LOOK)

    def take_view(self) -> EngineView | None:
        """The view that came since the last call, or None; its slots bear the ids of requests."""
        found, self._view = self._view, None
        return found

    def close(self) -> None:
        """End the engine and free its device memory."""
        self._end_checks()
        self._post(Control(Action.CLOSE))

    def _end_checks(self) -> None:
        if self._shared is not None:
            self._shared.inputs.close()

    def _end(self, request_id: str, why: str | None) -> RequestOutput | None:
        output, sequences = self._processor.abort(request_id, why)
        self._end_sequences(request_id, sequences)
        return output

    def _end_sequences(self, request_id: str, sequences: list[str]) -> None:
        """Tell the engine to end sequences of a request."""
        self._forget(request_id)
        if sequences:
            self._post(Abort(sequences))

    def _forget(self, request_id: str) -> None:
        """Drop the deadlines and the ledger's entry of a request that has ended."""
        self._deadlines.discard(request_id)
        self._queue_deadlines.discard(request_id)
        self.ledger.ended(request_id)
        if self.recorder is not None:
            self.recorder.ended(request_id)

    def _queued(self, request_id: str) -> None:
        """Start `max_queue_wait` of a request: from now on it waits for its first step alone."""
        most = self.config.asked.max_queue_wait or math.inf
        if self.refuses_late and most < math.inf:
            self._queue_deadlines.add(request_id, self._clock.now() + most)

    def _check_id(self, request_id: str) -> None:
        if self._processor.is_live(request_id) or self.ledger.is_admitted(request_id):
            raise ValidationError("request_id", request_id, "an id that is not in use")

    def _expired(self) -> list[RequestOutput]:
        """Last outputs of requests that timed out; requests over `max_queue_wait` fail."""
        if self._queue_deadlines:
            for name in self._queue_deadlines.due(self._clock.now()):
                self._refuse_late(name)
        if not self._deadlines:
            return []
        ended = [self._end(name, TIMEOUT) for name in self._deadlines.due(self._clock.now())]
        return [output for output in ended if output is not None]

    def _refuse_late(self, request_id: str) -> None:
        """End a request that has had no first step within max_queue_wait."""
        most = self.config.asked.max_queue_wait or math.inf
        self._end_sequences(request_id, self._processor.drop(request_id))
        self.metrics.record_refused("max_queue_wait")
        text = f"the request had no first step within {most:g} s"
        self._failures[request_id] = QueueFullError("max_queue_wait", text, most)

    def _take(self, step: StepOutput) -> list[RequestOutput]:
        """Turn one step's tokens into outputs, and end sequences that met a stop string."""
        if self.on_step is not None:
            self.on_step(step)
        if step.step is not None:
            self.history.record(step.step)
        self.metrics.record_step(step)
        if self.recorder is not None:
            self.recorder.took(step, self._clock.now())
        name_of, ledger = self._processor.request_of, self.ledger
        for one in step.queued:
            if (name := name_of(one)) is not None and ledger.compiled(name):
                self._queued(name)
        begun: list[str] = []
        if step.first_steps:
            begun = [name for one in step.first_steps if (name := name_of(one)) is not None]
        for name in begun:
            self._queue_deadlines.discard(name)
        for entry in step.ends:
            if (name := name_of(step.sequence_ids[entry])) is not None:
                ledger.sequence_ended(name)
        processed = self._processor.process(step)
        for name in processed.stopped.values():
            ledger.sequence_ended(name)
        ended_at = None if step.step is None else step.step.fetched
        ledger.stepped(begun, step.stats.num_running, ended_at, self.number)
        for output in processed.outputs:
            if output.finished:
                self._forget(output.request_id)
        if processed.refused:
            self._failures |= processed.refused
            for name in processed.refused:
                self._forget(name)
        if processed.stopped:
            self._post(Abort([*processed.stopped]))
        self.metrics.record_stats(self._with_own_times(step.stats))
        if step.view is not None:
            self._view = self._with_request_ids(step.view)
        return processed.outputs

    def _with_request_ids(self, view: EngineView) -> EngineView:
        name_of = self._processor.request_of
        slots = [one._replace(sequence_id=name_of(one.sequence_id) or "") for one in view.slots]
        return view._replace(slots=slots)

    def _with_own_times(self, stats: EngineStats) -> EngineStats:
        if self.number:  # the clock is one of all engines' clients, and told once
            return stats
        return stats._replace(times=self._clock.add_to(stats.times))


def work_of(group: AddGroup, engine: int, model: ModelFacts) -> RequestWork:
    """What a request asks of the engine with this number, for the ledger."""
    media = sum(len(one.data) for one in group.spans)
    images = [one for one in group.spans if one.part == IMAGES]
    rows = sum(facts_of(model).rows_made(one.shape, one.length) for one in images)
    media += 4 * model.hidden_size * rows
    turn = group.queueing
    num_prompt, sequences = len(group.prompt_token_ids), len(group.sequence_ids)
    waits, asked = _waits_first(group), group.num_output_asked
    work = turn.client, num_prompt, sequences, turn.priority, waits, asked, engine
    return RequestWork(*work, media_bytes=media)


def _waits_first(group: AddGroup) -> bool:
    """Whether a group waits for its grammar or its images before it is queued."""
    waits = group.grammar is not None or group.thoughts is not None
    return waits or any(one.part == IMAGES for one in group.spans)


def _label(model_name: str) -> str:
    """The model's name in metrics; of a path of this machine only its end."""
    return Path(model_name).name if Path(model_name).exists() else model_name


class LocalClient(EngineClient):
    """The client of an engine that the caller's own thread steps.

    Attributes:
        engine: the engine itself, for benchmarks of its parts.
        lives: records of the last requests.
    """

    refuses_late = False

    def __init__(self, loaded: LoadedEngine):
        config = loaded.decided.config
        asked = config.asked
        super().__init__(asked.model_names[0], asked.metrics_prefix, ClientClock())
        self.engine = loaded.engine
        self.lives = RequestLives()
        self.engine.on_dispatch = self.lives.planned
        decided, page_bytes = loaded.decided, loaded.page_bytes
        self._bind(config, decided.model, loaded.tokenizer, page_bytes, decided.model_path)

    @property
    def has_work(self) -> bool:
        """True also while a step is in flight."""
        return self.engine.has_work

    def check_alive(self) -> None:
        self.engine.check_alive()

    def outputs(self) -> list[RequestOutput]:
        """Run one step and return its outputs."""
        expired = self._expired()
        found = expired + self._take(self.engine.step())
        self.lives.ended(found)
        return found

    def add(self, prepared: PreparedRequest) -> None:
        try:
            super().add(prepared)
        except KeyboardInterrupt:
            # the engine may have it already, and would run it without a caller
            if not self._processor.is_live(prepared.request_id):
                self._post(Abort(prepared.group.sequence_ids))
            raise
        self.lives.added(prepared)

    def _take(self, step: StepOutput) -> list[RequestOutput]:
        self.lives.took(step, self._clock.now())
        return super()._take(step)

    def stats(self) -> EngineStats:
        return self._with_own_times(self.engine.stats())

    def _post(self, body: Body) -> None:
        self.engine.handle(body)


@contextmanager
def counted(record_refused: Callable[[str], None]) -> Iterator[None]:
    """Requests that are refused within for want of room are counted by the limit."""
    try:
        yield
    except QueueFullError as error:
        record_refused(error.limit)
        raise
