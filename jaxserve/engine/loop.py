"""The loop: plan -> dispatch -> commit. The only file that knows both the scheduler and the device.

With overlap the device runs step N while the host commits step N-1 and plans step N+1; the tokens
that a step feeds on are on the device, so the host need not have seen them. `overlap=False` commits
each step before the next is planned: the same tokens. Stages have a step in flight each.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable

from jaxserve.boundary.engine_view import EngineView
from jaxserve.boundary.messages import (
    Abort,
    Action,
    AddGroup,
    Body,
    Control,
    EngineStats,
    FirstSteps,
    Hypothesis,
    StepOutput,
)
from jaxserve.boundary.reports import LOGPROBS
from jaxserve.engine.counts import EngineCounts
from jaxserve.engine.features import EngineFeatures, Reports
from jaxserve.engine.integrity import Integrity
from jaxserve.engine.pace import Pace
from jaxserve.engine.request_intake import RequestIntake
from jaxserve.errors import MessageError, RowError
from jaxserve.execution.encoder import Encoder
from jaxserve.execution.results import PackedStep, StepInFlight
from jaxserve.execution.runner import Runner
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.models.cost import ModelCost
from jaxserve.observability.busy_window import BusyWindow
from jaxserve.observability.profiler_trace import BackgroundProfile
from jaxserve.observability.step_clock import StepClock
from jaxserve.request.request import Request
from jaxserve.scheduling.beams import BeamGroups
from jaxserve.scheduling.plan import SeenTokens, StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.view import view_of


class Engine:
    """Advances requests step by step. Not thread-safe: one thread owns it.

    It knows no feature by its name but the one that tells beam searches what may follow: a search
    is not a feature, since it decides which sequences there are, not what is computed for them.

    Args:
        scheduler: decides the steps.
        runner: runs them; its programs must be warmed up.
        overlap: dispatch a step before the tokens of the previous one are seen.
        grammars: compiles them; None: there is no tokenizer, so there are none.
        cost: counts the work of each step; None: it is not counted.
        busy: counts how much of the time the device had work.
        encoder: see `Host`.

    Attributes:
        announce: called before a step is dispatched with the sequences that may be in one for the
            first time, where there are any.
        pace: is told of each step, where its time is watched.
        on_dispatch: called with the number and the plan of each step that was dispatched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        grammars: GrammarCompiler | None = None,
        cost: ModelCost | None = None,
        busy: BusyWindow | None = None,
        encoder: Encoder | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.is_closed = self.is_paused = False
        self.announce: Callable[[FirstSteps], None] | None = None
        self.pace: Pace | None = None
        self.on_dispatch: Callable[[int, StepPlan], None] | None = None
        self._overlap = overlap
        self._in_flight: deque[StepInFlight] = deque()
        self._num_groups = scheduler.limits.num_groups
        self._most_in_flight = max(2, self._num_groups) if overlap else 1
        self._counts = EngineCounts(scheduler, cost, encoder)
        self._clock = StepClock()
        self._busy = BusyWindow() if busy is None else busy
        told = grammars, scheduler.force, runner.write_rows, runner.put_state, encoder
        self.features = EngineFeatures(runner.features, runner.ropes, *told)
        self._beams = BeamGroups(scheduler, self.features.ended)
        self._arrivals = RequestIntake(scheduler, self.features, self._beams, self._clock)
        self._integrity = Integrity(scheduler)
        self._is_watched = False  # the next output brings a view
        self._profile = BackgroundProfile()

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished, a step is in flight or an output is not sent."""
        waits = self.scheduler.has_unfinished or bool(self._arrivals) or bool(self._beams)
        return waits or bool(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """True while a step would do nothing before a message comes."""
        return not self.has_work or (self.is_paused and not self._in_flight)

    def check_alive(self) -> None:
        """Raises EngineDeadError once a step has failed or the engine was closed."""
        self.runner.check_alive()

    def handle(self, body: Body) -> None:
        """Do what a client asks for.

        Raises:
            MessageError: this is no message for an engine.
            EngineDeadError: sequences are to be added, but a step has failed or the engine was
                closed.
        """
        match body:
            case AddGroup():
                self.check_alive()
                self._arrivals.add(body)
            case Abort():
                self._arrivals.abort(body.sequence_ids)
            case Control(action=Action.CLOSE):
                self.close()
            case Control(action=Action.RESET_PREFIX_CACHE):
                self.scheduler.reset_prefix_cache()
            case Control(action=Action.RESET_ENCODER_CACHE):
                self.features.forget_encoded()
            case Control(action=Action.LOOK):
                self._is_watched = True
            case Control(action=Action.PAUSE | Action.RESUME):
                self.is_paused = body.action is Action.PAUSE
                self._clock.paused()
            case Control(action=Action.START_PROFILE):
                self._profile.start(body.folder)
            case Control(action=Action.STOP_PROFILE):
                self._profile.stop()
            case Control(action=Action.SLEEP | Action.DEEP_SLEEP | Action.RELEASE_KV_CACHE):
                self._free_memory(body.action)
            case Control(action=Action.WAKE_WEIGHTS):
                self.runner.take_back_weights()
            case Control(action=Action.WAKE_KV_CACHE):
                self.runner.make_state()
            case _:
                raise MessageError(f"a message of kind {body.kind} to an engine")

    def _free_memory(self, action: Action) -> None:
        while self.has_work:  # requests were aborted whose last step is in flight
            self.step()
        self.scheduler.reset_prefix_cache()
        self.runner.drop_state()
        if action is not Action.RELEASE_KV_CACHE:
            self.runner.put_away_weights(keep=action is Action.SLEEP)

    def step(self) -> StepOutput:
        """Dispatch the next step; what the oldest one in flight did, perhaps nothing.

        Raises:
            EngineDeadError: the device failed, in this step or before, or the engine was closed.
        """
        self.check_alive()
        scheduler, in_flight = self.scheduler, self._in_flight
        self._arrivals.begin_step(idle=not scheduler.has_unfinished and not in_flight)
        begun = len(in_flight) < self._most_in_flight and self._begin_step()
        is_stuck = not begun and not in_flight and scheduler.has_unfinished
        if is_stuck and not self.is_paused and not self._arrivals.has_news:
            raise RuntimeError("no request can run and none is in flight: the scheduler stalled")
        is_due = bool(in_flight) and (not begun or len(in_flight) == self._most_in_flight)
        seen, reports = self._commit(in_flight.popleft()) if is_due else (SeenTokens(), Reports())
        found: dict[str, list[Hypothesis]] = {}
        if self._beams:
            seen, found = self._beams.take(seen, reports.get(LOGPROBS, {}))
        backlog = not in_flight and scheduler.has_unfinished
        first_steps = self._clock.committed(backlog=backlog)
        self._busy.record(self._clock.times.device_busy)
        if self.pace is not None and self._clock.last is not None:
            self.pace.ended(self._clock.last)
        if self._overlap and is_due and (backlog or self._num_groups > 1):
            # all waited for these tokens: the device need not wait for the client as well
            self._begin_step()
        preempted = {}
        for request in scheduler.take_preempted():
            preempted[request.request_id] = request.num_preemptions
            self._clock.lacks_pages(request)
        if not self.has_work:
            self._integrity.check()
        return StepOutput(
            sequence_ids=[request.request_id for request in seen.requests],
            tokens=seen.tokens,
            ends=seen.ends,
            reports=reports,
            first_steps=first_steps,
            preempted=preempted,
            stats=self.stats(),
            beams=found,
            failed=self._arrivals.take_failed(),
            step=self._clock.last,
            page_waits=self._clock.take_page_waits(),
            view=self._take_view() if self._is_watched else None,
            queued=self._arrivals.take_queued(),
        )

    def _begin_step(self) -> bool:
        """Plan the next step and hand it over; False: nothing can run before a commit."""
        if self.is_paused:
            return False
        clock, scheduler = self._clock, self.scheduler
        clock.start()
        try:
            plan = self._beams.plan()
            clock.planned()
            if scheduler.short_of_pages is not None:
                clock.lacks_pages(scheduler.short_of_pages)
            if self.announce is not None:
                ids = [*dict.fromkeys(request.request_id for request in _newcomers(plan))]
                if ids:
                    self.announce(FirstSteps(ids))
            if plan:
                self._in_flight.append(self._dispatch(plan))
            return bool(plan)
        except BaseException:
            # what is planned counts as computed, and now nothing computes it: it must not be found
            scheduler.reset_prefix_cache()
            raise

    def _dispatch(self, plan: StepPlan) -> StepInFlight:
        clock = self._clock
        clock.start()
        packed, left_out = self._pack(plan)
        clock.packed(self._in_flight[-1].result if self._in_flight else None)
        if self.pace is not None:
            self.pace.begins(packed.program.layout.shape, plan.rows)
        dispatched = self.runner.dispatch(plan, packed)
        clock.dispatched(_newcomers(plan), self._counts.of_step(plan))
        if self.on_dispatch is not None:
            self.on_dispatch(self._counts.num_steps, plan)
        self._counts.dispatched(plan)
        if left_out:
            for request_id, error in left_out.items():
                self._arrivals.fail(request_id, error)
            self.runner.packer.forget_left_out()
            scheduler = self.scheduler
            scheduler.reset_prefix_cache()  # what the step computes for them need not be right
        return dispatched

    def _pack(self, plan: StepPlan) -> tuple[PackedStep, dict[str, BaseException | None]]:
        """The operand of a plan, and why rows of requests could not be packed as they asked."""
        left_out: dict[str, BaseException | None] = {}
        while True:
            try:
                return self.runner.pack(plan), left_out
            except RowError as error:
                self.runner.packer.leave_out(error.request_id)
                left_out[error.request_id] = error.__cause__

    def _commit(self, step: StepInFlight) -> tuple[SeenTokens, Reports]:
        """Take in what a step computed: its tokens, and what features tell of its sequences."""
        self._clock.start()
        result = self.runner.fetch(step)
        self._clock.fetched()
        seen = self.scheduler.commit(step.plan, result.tokens, result.counts)
        return seen, self.features.took(step, result, seen)

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return self._counts.stats(
            self._clock.times,
            programs=len(self.runner.programs.programs),
            integrity_failures=self._integrity.num_failures,
            beam_shrinks=self._beams.num_shrinks,
        )

    def _take_view(self) -> EngineView:
        self._is_watched = False
        name_of = self._beams.name_of
        view = view_of(self.scheduler, lambda one: name_of(one.request_id) or one.request_id)
        return view._replace(profile=self._profile.folder)

    def close(self) -> None:
        """Stop background work, free weights and KV pool; the engine cannot step afterwards."""
        self.is_closed = True
        self._in_flight.clear()
        self._arrivals.close()
        self.features.close()
        self.runner.close()
        self.scheduler.pages.close()
        gc.unfreeze()  # `load_engine` froze what was alive then


def _newcomers(plan: StepPlan) -> list[Request]:
    """Requests that may be in a first step: their rows bring tokens, or they sample from those."""
    return plan.rows.requests[plan.num_decode :] + plan.samples.requests[plan.num_decode :]
