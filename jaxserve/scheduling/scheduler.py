"""Continuous batching: one rule decides every step.

A request has `num_computed` tokens in pages; a step gives it tokens so that it catches up with the
tokens it has. Decode rows come first (one token each), then chunks of running prefills, then
waiting requests, all under one token budget. Chunked prefill and resumption after a preemption are
this same rule. The rule is vLLM v1's; the overlap bookkeeping (`pending`) is described in
docs/architecture.md.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from jaxserve.errors import ValidationError
from jaxserve.memory.manager import PageManager, PageUpdate
from jaxserve.request import Request, RequestState
from jaxserve.sampling_params import MAX_BIAS_ENTRIES
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.plan import DecodeRows, PrefillLane, SeenTokens, StepPlan, Upload
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
        max_bias_entries: logit_bias values that the sampling rows of a step may bring along.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_lanes: int
    max_model_len: int
    max_bias_entries: int = MAX_BIAS_ENTRIES

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
        self._biased: deque[Request] = deque()  # running ones with logit_bias, next to sample first
        self._bias_entries = 0  # of all of them
        self._holding: dict[SequenceGroup, None] = {}  # groups with pages, the oldest first
        self._bias_turn: set[Request] | None = None  # who may sample; None: all of them

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._requests) - len(self.running)

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
        group = request.group
        if group is not None and group.front is not None:
            group.behind.append(request)
            return
        if group is not None:
            group.front = request
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
        preemptions = self.num_preemptions
        prefilling: list[Request] = []
        seen = -1
        while not plan.decode and seen != self.num_preemptions:
            # who had the turn may have lost its slot for want of a page: then it is another's
            seen = self.num_preemptions
            self._bias_turn = self._next_bias_turn()
            prefilling = self._plan_decodes(plan)
        budget = min(
            self.limits.max_num_batched_tokens - len(plan.decode), self.limits.max_prefill_tokens
        )
        for request in prefilling:
            if budget > 0 and len(plan.lanes) < self.limits.max_lanes:
                budget -= self._plan_chunk(plan, request, budget)
        if self.num_preemptions == preemptions:
            self._admit(plan, budget)
        return plan

    def commit(self, plan: StepPlan, tokens: list[int]) -> SeenTokens:
        """Take in the tokens that a dispatched plan sampled, in the plan's row order."""
        rows = [*enumerate(plan.decode.requests)]
        rows += [
            (row, lane.request)
            for row, lane in enumerate(plan.lanes, start=len(plan.decode))
            if lane.samples
        ]
        seen = SeenTokens()
        finished = RequestState.FINISHED
        for row, request in rows:
            request.pending -= 1
            if request.state is finished:
                continue
            token, output, rule = tokens[row], request.output_token_ids, request.stop_rule
            output.append(token)
            if token in rule.end_token_ids or len(output) >= rule.max_tokens:
                end = rule.check(token, len(output))
                if end is not None:
                    self._finish(request)
                    seen.ends[len(seen.requests)] = end
            seen.requests.append(request)
            seen.tokens.append(token)
            seen.rows.append(row)
        return seen

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """Add a decode row for every request past its prefill; returns the others, in order."""
        prefilling: list[Request] = []
        requests, slots, positions = [], [], []
        for request in self.running:  # a preemption shortens it at its end
            position = request.num_computed
            if position >= request.decode_until:
                if request.is_prefilling:
                    prefilling.append(request)
                    continue
                if not self._prepare_decode(request, plan.page_updates):
                    continue
            assert request.slot is not None
            request.num_computed = position + 1
            request.pending += 1
            requests.append(request)
            slots.append(request.slot)
            positions.append(position)
        plan.decode = DecodeRows(requests, slots, positions)
        return prefilling

    def _prepare_decode(self, request: Request, page_updates: list[PageUpdate]) -> bool:
        """See that the next token has a page, by preemption if need be; False: no row this time."""
        if request.ends_when_pending_is_seen():
            return False
        if request.needs_seen_tokens and request.pending:
            return False
        if not self._bias_fits(request):
            return False
        num_tokens = request.num_computed + 1
        while not self.pages.grow(request, num_tokens):
            if self._drop_held_pages():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self.pages.publish(request, num_tokens, page_updates)
        if not request.needs_seen_tokens and not request.num_bias:
            request.decode_until = min(
                request.num_published * self.pages.page_size,
                request.num_prompt + request.stop_rule.max_tokens - 1,
            )
        return True

    def _next_bias_turn(self) -> set[Request] | None:
        """The running requests with logit_bias that sample in this step, in turn; None: all."""
        left = self.limits.max_bias_entries
        if self._bias_entries <= left:
            return None
        turn: set[Request] = set()
        while self._biased[0].num_bias <= left:
            request = self._biased[0]
            left -= request.num_bias
            turn.add(request)
            self._biased.rotate(-1)
        return turn

    def _bias_fits(self, request: Request) -> bool:
        """Whether the step has room for the request's logit_bias; true without one."""
        if not request.num_bias:
            return True
        if self._bias_turn is None:
            # who was admitted in this step may be one too many
            return self._bias_entries <= self.limits.max_bias_entries
        return request in self._bias_turn

    def _plan_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add a prefill lane of at most `budget` tokens; returns its length."""
        start = request.num_computed
        length = min(request.prefill_target - start, budget)
        if start + length == request.prefill_target and not self._bias_fits(request):
            length -= 1  # its last token, which samples, waits
            if not length:
                return 0
        samples = start + length == request.prefill_target
        slot = request.slot
        assert slot is not None
        self.pages.publish(request, start + length, plan.page_updates)
        plan.lanes.append(PrefillLane(request, slot, start, length, samples))
        request.num_computed += length
        request.pending += samples
        self._go_ahead(request)
        return length

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Give free slots to waiting requests, in order, as far as tokens, lanes and pages go."""
        while budget > 0 and self._free_slots and len(plan.lanes) < self.limits.max_lanes:
            request = self.waiting.peek()
            if request is None:
                return
            # nobody is admitted in the step that preempts, so a token in flight then is seen by now
            assert request.pending == 0
            if not self._reserve(request):
                # held for sequences that wait behind this request, they would be held for ever
                if self.running or plan or not self._drop_held_pages():
                    return
                continue
            self.waiting.pop()
            request.slot = self._free_slots.pop()
            request.state = RequestState.RUNNING
            request.start_prefill()
            if request.num_computed:
                shared = request.pages[: request.num_published]
                known = request.prefill_tokens[: request.num_computed]
                plan.uploads.append(Upload(request.slot, known, shared))
            insort(self.running, request, key=lambda r: r.order)
            if request.num_bias:
                self._biased.append(request)
                self._bias_entries += request.num_bias
            budget -= self._plan_chunk(plan, request, budget)

    def _reserve(self, request: Request) -> bool:
        """Give a waiting request its pages, shared ones among them; False: too few are free."""
        if request.group is not None and request.group.pages:
            self.pages.share(request, request.group.pages)
        # room for the first generated token too, or the request would be preempted at once
        if not self.pages.grow(request, min(request.num_tokens + 1, self.limits.max_model_len)):
            self.pages.release(request)
            return False
        if request.group is not None:
            request.num_published = len(request.group.pages)
            request.num_computed = request.num_published * self.pages.page_size
        return True

    def _go_ahead(self, request: Request) -> None:
        """Queue the next of the group if `request` has computed what the others share."""
        group = request.group
        if group is None or group.front is not request:
            return
        shared = (request.num_prompt - 1) // self.pages.page_size
        if request.num_computed < shared * self.pages.page_size:
            return
        if shared and not group.pages:
            group.pages = request.pages[:shared]
            self.pages.pool.share(group.pages)
            self._holding[group] = None
        self._queue_next(group)

    def _queue_next(self, group: SequenceGroup) -> None:
        """Queue the next sequence of a group; without one, nothing is held any more."""
        group.front = None
        while group.behind and group.front is None:
            following = group.behind.popleft()
            if following.state is not RequestState.FINISHED:
                group.front = following
                self.waiting.push(following)
        if group.front is None:
            self._drop(group)

    def _drop(self, group: SequenceGroup) -> None:
        self.pages.pool.release(group.pages)
        group.pages = []
        self._holding.pop(group, None)

    def _drop_held_pages(self) -> bool:
        """Let go of what one group holds, if that frees a page; False if no group's does.

        The next sequence of the group computes the prompt again.
        """
        for group in self._holding:
            if self.pages.pool.has_sole_owner(group.pages):
                self._drop(group)
                return True
        return False

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
        if request.group is not None and request.group.front is request:
            self._queue_next(request.group)

    def _leave_slot(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        if request.num_bias:
            self._biased.remove(request)
            self._bias_entries -= request.num_bias
        self._free_slots.append(request.slot)
        request.slot = None
        request.decode_until = 0
        self.pages.release(request)

    def check_integrity(self) -> None:
        """Assert that slots and pages are owned by exactly the running requests."""
        held = [group.pages for group in self._holding]
        self.pages.pool.check_integrity([r.pages for r in self._requests.values()] + held)
        slots = [r.slot for r in self.running if r.slot is not None]
        if sorted(slots + self._free_slots) != list(range(self.limits.max_num_seqs)):
            raise AssertionError("slots leaked or are owned twice")
        if any(r.pages for r in self.waiting.requests()):
            raise AssertionError("a waiting request owns pages")
        groups = {r.group for r in self._requests.values() if r.group is not None}
        behind = sum(r.state is not RequestState.FINISHED for g in groups for r in g.behind)
        if len(self.running) + len(self.waiting) + behind != len(self._requests):
            raise AssertionError("a live request is neither running nor waiting")
