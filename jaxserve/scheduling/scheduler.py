"""Continuous batching: one rule decides every step.

A request has `num_computed` tokens in pages; a step gives it tokens so that it catches up with the
tokens it has. Decode rows come first (one token each, and drafts), then chunks of running prefills,
then waiting requests, all under one token budget. Chunked prefill and resumption after a preemption
are this same rule. The rule is vLLM v1's; the overlap bookkeeping (`pending`) is described in
docs/design/02-scheduling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.boundary.messages import PageStats
from jaxserve.errors import ValidationError
from jaxserve.memory.manager import PageManager, PageUpdate
from jaxserve.request.request import Request, RequestState
from jaxserve.request.stop_rule import End
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.group import HeldPages, SequenceGroup
from jaxserve.scheduling.plan import Fork, SeenTokens, StepPlan, Upload
from jaxserve.scheduling.policies import FirstComeFirstServed
from jaxserve.scheduling.resources import Resources, StepResource
from jaxserve.scheduling.room import Room
from jaxserve.scheduling.slot_transfer import SlotTransfer
from jaxserve.scheduling.slots import Slots
from jaxserve.scheduling.step_limits import SchedulerLimits


class Scheduler:
    """Plans steps and takes in their tokens; owns slots, pages and the queues.

    A finished or preempted request gives its slot and pages back at once, even while a dispatched
    step still computes a row for it: each step consumes the device state that the previous one
    returned, so the next owner of the pages writes them after that row has been written.

    Args:
        limits: the most that a step may hold.
        pages: the device's pages.
        turns: in which order requests get slots and keep pages; of each client by arrival when
            None.
        resources: what features have too little of, see `StepResource`.
        drafts_for: of the requests that run, how many drafts each row may have now; None: as many
            as `limits` say.

    Attributes:
        waiting: the turns, which hold the requests that wait for a slot.
        running: the requests with a slot, by the policy's keys.
        short_of_pages: the request that had its turn in the last plan, and a slot, but not the
            pages.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PageManager,
        turns: ClientTurns | None = None,
        resources: Sequence[StepResource] = (),
        drafts_for: Callable[[int], int] | None = None,
    ):
        needed = pages.groups.most_held(limits.max_model_len, pages.page_size)
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
        self.num_preemptions = 0
        self.short_of_pages: Request | None = None
        self.waiting = ClientTurns(FirstComeFirstServed) if turns is None else turns
        # of sequences behind the first of a group that are not made yet, the group
        self._requests: dict[str, Request | SequenceGroup] = {}
        self._next_order = 0
        self._resources = Resources(resources)
        self._drafts_for = drafts_for or (lambda num_running: limits.num_drafts)
        self._most_drafts = 0  # of a row of the step that is planned
        self._slots = Slots(limits.max_num_seqs, self.waiting, self._resources)
        self.running = self._slots.running
        self._held = HeldPages(pages.pool)
        self._room = Room(pages, self._resources, limits.max_model_len)
        self._giving_way = SlotTransfer(self.waiting, self._slots, pages, self._room, self._held)
        self._forks: list[Fork] = []  # to be done before the next step
        self._preempted: list[Request] = []
        self._num_computed = 0  # tokens of all running requests
        self._unseen: list[Request] = []  # decode rows in flight of those that need seen tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._requests) - len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Its prompt leaves room for one token of output.

        As the first of a group it stands for those behind it.
        """
        self._register(request)
        group = request.group
        if group is not None:
            group.front = request
            group.next_order = self._next_order
            self._next_order += group.num_behind
            self._requests.update(dict.fromkeys(group.behind, group))
        self.waiting.push(request)

    def _register(self, request: Request) -> None:
        assert request.request_id not in self._requests
        assert 0 < request.num_prompt < self.limits.max_model_len
        if request.order < 0:
            (request.order,) = self.take_orders(1)
        self._resources.mark(request)
        self._requests[request.request_id] = request

    def take_orders(self, count: int) -> list[int]:
        """Places in the order of arrival, for requests that come later with the turn of now.

        Two live requests never have the same one.
        """
        begin, self._next_order = self._next_order, self._next_order + count
        return [*range(begin, self._next_order)]

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its tokens in flight are dropped. False if unknown."""
        found = self._requests.get(request_id)
        if isinstance(found, SequenceGroup):
            del found.behind[request_id]
            del self._requests[request_id]
        elif found is not None:
            self._finish(found)
        return found is not None

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed so far is found any more; requests that run go on."""
        self._held.drop_all()
        requests = (r for r in self._requests.values() if isinstance(r, Request))
        self.pages.forget_all(r for r in requests if r.slot is None)

    def take_preempted(self) -> list[Request]:
        """The requests that lost a slot since the last call."""
        found, self._preempted = self._preempted, []
        return found

    def fork(self, parent: Request, child: Request, tokens: list[int]) -> bool:
        """Make `child` a running request that has what `parent` computed, then `tokens`.

        `child` has the prompt of `parent`, is prepared as one that is added, and not known yet.
        False: no slot, too few pages or too little of a resource is free, and nothing has changed.

        Raises:
            ValueError: `parent` is not past its prefill, tokens of it are in flight, or `tokens`
                are none or leave no room for one more.
        """
        output = parent.followed_by(tokens, child.stop_rule.max_tokens)
        computed = parent.num_computed
        wanted = self._room.with_one_more(parent.num_prompt + len(output))
        self._resources.mark(child)
        if not self._slots.num_free or not self._resources.has_room(child):
            return False
        copied = self.pages.fork(parent, child, computed, wanted)
        if copied is None:
            return False
        self._register(child)
        self._slots.enter(child)
        self._take_over(parent, child, computed, copied)
        child.prefill_tokens = parent.prefill_tokens
        self._set_tokens(child, output)
        return True

    def force(self, request: Request, tokens: list[int]) -> None:
        """Make `tokens` follow what `request` has computed, in the place of what it sampled.

        Where pages are short, others or the request itself lose their slots, as in a plan.

        Raises:
            ValueError: as for `fork`.
        """
        self._set_tokens(request, request.followed_by(tokens, request.stop_rule.max_tokens))
        self._make_room(request, self._room.wanted(request))

    def _set_tokens(self, request: Request, output: list[int]) -> None:
        request.output_token_ids = output
        request.is_paused = False
        request.start_prefill()
        request.decode_until = 0

    def lacks_pages(self, request: Request) -> bool:
        """Whether a request waits and the pages that it needs are not free."""
        return request.state is RequestState.WAITING and not self._room.has_pages(request)

    def plan(self) -> StepPlan:
        """Decide the next step; an empty plan means that nothing can run before a commit."""
        plan = StepPlan()
        forks, self._forks = self._forks, []
        if self.waiting.num_clients > 1:
            self._give_way(plan)
        self._most_drafts = self._drafts_now() if self.limits.num_drafts else 0
        preemptions = self.num_preemptions
        prefilling: list[Request] = []
        seen = -1
        # all that wait for a token wait for the same step: halves of them, each in every other
        # step, would take two steps for what one can do
        self._unseen = [request for request in self._unseen if request.pending]
        while not plan.rows.requests and seen != self.num_preemptions:
            # the request next in turn may have lost its slot for want of a page
            seen = self.num_preemptions
            self._resources.begin_plan()
            prefilling = self._plan_decodes(plan)
        limits = self.limits
        num_decoded = sum(plan.rows.lengths)
        self._num_computed += num_decoded
        budget = limits.max_num_batched_tokens - num_decoded
        budget = min(budget, limits.max_prefill_tokens)
        before, after = self.waiting.arrange(prefilling, self._room.fits)
        budget -= self._plan_chunks(plan, before, budget)
        if self.num_preemptions == preemptions:
            budget -= self._admit(plan, budget)
        self._plan_chunks(plan, after, budget)
        for row in plan.tokens:  # the next plan finds what this step computes
            request = plan.rows.requests[row]
            self.pages.keep(request, request.num_computed)
        # those of this step's own samples have to follow the step
        if plan:
            plan.forks, plan.moves = forks, self.pages.take_moves()
        else:
            self._forks = forks + self._forks
        return plan

    def commit(
        self, plan: StepPlan, tokens: list[int], counts: list[int] | None = None
    ) -> SeenTokens:
        """Take in the tokens that a dispatched plan sampled.

        Args:
            plan: the plan.
            tokens: in the order of its samples.
            counts: how many of them each sample has, where drafts may have been accepted; None: one
                each.
        """
        requests: list[Request] = plan.samples.requests
        samples = [*range(len(requests))]
        if counts is not None:
            self._correct(plan, counts)
            requests = [r for r, count in zip(requests, counts, strict=True) for _ in range(count)]
            samples = [i for i, count in zip(samples, counts) for _ in range(count)]
        ends: dict[int, End] = {}
        dropped: list[int] = []
        finished = RequestState.FINISHED
        for entry, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            request.pending -= 1
            if request.state is finished:
                dropped.append(entry)
                continue
            output, rule = request.output_token_ids, request.asked.stop_rule
            output.append(token)
            is_end = token in rule.end_token_ids or len(output) >= rule.max_tokens
            if is_end or rule.repetition is not None:
                end = rule.check(token, len(output)) or rule.check_repetition(output)
                if end is not None:
                    self._finish(request)
                    ends[entry - len(dropped)] = end
        seen = SeenTokens([*requests], [*tokens], samples, ends)
        for entry in reversed(dropped):
            del seen.requests[entry], seen.tokens[entry], seen.samples[entry]
        return seen

    def _correct(self, plan: StepPlan, counts: list[int]) -> None:
        """Take back what was counted for drafts that were not accepted."""
        lengths = plan.rows.lengths
        for sample in range(plan.num_decode):
            request, rejected = plan.samples.requests[sample], lengths[sample] - counts[sample]
            request.pending -= rejected
            if request.state is RequestState.RUNNING:  # else nothing of it is computed any more
                request.num_computed -= rejected
                self._num_computed -= rejected

    def _give_way(self, plan: StepPlan) -> None:
        """Begin requests in the place of other clients' sequences.

        This comes before the rows: a sequence that loses its slot has none in this step.
        """
        self.waiting.begin_step()
        for _ in range(self.limits.max_lanes):
            found = self._giving_way.next()
            if found is None:
                return
            request, losers = found
            for loser in losers:
                self._preempt(loser)
            while not self._begin(plan, request):
                if not self._held.drop_one(request.group):
                    return

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """Add a decode row for every request past its prefill; returns the others, in order."""
        prefilling: list[Request] = []
        rows = plan.rows
        requests, slots, starts = rows.requests, rows.slots, rows.starts
        longer: dict[int, int] = {}  # row -> length, where that is not 1
        unseen: list[Request] = []
        most = -(-len(self.running) // self.limits.num_groups)
        for request in self._in_turn() if self.waiting.num_clients > 1 else self.running:
            slot = request.slot
            if slot is None:  # it was preempted for one before it, and so were those behind it
                break
            position, length = request.num_computed, 1
            if position >= request.decode_until:
                if request.is_prefilling:
                    if self._make_room(request, self._room.wanted(request)):
                        prefilling.append(request)
                    continue
                if len(requests) >= most:  # of a group of several
                    continue
                length = self._prepare_decode(request, plan.page_updates)
                if length != 1:
                    if not length:
                        continue
                    longer[len(requests)] = length
                if request.needs_seen_tokens and self.limits.num_groups == 1:
                    unseen.append(request)
            request.num_computed = position + length
            request.pending += length
            requests.append(request)
            slots.append(slot)
            starts.append(position)
        self._unseen += unseen
        rows.lengths += [1] * len(requests)
        for row, length in longer.items():
            rows.lengths[row] = length
        samples = plan.samples
        samples.requests += requests
        samples.slots += slots
        samples.rows += range(len(requests))
        return prefilling

    def _in_turn(self) -> list[Request]:
        """The running requests, such that one that loses its pages to another comes behind it."""
        most = len(self.running) * (1 + self.limits.num_drafts)
        if self.pages.pool.num_free >= most and not self.pages.groups.num_windowed:
            return self.running  # a page for each token: none loses any
        return self.waiting.running()

    def _prepare_decode(self, request: Request, page_updates: list[PageUpdate]) -> int:
        """See that the next tokens have pages, by preemption if need be; 0: no row this time."""
        if request.ends_when_pending_is_seen():
            return 0
        waits = request.needs_seen_tokens or self.limits.num_groups > 1
        if waits and (self._unseen or request.pending or request.is_paused):
            return 0
        if not self._resources.may_sample(request):
            return 0
        drafts = self._num_drafts(request) if self._most_drafts else 0
        num_tokens = request.num_computed + 1 + drafts
        if not self.pages.grow(request, num_tokens) and not self._make_room(request, num_tokens):
            return 0
        self.pages.publish(request, num_tokens, page_updates)
        if not (waits or request.takes_turns or self.limits.num_drafts):
            request.decode_until = min(
                self.pages.tokens_in(request.num_published),
                request.num_prompt + request.stop_rule.max_tokens - 1,
            )
        return 1 + drafts

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request pages for its first tokens, by preemption if need be.

        False: it has the last turn of all and lost its slot itself.
        """
        while not self.pages.grow(request, num_tokens):
            if self._held.drop_one():
                continue
            victim = self.waiting.running()[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _drafts_now(self) -> int:
        """Drafts that a row of this step may have; none beside prompts, see `wanted_shapes`."""
        begins = len(self.waiting) > 0 and self._slots.num_free > 0
        if begins or any(request.is_prefilling for request in self.running):
            return 0
        return min(self._drafts_for(len(self.running)), self.limits.num_drafts)

    def _num_drafts(self, request: Request) -> int:
        """Drafts that the next row may have: no more than can be wanted, nor beyond the slot."""
        if not request.takes_drafts:
            return 0
        wanted = request.stop_rule.max_tokens - len(request.output_token_ids) - request.pending - 1
        room = self.limits.max_model_len - request.num_computed - 1
        return max(0, min(self._most_drafts, wanted, room))

    def _has_lane(self, plan: StepPlan) -> bool:
        """Whether one more request fits into the prefill region."""
        samples = len(plan.samples) - plan.num_decode
        return max(len(plan.tokens), samples) < self.limits.max_lanes

    def _plan_chunks(self, plan: StepPlan, requests: list[Request], budget: int) -> int:
        """Add chunks of running requests, in order; returns the tokens of all."""
        used = 0
        for request in requests:
            if used < budget and self._has_lane(plan):
                used += self._plan_chunk(plan, request, budget - used)
        return used

    def _plan_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add a chunk of at most `budget` known tokens; returns its length."""
        start = request.num_computed
        length = min(request.prefill_target - start, budget)
        if start + length == request.prefill_target and not self._resources.may_sample(request):
            length -= 1  # its last token, which samples, waits
        if request.whole_spans:
            length = request.uncut(start, length)
        if not length:
            return 0
        slot, row = request.slot, len(plan.rows)
        assert slot is not None
        self.pages.publish(request, start + length, plan.page_updates)
        rows = plan.rows
        rows.requests.append(request)
        rows.slots.append(slot)
        rows.starts.append(start)
        rows.lengths.append(length)
        plan.tokens[row] = request.prefill_tokens[start : start + length]
        request.num_computed += length
        self._num_computed += length
        self.waiting.computes(request, length)
        if not request.is_prefilling:
            self._plan_sample(plan, request, row)
            if request.group is not None and request.group.front is request:
                self._go_ahead(plan, request, row)
        return length

    @staticmethod
    def _plan_sample(plan: StepPlan, request: Request, row: int) -> None:
        assert request.slot is not None
        request.pending += 1
        plan.samples.requests.append(request)
        plan.samples.slots.append(request.slot)
        plan.samples.rows.append(row)

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Give free slots to waiting requests, as far as tokens, lanes and pages go.

        Returns the tokens that they compute in this step.
        """
        used = 0
        self.short_of_pages = None
        while used < budget and self._slots.num_free and self._has_lane(plan):
            request = self.waiting.peek(self._room.fits)
            # of one that was preempted, a token in flight is not known yet
            if request is None or request.pending:
                break
            if not self._begin(plan, request):
                is_short = self._is_short(request)
                # held for sequences that wait behind this request, they would be held for ever
                if not is_short or self.running or plan or not self._held.drop_one():
                    self.short_of_pages = request if is_short else None
                    break
                continue
            used += self._plan_chunk(plan, request, budget - used)
        passed = self.waiting.passed
        if self.short_of_pages is None and passed is not None and self._is_short(passed):
            self.short_of_pages = passed
        return used

    def _is_short(self, request: Request) -> bool:
        """Whether pages are what a request lacks that does not fit."""
        return not request.takes_turns or not self._room.has_pages(request)

    def _begin(self, plan: StepPlan, request: Request) -> bool:
        """Give a waiting request a slot, of which one is free; False: too few pages are."""
        if not self._room.reserve(request):
            return False
        self._num_computed += request.num_computed
        self._slots.enter(request)
        self.waiting.discard(request)
        request.start_prefill()
        if request.num_computed:
            assert request.slot is not None
            shared = request.pages[: request.num_published]
            known = request.prefill_tokens[: request.num_computed]
            plan.uploads.append(Upload(request.slot, known, shared))
        return True

    def _go_ahead(self, plan: StepPlan, request: Request, row: int) -> None:
        """The front of a group samples: fork those behind from it, and queue the next that is left.

        What a preemption made the front compute again is more than the prompt: then none can fork.
        """
        group = request.group
        assert group is not None
        if request.prefill_target == request.num_prompt:
            while (child := self._next_behind(group)) and self._fork_sibling(
                plan, request, child, row
            ):
                group.take_next()
        if self._next_behind(group):
            self._held.hold(group, self.pages.full_pages(request, request.num_prompt - 1))
        self._queue_next(group)

    def _fork_sibling(self, plan: StepPlan, front: Request, child: Request, row: int) -> bool:
        """Let `child` sample its first token from a row of `front`; False: it has to wait."""
        if not self.waiting.lets_pass(child):
            return False
        if not (self._slots.num_free and self._has_lane(plan)):
            return False
        if not self._resources.has_room(child, samples=True):
            return False
        copied = self.pages.fork(front, child, front.num_prompt, front.num_prompt + 1)
        if copied is None:
            return False
        self._slots.enter(child)
        child.prefill_tokens, child.prefill_target = front.prefill_tokens, front.prefill_target
        self._take_over(front, child, front.num_prompt, copied)
        self._plan_sample(plan, child, row)
        return True

    def _take_over(
        self, source: Request, child: Request, num_tokens: int, copied: tuple[list[int], list[int]]
    ) -> None:
        assert source.slot is not None and child.slot is not None
        self._num_computed += num_tokens
        self._forks.append(Fork(source.slot, child.slot, num_tokens, *copied))

    def _queue_next(self, group: SequenceGroup) -> None:
        """Queue the next sequence of a group; without one, nothing is held any more."""
        group.front = self._next_behind(group)
        if group.front is None:
            self._held.drop(group)
        else:
            group.take_next()
            self.waiting.push(group.front)

    def _next_behind(self, group: SequenceGroup) -> Request | None:
        request = group.next_behind()
        if request is not None:
            self._resources.mark(request)
            self._requests[request.request_id] = request
        return request

    def _preempt(self, request: Request) -> None:
        """Take slot and pages away; the request recomputes its tokens when its turn comes again."""
        self._leave_slot(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.prefill_target = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(request)
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
        self._slots.leave(request)
        self._num_computed -= request.num_computed
        # of tokens in flight the host does not know what they are
        self.pages.keep(request, min(request.num_computed, request.num_tokens))
        self.pages.release(request)

    def page_stats(self) -> PageStats:
        """What the pages hold now, and what was found in them so far."""
        return self.pages.stats(self._num_computed)

    def check_integrity(self) -> None:
        """Assert that slots and pages are owned by exactly the running requests."""
        requests = [r for r in self._requests.values() if isinstance(r, Request)]
        self.pages.check_integrity(requests, self._held.pages())
        if self._num_computed != sum(r.num_computed for r in self.running):
            raise AssertionError("computed tokens are counted wrongly")
        self._slots.check_integrity()
        self.waiting.check_integrity(self.running)
        if any(r.pages for r in self.waiting.requests()):
            raise AssertionError("a waiting request owns pages")
        groups = {r.group if isinstance(r, Request) else r for r in self._requests.values()}
        behind = sum(group.num_behind for group in groups if group is not None)
        if len(self.running) + len(self.waiting) + behind != len(self._requests):
            raise AssertionError("a live request is neither running nor waiting")
