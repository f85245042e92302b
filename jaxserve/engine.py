"""The loop: plan -> dispatch -> commit. The only file that knows both the scheduler and the device.

With overlap the device runs step N while the host commits step N-1 and plans step N+1; the tokens
that a step feeds on are on the device, so the host need not have seen them. `overlap=False` commits
each step before the next is planned: the same tokens, one step at a time.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, NamedTuple

from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.features.prompt_scores import PromptScores, scores_prompt
from jaxserve.execution.runner import Dispatched, Runner, StepResult
from jaxserve.observability.step_times import StepTimes
from jaxserve.request import Request, RequestState
from jaxserve.sampling.logprobs import LogprobRows
from jaxserve.scheduling.plan import PrefillLane, SeenTokens, StepPlan
from jaxserve.scheduling.scheduler import Scheduler


class TokenLogprobs(NamedTuple):
    """Raw log-probabilities at one position: of the token itself and of the most likely ones."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepOutput:
    """What one step did for its requests.

    Attributes:
        seen: the tokens, an entry a request.
        logprobs: of the entries whose requests asked for them.
        prompt_logprobs: come once, with a request's first token: one item a prompt token after the
            first.
    """

    seen: SeenTokens = field(default_factory=SeenTokens)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class EngineStats(NamedTuple):
    """A snapshot for metrics."""

    num_running: int
    num_waiting: int
    page_usage: float  # share of KV pages that requests own, 0 to 1
    num_preemptions: int  # since the engine started
    num_steps: int  # dispatched since the engine started
    num_programs: int  # compiled so far; grows only while the background thread compiles
    times: StepTimes  # seconds by phase since the engine started


class Engine:
    """Advances requests step by step. Not thread-safe: one thread owns it.

    Args:
        scheduler: decides the steps.
        runner: runs them; its programs must be warmed up.
        overlap: dispatch a step before the tokens of the previous one are seen.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool):
        self.scheduler = scheduler
        self.runner = runner
        self._overlap = overlap
        self._in_flight: Dispatched | None = None
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._num_steps = 0
        self._times = StepTimes()
        self._last_fetch = (0.0, 0.0)  # when the host began to wait for a step, and when it had it
        self._last_dispatch = 0.0
        self._backlog_since_commit = False
        self._new: set[Request] = set()  # came after the last plan

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return self.scheduler.has_unfinished or self._in_flight is not None

    def check_alive(self) -> None:
        """Raises EngineDeadError once a step has failed or the engine was closed."""
        self.runner.check_alive()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineDeadError: a step has failed or the engine was closed.
        """
        self.check_alive()
        self.scheduler.add(request)
        self._new.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if it is not live."""
        self._prompt_logprobs.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def step(self) -> StepOutput:
        """Dispatch the next step and return the tokens of the last one that has run.

        Raises:
            EngineDeadError: the device failed, in this step or before, or the engine was closed.
        """
        self.check_alive()
        begin = monotonic()
        plan = self.scheduler.plan()
        self._times.plan += monotonic() - begin
        dispatched = self._dispatch(plan) if plan else None
        self._num_steps += dispatched is not None
        self._new.clear()
        if dispatched is None and self._in_flight is None and self.scheduler.has_unfinished:
            raise RuntimeError("no request can run and none is in flight: the scheduler stalled")
        if self._overlap:
            done, self._in_flight = self._in_flight, dispatched
        else:
            done = dispatched
        output = StepOutput() if done is None else self._commit(done)
        self._backlog_since_commit = self._in_flight is None and self.scheduler.has_unfinished
        return output

    def _dispatch(self, plan: StepPlan) -> Dispatched:
        begin = monotonic()
        packed = self.runner.pack(plan)
        ready = monotonic()
        running: Any = self._in_flight.result if self._in_flight is not None else None
        drained = self._backlog_since_commit if running is None else running.is_ready()
        dispatched = self.runner.dispatch(plan, packed)
        end = monotonic()
        self._times.pack += ready - begin
        self._times.dispatch += end - ready
        if drained:
            # the device cannot have been done before it was given the step
            self._times.device_idle += end - max(self._last_fetch[1], self._last_dispatch)
        elif running is not None and running.is_ready():
            self._times.device_idle += end - ready
        self._last_dispatch = end
        for lane in plan.lanes:
            if lane.request.first_scheduled_time is None:
                self._note_first_step(lane.request, ready)
        return dispatched

    def _note_first_step(self, request: Request, now: float) -> None:
        request.first_scheduled_time = now
        if request in self._new:
            begin, end = self._last_fetch
            waited = max(0.0, end - max(begin, request.arrival_time))
            request.queue_overhead = now - request.arrival_time - waited

    def stats(self) -> EngineStats:
        s = self.scheduler
        return EngineStats(
            num_running=len(s.running),
            num_waiting=s.num_waiting,
            page_usage=s.pages.usage,
            num_preemptions=s.num_preemptions,
            num_steps=self._num_steps,
            num_programs=len(self.runner.programs.programs),
            times=replace(self._times),
        )

    def close(self) -> None:
        """Stop background work, free weights and KV pool; the engine cannot step afterwards."""
        self._in_flight = None
        self.runner.close()
        gc.unfreeze()  # `load_engine` froze what was alive then

    def _commit(self, step: Dispatched) -> StepOutput:
        begin = monotonic()
        result = self.runner.fetch(step)
        end = monotonic()
        self._last_fetch = begin, end
        self._times.wait += end - begin
        self._collect_prompt_logprobs(step, result)
        output = StepOutput(self.scheduler.commit(step.plan, result.tokens))
        if self._prompt_logprobs or Logprobs.name in result.outputs:
            self._add_logprobs(output, result)
        self._times.commit += monotonic() - end
        return output

    def _add_logprobs(self, output: StepOutput, result: StepResult) -> None:
        seen = output.seen
        for entry, request in enumerate(seen.requests):
            if request.params.logprobs is not None:
                place = result.special[seen.rows[entry]]
                values = result.outputs[Logprobs.name]
                output.logprobs[entry] = self._logprobs(values, place, seen.tokens[entry])
            prompt = self._prompt_logprobs.pop(request.request_id, None)
            if prompt is not None:
                output.prompt_logprobs[entry] = prompt

    def _collect_prompt_logprobs(self, step: Dispatched, result: StepResult) -> None:
        begin = 0
        for lane in step.plan.lanes:
            # a request that was aborted while the step ran has nobody left to tell
            is_live = lane.request.state is not RequestState.FINISHED
            if is_live and scores_prompt(lane.request, lane.start):
                self._collect_lane(lane, begin, result.outputs[PromptScores.name])
            begin += lane.length

    def _collect_lane(self, lane: PrefillLane, begin: int, values: LogprobRows) -> None:
        request = lane.request
        scored = self._prompt_logprobs.setdefault(request.request_id, [])
        for offset in range(lane.length):
            position = lane.start + offset + 1  # the logits of one token score the next
            # a prompt that is prefilled again after a preemption has been scored before
            if position >= request.num_prompt or position - 1 < len(scored):
                continue
            token = request.prompt_token_ids[position]
            scored.append(self._logprobs(values, begin + offset, token))

    @staticmethod
    def _logprobs(values: LogprobRows, row: int, token: int) -> TokenLogprobs:
        return TokenLogprobs(
            token,
            float(values.sampled[row]),
            int(values.rank[row]),
            values.top_ids[row].tolist(),
            values.top_logprobs[row].tolist(),
        )
