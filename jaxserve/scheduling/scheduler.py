"""Continuous batching: one rule decides every step.

A request has `num_computed` tokens in pages; a step gives it tokens so that it catches up with the
tokens it has. Decode rows come first (one token each), then chunks of running prefills, then
waiting requests, all under one token budget. Chunked prefill and resumption after a preemption are
this same rule. The rule is vLLM v1's; the overlap bookkeeping (`pending`) is described in
docs/architecture.md.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from jaxserve.errors import ValidationError
from jaxserve.memory.manager import PageManager
from jaxserve.request import Request, RequestState
from jaxserve.scheduling.plan import DecodeRow, PrefillLane, StepPlan, TokenUpdate
from jaxserve.scheduling.policies import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
        max_num_seqs: slots.
        max_num_batched_tokens: decode rows plus prefill tokens of a step.
        max_prefill_tokens: tokens of the prefill region.
        max_lanes: requests that share the prefill region.
        max_model_len: most tokens of a request, prompt and output.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_lanes: int
    max_model_len: int

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValidationError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs}), one token a running request",
            )


class Scheduler:
    """Plans steps and takes in their tokens; owns slots, pages and the queues.

    A finished or preempted request gives its slot and pages back at once, even while a dispatched
    step still computes a row for it: each step consumes the device state that the previous one
    returned, so whoever gets the pages next writes them after that row has been written.
    """

    def __init__(self, limits: SchedulerLimits, pages: PageManager):
        needed = pages.pages_for(limits.max_model_len)
        if pages.pool.num_pages - 1 < needed:
            raise ValidationError(
                "num_pages",
                pages.pool.num_pages,
                f"at least {needed + 1}: one request of max_model_len={limits.max_model_len} "
                f"tokens needs {needed} pages of {pages.page_size} tokens, and page 0 is not used. "
                "Lower max_model_len or give the cache more memory",
            )
        self.limits = limits
        self.pages = pages
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by arrival order
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._next_order = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. Its prompt must leave room for one token of output."""
        if request.request_id in self._requests:
            raise ValidationError("request_id", request.request_id, "an id that is not in use")
        if not 0 < request.num_prompt < self.limits.max_model_len:
            raise ValidationError(
                "prompt",
                f"{request.num_prompt} tokens",
                f"1 to {self.limits.max_model_len - 1} tokens",
            )
        request.order = self._next_order
        self._next_order += 1
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is; its tokens in flight are dropped. None if unknown."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    def plan(self) -> StepPlan:
        """Decide the next step; an empty plan means that nothing can run before a commit."""
        plan = StepPlan()
        preempted = self._plan_decodes(plan)
        budget = min(
            self.limits.max_num_batched_tokens - len(plan.decode), self.limits.max_prefill_tokens
        )
        for request in self.running:
            if request.is_prefilling and budget > 0 and len(plan.lanes) < self.limits.max_lanes:
                budget -= self._plan_chunk(plan, request, budget)
        if not preempted:
            self._admit(plan, budget)
        return plan

    def commit(self, plan: StepPlan, tokens: list[int]) -> list[TokenUpdate]:
        """Take in the tokens that a dispatched plan sampled, in the plan's row order."""
        updates: list[TokenUpdate] = []
        for row, decode in enumerate(plan.decode):
            self._see_token(decode.request, row, tokens[row], updates)
        for row, lane in enumerate(plan.lanes, start=len(plan.decode)):
            if lane.samples:
                self._see_token(lane.request, row, tokens[row], updates)
        return updates

    def _plan_decodes(self, plan: StepPlan) -> bool:
        """Add a decode row for every request past its prefill; True if one was preempted."""
        preempted = False
        page_size = self.pages.page_size
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            if request.is_prefilling or request.ends_when_pending_is_seen():
                continue
            if request.pending and request.needs_seen_tokens:
                continue
            position = request.num_computed
            # most rows stay on a page that the device knows, and need nothing from the manager
            if position >= request.num_published * page_size:
                while not self.pages.grow(request, position + 1):
                    victim = self.running[-1]
                    self._preempt(victim)
                    preempted = True
                    if victim is request:
                        break
                if request.slot is None:
                    continue
                self.pages.publish(request, position + 1, plan.page_updates)
            assert request.slot is not None
            plan.decode.append(DecodeRow(request, request.slot, position))
            request.num_computed += 1
            request.pending += 1
        return preempted

    def _plan_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add a prefill lane of at most `budget` tokens; returns its length."""
        start = request.num_computed
        length = min(request.prefill_target - start, budget)
        samples = start + length == request.prefill_target
        slot = request.slot
        assert slot is not None
        self.pages.publish(request, start + length, plan.page_updates)
        plan.lanes.append(PrefillLane(request, slot, start, length, samples))
        request.num_computed += length
        request.pending += samples
        return length

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Give free slots to waiting requests, in order, as far as tokens, lanes and pages go."""
        while budget > 0 and self._free_slots and len(plan.lanes) < self.limits.max_lanes:
            request = self.waiting.peek()
            if request is None:
                return
            # nobody is admitted in the step that preempts, so a token in flight then is seen by now
            assert request.pending == 0
            # room for the first generated token too, or the request would be preempted at once
            if not self.pages.grow(request, min(request.num_tokens + 1, self.limits.max_model_len)):
                return
            self.waiting.pop()
            request.slot = self._free_slots.pop()
            request.state = RequestState.RUNNING
            request.start_prefill()
            insort(self.running, request, key=lambda r: r.order)
            budget -= self._plan_chunk(plan, request, budget)

    def _see_token(
        self, request: Request, row: int, token: int, updates: list[TokenUpdate]
    ) -> None:
        request.pending -= 1
        if request.state is RequestState.FINISHED:
            return
        request.output_token_ids.append(token)
        end = request.stop_rule.check(token, len(request.output_token_ids))
        if end is None:
            updates.append(TokenUpdate(request, row, token, None, None))
            return
        self._finish(request)
        reason, stop_token = end
        updates.append(TokenUpdate(request, row, token, reason, stop_token))

    def _preempt(self, request: Request) -> None:
        """Take slot and pages away; the request recomputes its tokens when its turn comes again."""
        self._leave_slot(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.prefill_target = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self._leave_slot(request)
        else:
            self.waiting.discard(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]

    def _leave_slot(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = None
        self.pages.release(request)

    def check_integrity(self) -> None:
        """Assert that slots and pages are owned by exactly the running requests."""
        self.pages.pool.check_integrity([r.pages for r in self._requests.values()])
        slots = [r.slot for r in self.running if r.slot is not None]
        if sorted(slots + self._free_slots) != list(range(self.limits.max_num_seqs)):
            raise AssertionError("slots leaked or are owned twice")
        if any(r.pages for r in self.waiting.requests()):
            raise AssertionError("a waiting request owns pages")
        if len(self.running) + len(self.waiting) != len(self._requests):
            raise AssertionError("a live request is neither running nor waiting")
