"""The loop: plan -> dispatch -> commit. The only file that knows both the scheduler and the device.

With overlap the device runs step N while the host commits step N-1 and plans step N+1; the tokens
that a step feeds on are on the device, so the host need not have seen them. `overlap=False` commits
each step before the next is planned: the same tokens, one step at a time.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from jaxserve.engine.pace import Pace
from jaxserve.errors import MessageError, RowError
from jaxserve.execution.features import Chunk
from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.features.pooling import PooledChunks, Pooling
from jaxserve.execution.features.prompt_scores import (
    PromptScoreOutputs,
    PromptScores,
    scores_prompt,
)
from jaxserve.execution.results import Dispatched, PackedStep, StepResult
from jaxserve.execution.runner import Runner
from jaxserve.grammars.budget import ThoughtBudget
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.compiling import Compiling, Grammar
from jaxserve.grammars.forcing import Forcing
from jaxserve.messages import (
    Abort,
    Action,
    AddGroup,
    Begun,
    Control,
    EngineStats,
    Hypothesis,
    Inbox,
    Message,
    Outbox,
    StepOutput,
    TokenLogprobs,
)
from jaxserve.models.cost import ModelCost, Row
from jaxserve.observability.busy_window import BusyWindow
from jaxserve.observability.engine_view import EngineView
from jaxserve.observability.step_clock import StepClock, StepRows
from jaxserve.observability.work import Work
from jaxserve.prompt_embeds import embeds_from_text
from jaxserve.request import Request, RequestState
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.beam_search import BeamSearch
from jaxserve.scheduling.beams import BeamGroups
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.plan import SeenTokens, StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.view import view_of

logger = logging.getLogger(__name__)

ABORTS_A_STEP = 2048
CHECK_INTERVAL_S = 60.0  # least time between two checks of pages and slots
COMPILE_WAIT_S = 0.005  # that a step without other work waits for a grammar


class Engine:
    """Advances requests step by step. Not thread-safe: one thread owns it.

    Args:
        scheduler: decides the steps.
        runner: runs them; its programs must be warmed up.
        overlap: dispatch a step before the tokens of the previous one are seen.
        grammars: compiles them; None: there is no tokenizer, so there are none.
        cost: counts the work of each step; None: it is not counted.

    Attributes:
        inbox, outbox: which messages it has had, and sent.
        announce: told before a step is dispatched who may be in one for the first time; None:
            nobody wants to know.
        pace: told of each step; None: nobody watches how long they take.
        on_dispatch: told the number and the plan of each step that was dispatched; None: likewise.
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
    ):
        self.scheduler = scheduler
        self._cost, self._work = cost, None if cost is None else Work()
        self.runner = runner
        self.is_closed = False
        self._overlap = overlap
        self.inbox, self.outbox = Inbox(), Outbox()
        self.announce: Callable[[Message], None] | None = None
        self.pace: Pace | None = None
        self.on_dispatch: Callable[[int, StepPlan], None] | None = None
        self._in_flight: Dispatched | None = None
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._pooled = PooledChunks()
        self._num_steps = 0
        self._num_preempted = 0  # when the last step was dispatched
        self._clock = StepClock()
        self._busy = BusyWindow() if busy is None else busy
        self._to_abort: list[str] = []
        self._failed: list[str] = []  # sequences that ended with an error of their own
        self._beams = BeamGroups(scheduler)
        self._compiling = Compiling(grammars)
        self._forcing = Forcing(scheduler)
        self._next_check = 0.0
        self._num_integrity_failures = 0
        self._is_watched = False  # somebody wants to look at it

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished, a step is in flight or something is not told."""
        waits = self.scheduler.has_unfinished or bool(self._compiling) or bool(self._beams)
        return waits or self._in_flight is not None or bool(self._failed)

    def check_alive(self) -> None:
        """Raises EngineDeadError once a step has failed or the engine was closed."""
        self.runner.check_alive()

    def handle(self, message: Message) -> None:
        """Do what a client asks for.

        Raises:
            MessageError: one of its messages is missing, or this is none for an engine.
            EngineDeadError: sequences are to be added, but a step has failed or the engine was
                closed.
        """
        body = self.inbox.open(message)
        match body:
            case AddGroup(grammar=None, thoughts=None):
                self._add_or_fail(body)
            case AddGroup():
                self.check_alive()
                self._compiling.add(body)
            case Abort():
                self._to_abort += body.sequence_ids
                self._abort_some()
            case Control(action=Action.CLOSE):
                self.close()
            case Control(action=Action.RESET_PREFIX_CACHE):
                self.scheduler.reset_prefix_cache()
            case Control(action=Action.LOOK):
                self._is_watched = True
            case _:
                raise MessageError(f"a message of kind {body.kind} to an engine")

    def step(self) -> Message:
        """Dispatch the next step; a `StepOutput` of the last one that has run, perhaps of none.

        Raises:
            EngineDeadError: the device failed, in this step or before, or the engine was closed.
        """
        self.check_alive()
        if self._to_abort:
            self._abort_some()
        clock, scheduler = self._clock, self.scheduler
        compiled = self._add_compiled() if self._compiling else []
        dispatched = self._begin_step()
        if (
            dispatched is None
            and self._in_flight is None
            and scheduler.has_unfinished
            and not self._failed
        ):
            raise RuntimeError("no request can run and none is in flight: the scheduler stalled")
        if self._overlap:
            done, self._in_flight = self._in_flight, dispatched
        else:
            done = dispatched
        seen, logprobs = SeenTokens(), dict[int, TokenLogprobs]()
        if done is not None:
            seen, logprobs = self._commit(done)
        found: dict[str, list[Hypothesis]] = {}
        if self._beams:
            seen, logprobs, found = self._beams.take(seen, logprobs)
        self._forcing.go_on(seen)
        sequence_ids = [request.request_id for request in seen.requests]
        scored = self._take_prompt_logprobs(sequence_ids) if self._prompt_logprobs else {}
        pooled = self._pooled.take(seen.requests)
        backlog = self._in_flight is None and scheduler.has_unfinished
        first_steps = clock.committed(backlog=backlog)
        self._busy.record(clock.times.device_busy)
        if self.pace is not None and clock.last is not None:
            self.pace.ended(clock.last)
        if self._overlap and backlog and done is not None:
            # all waited for these tokens: the device need not wait for the client as well
            self._in_flight = self._begin_step()
        preempted = {}
        for request in scheduler.take_preempted():
            preempted[request.request_id] = request.num_preemptions
            clock.lacks_pages(request)
        if not self.has_work:
            self._check_integrity()
        failed, self._failed = self._failed, []
        output = StepOutput(
            sequence_ids,
            seen.tokens,
            seen.ends,
            logprobs,
            scored,
            pooled,
            first_steps,
            preempted,
            self.stats(),
            found,
            failed,
            clock.last,
            clock.take_page_waits(),
            self._take_view() if self._is_watched else None,
            compiled,
        )
        return self.outbox.seal(output)

    def _begin_step(self) -> Dispatched | None:
        """Plan the next step and hand it over; None if nothing can run before a commit."""
        clock, scheduler = self._clock, self.scheduler
        clock.start()
        if self._beams:
            self._beams.settle()
        try:
            plan = scheduler.plan()
            clock.planned()
            if scheduler.short_of_pages is not None:
                clock.lacks_pages(scheduler.short_of_pages)
            if self.announce is not None:
                self._announce(plan, self.announce)
            return self._dispatch(plan) if plan else None
        except BaseException:
            # what is planned counts as computed, and now nothing computes it: nobody may find it
            scheduler.reset_prefix_cache()
            raise

    def stats(self) -> EngineStats:
        s = self.scheduler
        return EngineStats(
            num_running=len(s.running),
            num_waiting=s.num_waiting,
            page_usage=s.pages.usage,
            num_preemptions=s.num_preemptions,
            num_steps=self._num_steps,
            num_programs=len(self.runner.programs.programs),
            times=replace(self._clock.times),
            pages=s.page_stats(),
            num_integrity_failures=self._num_integrity_failures,
            num_beam_shrinks=self._beams.num_shrinks,
            work=self._work,
        )

    def _take_view(self) -> EngineView:
        self._is_watched = False
        name_of = self._beams.name_of
        return view_of(self.scheduler, lambda one: name_of(one.request_id) or one.request_id)

    def close(self) -> None:
        """Stop background work, free weights and KV pool; the engine cannot step afterwards."""
        self.is_closed = True
        self._in_flight = None
        self._compiling.close()
        self.runner.close()
        gc.unfreeze()  # `load_engine` froze what was alive then

    def _add_compiled(self) -> list[str]:
        """Queue the requests whose grammars are ready, by first sequence; idle, wait for one."""
        idle = not self.scheduler.has_unfinished and self._in_flight is None
        queued = []
        for added, grammar, aborted, budget in self._compiling.take(
            COMPILE_WAIT_S if idle else 0.0
        ):
            self._add_or_fail(added, grammar, budget)
            self._to_abort += aborted
            queued.append(added.sequence_ids[0])
        if self._to_abort:
            self._abort_some()
        return queued

    def _add_or_fail(
        self,
        added: AddGroup,
        grammar: Grammar | None = None,
        budget: ThoughtBudget | None = None,
    ) -> None:
        """Queue a group; where that is an error, nobody else hears of it."""
        self.check_alive()
        try:
            self._add(added, grammar, budget)
        except Exception:  # whatever it is: logged here, and its client hears of it by `failed`
            logger.exception("a request of %d tokens could not be added", added.size)
            for sequence_id in reversed(added.sequence_ids):
                self._end(sequence_id)
            self._failed.append(added.sequence_ids[0])

    def _add(self, added: AddGroup, grammar: Grammar | None, budget: ThoughtBudget | None) -> None:
        behind = dict(zip(reversed(added.sequence_ids), reversed(added.seeds), strict=True))
        first = behind.popitem()
        embeds = None
        if added.prompt_embeds is not None:
            embeds = embeds_from_text(added.prompt_embeds, len(added.prompt_token_ids))
        group = None
        if added.beams is not None:
            search = BeamSearch(added.beams, added.stop_rule)
            make = partial(
                self._sequence,
                added,
                added.params,
                embeds,
                grammar,
                budget,
                seed=first[1],
                group=None,
            )
            self._beams.add(first[0], search, added.beams.beam_width, make)
            self._clock.added(first[0], added.queueing.arrival_time)
            return
        if behind:
            params = copy.copy(added.params)
            params.prompt_logprobs = None  # the first one's are those of all
            group = SequenceGroup(
                behind, partial(self._sequence, added, params, embeds, grammar, budget)
            )
        request = self._sequence(added, added.params, embeds, grammar, budget, *first, group)
        # as one that was preempted: prompt and output are computed, then it goes on
        request.output_token_ids = [*added.output_token_ids]
        if request.budget is not None:
            request.budget.take(request.output_token_ids)
            request.needs_seen_tokens = request.budget.waits(1)
        self.scheduler.add(request)
        self._clock.added(request.request_id, added.queueing.arrival_time)

    def _sequence(
        self,
        added: AddGroup,
        params: SamplingParams,
        embeds: np.ndarray | None,
        grammar: Grammar | None,
        budget: ThoughtBudget | None,
        sequence_id: str,
        seed: int,
        group: SequenceGroup | None,
    ) -> Request:
        request = Request(
            sequence_id,
            added.prompt_token_ids,
            params,
            added.stop_rule,
            seed,
            bad_words=added.bad_words,
            queueing=added.queueing,
            group=group,
            cache_salt=added.cache_salt,
            pooling=added.pooling,
            prompt_embeds=embeds,
            grammar=None if grammar is None else grammar.begin(),
        )
        request.num_output_asked = added.num_output_asked
        self.runner.prepare(request)
        if budget is not None:
            request.budget = budget.copied()
            request.budget.waits_anyway = request.needs_seen_tokens
            request.needs_seen_tokens = request.budget.waits(1)  # its first token is in flight then
        return request

    def _abort_some(self) -> None:
        """End sequences; where they are thousands, others run on between them."""
        for _ in range(min(ABORTS_A_STEP, len(self._to_abort))):
            # the last first: ending the first of a group would make the next of it
            self._end(self._to_abort.pop())

    def _end(self, sequence_id: str) -> None:
        """End a sequence wherever it is, if it is."""
        self._prompt_logprobs.pop(sequence_id, None)
        self._pooled.drop(sequence_id)
        self._clock.aborted(sequence_id)
        if not self._beams.abort(sequence_id) and not self._compiling.abort(sequence_id):
            self.scheduler.abort(sequence_id)

    def _check_integrity(self) -> None:
        """See that no page and no slot got lost; idle, where it holds up nobody."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_S
        try:
            self.scheduler.check_integrity()
        except AssertionError:
            self._num_integrity_failures += 1
            logger.exception("pages or slots of the KV cache are lost, or owned twice")

    def _announce(self, plan: StepPlan, tell: Callable[[Message], None]) -> None:
        first = plan.num_decode  # rows before it have been in steps
        requests = plan.rows.requests[first:] + plan.samples.requests[first:]
        if requests:
            ids = dict.fromkeys(request.request_id for request in requests)
            tell(self.outbox.seal(Begun([*ids])))

    def _dispatch(self, plan: StepPlan) -> Dispatched:
        clock = self._clock
        clock.start()
        packed, left_out = self._pack(plan)
        clock.packed(self._in_flight.result if self._in_flight is not None else None)
        if self.pace is not None:
            self.pace.begins(packed.program.layout.shape, plan.rows)
        dispatched = self.runner.dispatch(plan, packed)
        # rows that bring their tokens, and who samples from them, may be in their first step
        first = plan.num_decode
        requests = plan.rows.requests[first:] + plan.samples.requests[first:]
        clock.dispatched(requests, self._rows_of(plan))
        if self._cost is not None and self._work is not None:
            rows = map(Row, plan.rows.starts, plan.rows.lengths)
            self._work = self._work.plus(self._cost.of_step(rows, len(plan.samples)))
        if self.on_dispatch is not None:
            self.on_dispatch(self._num_steps, plan)
        self._num_steps += 1
        if left_out:
            self._fail(left_out)
        return dispatched

    def _rows_of(self, plan: StepPlan) -> StepRows:
        scheduler, lengths, first = self.scheduler, plan.rows.lengths, plan.num_decode
        before, self._num_preempted = self._num_preempted, scheduler.num_preemptions
        return StepRows(
            first,
            len(plan.tokens),
            sum(lengths[:first]),
            sum(lengths[first:]),
            len(scheduler.running),
            scheduler.num_waiting,
            scheduler.pages.pool.num_used,
            scheduler.num_preemptions - before,
        )

    def _pack(self, plan: StepPlan) -> tuple[PackedStep, list[str]]:
        """The operand of a plan, and the requests whose rows could not be packed as they asked."""
        left_out: list[str] = []
        while True:
            try:
                return self.runner.pack(plan), left_out
            except RowError as error:
                logger.exception("a request ends with an error")
                self.runner.packer.leave_out(error.request_id)
                left_out.append(error.request_id)

    def _fail(self, request_ids: list[str]) -> None:
        """End requests of a step that was dispatched with rows that are not theirs."""
        for request_id in request_ids:
            name = self._beams.name_of(request_id) or request_id
            self._end(name)
            self._failed.append(name)
        self.runner.packer.forget_left_out()
        self.scheduler.reset_prefix_cache()  # what the step computes for them need not be right

    def _commit(self, step: Dispatched) -> tuple[SeenTokens, dict[int, TokenLogprobs]]:
        """Take in what a step computed: its tokens, and the log-probabilities of entries."""
        self._clock.start()
        result = self.runner.fetch(step)
        self._clock.fetched()
        self._collect_prompt_logprobs(step, result)
        if Pooling.name in step.step.needs.features:
            chunks = step.step.needs.chunks(step.plan)
            self._pooled.add(chunks, result.outputs[Pooling.name])
        seen = self.scheduler.commit(step.plan, result.tokens, result.counts)
        logprobs = {}
        if Logprobs.name in result.outputs:
            logprobs = self._logprobs_of(seen, result)
        return seen, logprobs

    def _logprobs_of(self, seen: SeenTokens, result: StepResult) -> dict[int, TokenLogprobs]:
        values = result.outputs[Logprobs.name]
        return {
            entry: Logprobs.report(
                values, result.special[seen.samples[entry]], request, seen.tokens[entry]
            )
            for entry, request in enumerate(seen.requests)
            if request.params.logprobs is not None
        }

    def _take_prompt_logprobs(self, sequence_ids: list[str]) -> dict[str, list[TokenLogprobs]]:
        scored = self._prompt_logprobs
        return {name: scored.pop(name) for name in sequence_ids if name in scored}

    def _collect_prompt_logprobs(self, step: Dispatched, result: StepResult) -> None:
        begin, rows = 0, step.plan.rows
        for row in step.step.needs.lanes:
            request, start, length = rows.requests[row], rows.starts[row], rows.lengths[row]
            # a request that was aborted while the step ran has nobody left to tell
            if request.state is not RequestState.FINISHED and scores_prompt(request, start):
                chunk = Chunk(request, start, length)
                self._collect_chunk(chunk, begin, result.outputs[PromptScores.name])
            begin += length

    def _collect_chunk(self, chunk: Chunk, begin: int, values: PromptScoreOutputs) -> None:
        request = chunk.request
        scored = self._prompt_logprobs.setdefault(request.request_id, [])
        for offset in range(chunk.length):
            position = chunk.start + offset + 1  # the logits of one token score the next
            # a prompt that is prefilled again after a preemption has been scored before
            if position >= request.num_prompt or position - 1 < len(scored):
                continue
            token = request.prompt_token_ids[position]
            scored.append(PromptScores.report(values, begin + offset, request, token))
