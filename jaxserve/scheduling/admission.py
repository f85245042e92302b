"""Which requests may wait: limits on what waits already and on the wait that is predicted.

It stands where requests come from, before the engine: what it knows of the queue is what was sent,
and what the engine has said of first steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.errors import QueueFullError
from jaxserve.resolved import ResolvedConfig
from jaxserve.scheduling.policies import make_policy
from jaxserve.scheduling.wait_predictor import WaitPredictor

FIRST = -(2**63)  # the priority that goes before all others
MOST_TOKENS = 2**31  # of a prompt, longer than any
# A request that two plans have passed over waits for want of room, not for the step in flight.
PASSED_OVER = 2
MOST_BATCHES = 256  # that are remembered
# Of max_queue_wait, that a request may wait in a queue which has stood for longer than that.
STANDING_SHARE = 0.5


class _Waiting(NamedTuple):
    tokens: int
    rank: int
    since: int  # number of the step before it came
    compiles: bool


class Admission:
    """Keeps account of the requests that wait and refuses more than the limits allow.

    A request of several sequences waits until the first of them begins, and counts once.

    Args:
        config: the resolved configuration.
    """

    def __init__(self, config: ResolvedConfig):
        self._limits = config.server
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._policy = make_policy(config.scheduler)  # asked for ranks alone
        ranks = self._policy.rank(1, FIRST), self._policy.rank(MOST_TOKENS, -FIRST - 1)
        self._serves_by_arrival = ranks[0] == ranks[1]
        self._waiting: dict[str, _Waiting] = {}  # by the id of the first sequence
        self._by_rank: dict[int, tuple[int, int]] = {}  # requests and tokens
        self._tokens = 0
        self._predictor = WaitPredictor()
        self._num_steps = 0
        self._last_step = 0.0
        self._backlog = False
        self._backlog_since = 0.0
        self._slots_taken = False
        self._batches: dict[float, None] = {}  # when the last ones came, of which some were let in

    @property
    def allowed_wait(self) -> float:
        """Longest predicted wait of a request that comes now, in seconds.

        A queue is there for what comes in bursts. One that stands for longer than its limit keeps
        no slot busier and has everybody wait: then half of it is enough, and what is left of the
        limit is there for what no prediction knows.
        """
        most = self._limits.max_queue_wait
        has_stood = self._backlog and self._last_step - self._backlog_since > most
        return most * STANDING_SHARE if has_stood else most

    def check_room(self, requests: int = 1, entering: int = 0) -> None:
        """Refuse requests of which nothing but their number is known.

        Args:
            requests: how many.
            entering: that were let in before them and are not added yet. They count in the
                predicted wait, where whoever comes first is served first.

        Raises:
            QueueFullError: whatever they are, they would be refused.
        """
        self._check(requests, 0, self._policy.rank(1, FIRST), entering)

    def check(self, num_prompt: int, priority: int, arrival_time: float) -> None:
        """Refuse a request.

        The predicted wait decides of the first of those that came at one time, which are the
        prompts of one call: a call is not refused for its own length, nor when half of it is done.

        Raises:
            QueueFullError: names the limit that is reached.
        """
        rank = self._policy.rank(num_prompt, priority)
        self._check(1, num_prompt, rank, let_in=arrival_time in self._batches)

    def added(
        self,
        sequence_id: str,
        num_prompt: int,
        priority: int,
        arrival_time: float,
        *,
        compiles: bool = False,
    ) -> None:
        """A request was sent to the engine; `sequence_id` is its first sequence.

        One that `compiles` waits for its grammar first, which says nothing of the queue.
        """
        if arrival_time not in self._batches:
            self._batches[arrival_time] = None
            if len(self._batches) > MOST_BATCHES:
                del self._batches[next(iter(self._batches))]
        rank = self._policy.rank(num_prompt, priority)
        self._waiting[sequence_id] = _Waiting(num_prompt, rank, self._num_steps, compiles)
        self._count(rank, 1, num_prompt)

    def ended(self, sequence_id: str) -> None:
        """It was ended by the client, perhaps while it waited."""
        if self._remove(sequence_id) is None:
            self._slots_taken = False  # no step may follow that says so
        if not self._waiting:
            self._backlog = False  # nor that nobody is kept waiting

    def stepped(self, first_steps: Iterable[str], now: float, num_running: int) -> None:
        """The engine has planned a step.

        Args:
            first_steps: sequences that have begun with it.
            now: the time, in seconds.
            num_running: sequences with a slot.
        """
        begun = [found for name in first_steps if (found := self._remove(name)) is not None]
        if self._backlog:
            tokens = sum(one.tokens for one in begun)
            self._predictor.measured(now - self._last_step, len(begun), tokens)
        self._num_steps += 1
        self._last_step = now
        oldest = next((one for one in self._waiting.values() if not one.compiles), None)
        had_backlog = self._backlog
        self._backlog = oldest is not None and self._num_steps - oldest.since > PASSED_OVER
        if self._backlog and not had_backlog:
            self._backlog_since = now
        self._slots_taken = num_running >= self._max_num_seqs

    def restarted(self, now: float) -> None:
        """A new engine begins: how long there was none says nothing of the queue."""
        self._backlog = self._slots_taken = False
        self._last_step = now

    def _check(
        self, requests: int, tokens: int, rank: int, entering: int = 0, *, let_in: bool = False
    ) -> None:
        limits, waiting = self._limits, len(self._waiting)
        most, most_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
        if waiting + requests > most:
            self._refuse("max_num_queued_reqs", f"{waiting} requests wait, {most} may", rank)
        if waiting and self._tokens + tokens > most_tokens:
            text = f"{self._tokens} prompt tokens wait, {most_tokens} may"
            self._refuse("max_num_queued_tokens", text, rank)
        if limits.max_queue_wait < math.inf and not let_in:
            wait, allowed = self._predicted(rank, entering), self.allowed_wait
            if wait > allowed:
                text = f"the predicted wait is {wait:.1f} s, {allowed:g} s is allowed"
                self._refuse("max_queue_wait", text, rank)

    def _refuse(self, limit: str, text: str, rank: int) -> None:
        raise QueueFullError(limit, text, self._predicted(rank))

    def _predicted(self, rank: int, entering: int = 0) -> float:
        ahead = [counts for other, counts in self._by_rank.items() if other <= rank]
        requests, tokens = (sum(part) for part in zip(*ahead)) if ahead else (0, 0)
        if self._serves_by_arrival:
            requests += entering
        return self._predictor.wait(requests, tokens, slots_taken=self._slots_taken)

    def _remove(self, sequence_id: str) -> _Waiting | None:
        found = self._waiting.pop(sequence_id, None)
        if found is not None:
            self._count(found.rank, -1, -found.tokens)
        return found

    def _count(self, rank: int, requests: int, tokens: int) -> None:
        self._tokens += tokens
        before = self._by_rank.get(rank, (0, 0))
        after = before[0] + requests, before[1] + tokens
        if after[0]:
            self._by_rank[rank] = after
        else:
            del self._by_rank[rank]
