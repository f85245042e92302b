"""The client of an engine in a process of its own: what a death means for requests.

The supervisor starts the process and says when it has died and when another one is there. What that
one is sent, and which requests go on, is decided here, in the thread that uses the client.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxserve.boundary.messages import (
    Abort,
    Action,
    AddGroup,
    Body,
    Control,
    EngineStats,
    FirstSteps,
    StepOutput,
)
from jaxserve.boundary.prompt_spans import IMAGES
from jaxserve.client.engine_client import EngineClient, Shared
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.client.live_request import LiveRequest
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.config.named_object import importable_name
from jaxserve.errors import EngineDeadError, MessageError, ShutdownError, ValidationError
from jaxserve.isolation.replay import resumed
from jaxserve.isolation.supervisor import EngineDeath, EngineStart, Supervisor
from jaxserve.isolation.suspects import MOST_DEATHS, Suspects
from jaxserve.observability.numbered_log import Log
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import ERROR, RequestOutput
from jaxserve.processes.engine_process import EngineProcess
from jaxserve.processes.launch import ANYWHERE, EarlyProcess, Place
from jaxserve.processes.wire import MAX_MESSAGE_BYTES, Ready, Sync
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TIDY = 1024  # groups that are remembered, beside twice the live ones
MOST_TRIED = 256  # sequences of a request that is taken out of the engine again after its trial


class ProcessClient(EngineClient):
    """Serves by an engine in a child process.

    Args:
        asked: what the user asked for; `config` is there once ready.
        clock: of the thread that uses the client.
        notify: called in a thread of the client's own when outputs have come, when the engine has
            died or is there again, and when it has ended.
        isolation: how it is watched.
        early: the first process, where it has been started already.
        place, log: see `Supervisor`.
        number: of its engine, where a server has several.
        shared: what it has in common with clients of others that are loaded; None: there is none.
        on_loaded: called once, in a thread of the client's, when the first engine is loaded.
        tells_server: whether its metrics tell of this process.
    """

    resumes = True

    def __init__(
        self,
        asked: EngineConfig,
        clock: ClientClock,
        notify: Callable[[], None],
        isolation: Isolation,
        early: EarlyProcess | None = None,
        *,
        place: Place = ANYWHERE,
        number: int = 0,
        shared: Shared | None = None,
        on_loaded: Callable[[Ready], None] | None = None,
        log: Log = logger,
        tells_server: bool = True,
    ):
        super().__init__(asked.model_names[0], asked.metrics_prefix, clock, number, shared)
        asked = replace(
            asked,
            features=tuple(importable_name("features", one) for one in asked.features),
            logits_processors=tuple(
                importable_name("logits_processors", one) for one in asked.logits_processors
            ),
        )
        self.asked = asked
        self._supervisor = Supervisor(
            asked,
            isolation,
            on_start=self._load_tokenizer,
            on_ready=self._bind_ready,
            has_work=lambda: self.has_work and not self.is_paused,
            notify=notify,
            early=early,
            place=place,
            log=log,
        )
        self._on_loaded, self._log = on_loaded, log
        self._early_tokenizer: Tokenizer | None = None
        self._process: EngineProcess | None = None
        self._begun: set[str] = set()  # numbers of the groups that may have been in a step
        self._tidy_at = TIDY
        self._suspects = Suspects()
        self._settling = False  # the one on trial is being taken out of the engine
        self._earlier: EngineStats | None = None  # what engines that have died had counted
        self._outputs: list[RequestOutput] = []
        told_once = {"server": os.getpid} if number == 0 and tells_server else {}
        self.metrics.watch_processes({**told_once, "engine": lambda: self.pid})
        self.metrics.watch_serving(lambda: self.is_ready)
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._supervisor.start()

    @property
    def is_loaded(self) -> bool:
        """True once the first engine is loaded, whatever has become of it."""
        return self._supervisor.loaded.is_set()

    @property
    def is_ready(self) -> bool:
        """True while an engine serves."""
        return self._supervisor.serving.is_set() and not self.is_dead

    @property
    def is_restarting(self) -> bool:
        """True while there is none, because one has died and the next one loads."""
        return self.is_loaded and not self.is_ready and not self.is_dead

    @property
    def silence(self) -> str | None:
        """Why an engine that serves seems to hang, for people; None: it does not."""
        return self._supervisor.silence.reason if self.is_ready else None

    @property
    def is_dead(self) -> bool:
        """True once nothing will be served any more."""
        return self._supervisor.ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What has ended it."""
        return self._error or self._supervisor.error

    @error.setter
    def error(self, error: BaseException) -> None:
        self._error = error

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        return self._supervisor.pid

    def check_alive(self) -> None:
        if self.is_dead:
            raise self.death()
        if not self.is_loaded:
            raise EngineDeadError("the engine is still loading")

    def death(self) -> EngineDeadError:
        """What every caller is told, a new error each."""
        if self.error is None:
            return ShutdownError("the engine was shut down: make a new one, or restart the server")
        death = EngineDeadError(str(self.error))
        death.__cause__ = self.error
        return death

    def add(self, prepared: PreparedRequest) -> None:
        self.check_alive()
        size, most = sum(len(span.data) for span in prepared.group.spans), MAX_MESSAGE_BYTES // 2
        if size > most:
            raise ValidationError("prompt", f"{size} bytes in the place of ids", f"{most} bytes")
        self._handle_events()
        self.refuse_guilty(prepared)
        try:
            super().add(prepared)
        except MessageError as error:
            allowed = f"values that can be sent to the engine ({error})"
            raise ValidationError("request", prepared.request_id, allowed) from error

    def refuse_guilty(self, prepared: PreparedRequest) -> None:
        """Raises ValidationError if one like it has ended the engine's process twice."""
        if self._suspects.is_guilty(prepared.group):
            allowed = "one that has not ended the engine's process twice, the second time alone"
            raise ValidationError("request", prepared.request_id, allowed)

    def abort(self, request_id: str) -> RequestOutput | None:
        output = super().abort(request_id)
        self._ended_request(request_id)
        return output

    def drop(self, request_id: str) -> None:
        super().drop(request_id)
        self._ended_request(request_id)

    def stop(self, sequence_ids: Sequence[str]) -> list[str]:
        over = super().stop(sequence_ids)
        for request_id in over:
            self._ended_request(request_id)
        return over

    def outputs(self) -> list[RequestOutput]:
        is_dead = self.is_dead  # nothing comes after that
        self._handle_events()
        found, self._outputs = self._outputs, []
        for output in self._expired():
            self._ended_request(output.request_id)
            found.append(output)
        for request_id in self._failures:
            self._ended_request(request_id)
        if not found and is_dead:
            raise self.death()
        return found

    def give_up(self, *, for_good: bool) -> list[LiveRequest]:
        """End what is left, once nothing will be served here any more.

        Args:
            for_good: no other engine serves either: every request fails.

        Returns:
            requests that go on with another engine, see `take_over`: those that were not in the
            last steps of an engine that died. The others fail, since one of them may be why.
        """
        going = []
        for request_id in self._processor.live_requests():
            is_suspected = self._suspects.is_suspected(request_id)
            if for_good or is_suspected or self._number_of(request_id) in self._begun:
                self._fail(request_id, self.death())
                continue
            self._deadlines.discard(request_id)
            self._queue_deadlines.discard(request_id)
            going.append(self._processor.release(request_id))
        stats = self.stats()._replace(num_running=0, num_waiting=0, page_usage=0.0)
        self.metrics.record_stats(stats)
        return going

    def take_over(self, live: LiveRequest) -> None:
        """Go on with a request that another engine's client has given up."""
        request_id = live.request_id
        self._processor.adopt(live)
        found = self._processor.unfinished(request_id)
        self._set_deadlines(request_id, found.group, waits=not any(found.tokens.values()))
        for group in resumed(found):
            self._post(group)

    def look(self) -> None:
        self._handle_events()
        super().look()

    def close(self) -> None:
        self._end_checks()
        self._supervisor.close()
        self._handle_events()
        if self._process is not None:
            self._process.send(Control(Action.CLOSE))

    def join(self) -> None:
        """Wait for the process, which `close` ends."""
        self._supervisor.join()

    # -- what is sent ----------------------------------------------------------------------------

    def _post(self, body: Body) -> None:
        """Send, if an engine may hear it now; what one has to know it is sent when it may."""
        if self._process is None or (self._suspects and isinstance(body, AddGroup)):
            return
        self._send(body)

    def _send(self, body: Body) -> None:
        assert self._process is not None
        self._supervisor.silence.asked()
        if isinstance(body, AddGroup) and any(one.part == IMAGES for one in body.spans):
            # the encoder runs before any step, and may end the process as a step may
            self._begun.add(_number(body.sequence_ids[0]))
        self._process.send(body)

    def _send_again(self, request_id: str) -> None:
        for group in resumed(self._processor.unfinished(request_id)):
            self._send(group)

    # -- what has come, in the thread that uses the client ---------------------------------------

    def _handle_events(self) -> None:
        events = self._supervisor.events
        while events:
            event = events.popleft()
            match event:
                case EngineStart(process):
                    self._started(process)
                case EngineDeath(how):
                    self._died(how)
                case _:
                    self._outputs += self._take_body(event)

    def _take_body(self, body: Body) -> list[RequestOutput]:
        match body:
            case StepOutput():
                return self._take(body)
            case FirstSteps():
                self._take_begun(body)
            case Sync():
                self._settled()
        return []

    def _take_begun(self, body: FirstSteps) -> None:
        self._begun.update(map(_number, body.sequence_ids))
        if len(self._begun) > self._tidy_at:  # most of them have ended
            live = {self._number_of(name) for name in self._processor.live_requests()}
            self._begun &= live
            self._tidy_at = 2 * len(live) + TIDY

    def _take(self, step: StepOutput) -> list[RequestOutput]:
        if self._earlier is not None:
            step = replace(step, stats=step.stats.after(self._earlier))
        outputs = super()._take(step)
        for output in outputs:
            if output.finished:
                self._ended_request(output.request_id)
        for request_id in self._failures:
            self._ended_request(request_id)
        if self._suspects.on_trial is not None and not self._settling:
            self._tried(len(set(step.sequence_ids)))  # forced tokens come many at a time
        return outputs

    def _ended_request(self, request_id: str) -> None:
        self._suspects.forget(request_id)
        if self._suspects.on_trial == request_id and not self._settling:
            self._settle([])

    def _started(self, process: EngineProcess) -> None:
        """There is an engine, which knows nothing: neither requests, nor that it is to sleep."""
        self._process = process
        self._settling = False
        self._begun.clear()
        for action in ([Action.PAUSE] if self.is_paused else []) + self.asleep:
            self._send(Control(action))
        self.ledger.restarted(self.number)
        if self._earlier is not None:
            self.metrics.record_restart()
        self._try_next()

    def _died(self, how: str) -> None:
        """The engine has died with what it was doing."""
        if self._process is None:
            return  # the next one died while it loaded
        self._process = None
        self._earlier = self.metrics.stats
        live = self._processor.live_requests()
        dead = [name for name in live if self._number_of(name) in self._begun]
        alone = dead == [self._suspects.on_trial]
        ended = self._suspects.died(dead, live)
        if alone and ended == dead:
            self._suspects.convict(self._processor.group(dead[0]))
            self._supervisor.forgive(MOST_DEATHS)
        for request_id in ended:
            text = "while this request was in its steps, for the second time"
            self._fail(request_id, EngineDeadError(f"the engine's process {how} {text}"))
        self._log.warning(
            "the engine's process %s: %d requests were in its last steps, of which %d end with an "
            "error and the others go on; %d waited",
            how,
            len(dead),
            len(ended),
            len(live) - len(dead),
        )

    def _fail(self, request_id: str, error: EngineDeadError) -> None:
        self._processor.drop(request_id, finish=ERROR)
        self._forget(request_id)
        self._suspects.forget(request_id)
        self._failures[request_id] = error

    # -- one at a time, after a death ------------------------------------------------------------

    def _try_next(self) -> None:
        """Have the next suspect run alone, or, once there is none, all that are left."""
        request_id = self._suspects.next()
        if request_id is None:
            for name in self._processor.live_requests():
                self._send_again(name)
            return
        self._suspects.begin(len(self._processor.unfinished(request_id).tokens))
        self._send_again(request_id)

    def _tried(self, num_sequences: int) -> None:
        """Sequences of the one that runs alone got tokens."""
        if not self._suspects.got(num_sequences):
            return
        assert self._suspects.on_trial is not None
        ids = [*self._processor.unfinished(self._suspects.on_trial).tokens]
        if len(ids) <= MOST_TRIED:
            self._settle(ids)

    def _settle(self, sequence_ids: list[str]) -> None:
        """Take what was on trial out of the engine, and wait until that is done."""
        if self._process is None:
            return
        if sequence_ids:
            self._send(Abort(sequence_ids))
        self._settling = True
        self._send(Sync())

    def _settled(self) -> None:
        self._settling = False
        self._begun.clear()
        self._try_next()

    def _number_of(self, request_id: str) -> str:
        return _number(self._processor.group(request_id).sequence_ids[0])

    def _load_tokenizer(self) -> None:
        """Where it is here already: a broken one is found before the weights are loaded."""
        if self._shared is not None:
            return
        folder = Path(self.asked.tokenizer or self.asked.model)
        if not self.asked.skip_tokenizer_init and (folder / TOKENIZER_FILE).is_file():
            self._early_tokenizer = Tokenizer(folder, self.asked.chat_template)

    def _bind_ready(self, ready: Ready) -> None:
        """Called in the supervisor's thread when the first engine is ready, before any request."""
        self.ready = ready
        config, tokenizer = ready.config, self._early_tokenizer
        if self._shared is not None or config.asked.skip_tokenizer_init:
            tokenizer = None
        elif tokenizer is None or Path(tokenizer.path) != Path(ready.tokenizer_folder):
            tokenizer = Tokenizer(ready.tokenizer_folder, self.asked.chat_template)
        self._bind(config, ready.model, tokenizer, ready.page_bytes, ready.model_folder)
        if self._on_loaded is not None:
            self._on_loaded(ready)


def _number(sequence_id: str) -> str:
    """What all sequences of a group have in common."""
    return sequence_id.partition(".")[0]
