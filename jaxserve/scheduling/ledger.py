"""Which requests may wait: one account of what was let in and has not ended, by client.

The ledger stands where requests come from, before the engine. It knows what was sent to the engine
and what the engine has said of steps. It holds numbers and names alone and takes a clock, so that
several front processes can share one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import QueueFullError
from jaxserve.scheduling.ledger_accounts import Account, EnginePace, RequestWork
from jaxserve.scheduling.policies import make_policy

FIRST = -(2**63)  # the priority that goes before all others
MOST_TOKENS = 2**31  # of a prompt, longer than any
# A request that two plans have passed over waits for want of room, not for the step in flight.
PASSED_OVER = 2
# Seconds after which what slots did counts e times less, where no longer wait is allowed; seconds
# of all slots that have to be known before they say anything.
MEMORY_S, LEAST_S = 3.0, 0.5
# A client below its share of a full queue is let in, up to so many times the queue's limit.
OVERFLOW = 2


class _Admitted:
    """A request that was admitted and has not ended."""

    __slots__ = ("compiles", "rank", "sequences", "since", "waits", "work")

    def __init__(self, work: RequestWork, rank: int, since: int):
        self.work, self.rank, self.since = work, rank, since
        self.compiles = work.compiles  # still
        # that want a slot or have one
        self.sequences = 0 if work.compiles else work.sequences
        self.waits = True  # for its first step


class Entry:
    """A request that was let in by its head and is not admitted to the engine yet.

    It counts from when its body is there: a head alone is no work. Of many that arrive at a time
    the last is judged with the others in mind.
    """

    __slots__ = ("_client", "_counts", "_ledger")

    def __init__(self, ledger: Ledger, client: str):
        self._ledger, self._client = ledger, client
        self._counts = False

    def arrive(self) -> None:
        """The body is there."""
        if not self._counts:
            self._counts = True
            self._ledger.count_entering(self._client, 1)

    def leave(self) -> None:
        """The request is admitted, or was answered otherwise; a second call changes nothing."""
        if self._counts:
            self._counts = False
            self._ledger.count_entering(self._client, -1)


class Ledger:
    """Decides which requests are admitted. Used by one thread.

    Clients share the engine: each may have its share of the slots before any has more (max-min
    fairness), as the scheduler's turns see to it. So a client that has little does not wait for one
    that has much, and neither the prediction nor a full queue refuses it for what others sent.

    Several engines of one model are to a client one engine with the slots of all of them. One that
    is lost has no slots, and its requests wait for none of the others'.

    Args:
        config: the resolved configuration.
        clock: seconds.
        engines: their number.

    Attributes:
        num_entering: requests that have arrived and are not admitted yet.
        num_waiting: admitted requests without a first step.
    """

    def __init__(
        self, config: ResolvedConfig, clock: Callable[[], float] = time.monotonic, engines: int = 1
    ):
        asked, self._slots = config.asked, config.scheduler.max_num_seqs
        self._most = asked.max_num_queued_reqs or math.inf, asked.max_num_queued_tokens or math.inf
        self._most_bytes = asked.max_media_bytes or math.inf
        self._longest = asked.max_queue_wait or math.inf  # seconds
        self._clock = clock
        self._policy = make_policy(config.asked)  # asked for ranks alone
        first = self._policy.rank(1, FIRST)
        last = self._policy.rank(MOST_TOKENS, -FIRST - 1, MOST_TOKENS)
        self._serves_by_arrival = first == last
        self._accounts = defaultdict[str, Account](Account)
        self._admitted: dict[str, _Admitted] = {}  # by request id
        # of these, those without a first step, and the others and when that was; the oldest first
        self._waiting: dict[str, None] = {}
        self._begun: dict[str, float] = {}
        self.num_entering = 0
        self._tokens = 0  # of prompts that wait
        self._bytes = 0  # of the media of admitted requests
        self._sequences = 0
        self._engines = [EnginePace(self._slots) for _ in range(engines)]
        # of late: for how many seconds slots were held, all of them added, and how many were freed
        self._held = self._freed = 0.0
        self._told = 0.0  # up to when these tell
        self._memory = max(MEMORY_S, asked.max_queue_wait or 0.0)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of admitted requests without a first step."""
        return self._tokens

    @property
    def capacity(self) -> int:
        """Sequences that run at once, in all engines."""
        return max(1, sum(one.capacity for one in self._engines if not one.is_lost))

    def work(self, engine: int) -> int:
        """Tokens that an engine has to compute, as far as its requests tell."""
        return self._engines[engine].work

    def engine_of(self, request_id: str) -> int | None:
        """The engine of a request that was admitted and has not ended."""
        one = self._admitted.get(request_id)
        return None if one is None else one.work.engine

    def check(self, client: str = "", requests: int = 1) -> None:
        """Refuse requests of which nothing is known but their client and number.

        Raises:
            QueueFullError: they would be refused whatever they are.
        """
        self._check(client, requests, 0, self._policy.rank(1, FIRST))

    def enter(self, client: str) -> Entry:
        """A request of a client was let in by its head."""
        return Entry(self, client)

    def admit(self, works: Mapping[str, RequestWork]) -> None:
        """Let the requests of one call in, all of them or none; they wait from now on.

        The predicted wait of the first decides: a call is not refused for its own length.

        Args:
            works: by request id.

        Raises:
            QueueFullError: names the limit that is reached.
        """
        self.check_call([*works.values()])
        self.take(works)

    def check_call(self, works: Sequence[RequestWork]) -> None:
        """Refuse the requests of one call, see `admit`; which engines they are for says nothing.

        Raises:
            QueueFullError: names the limit that is reached.
        """
        first = works[0]
        tokens = sum(work.num_prompt for work in works)
        rank = self._policy.rank(first.num_prompt, first.priority, first.num_output)
        more = sum(work.media_bytes for work in works)
        self._check(first.client, len(works), tokens, rank, more)

    def take(self, works: Mapping[str, RequestWork]) -> None:
        """The requests of a call that was checked wait from now on, by request id."""
        for request_id, work in works.items():
            rank = self._policy.rank(work.num_prompt, work.priority, work.num_output)
            since = self._engines[work.engine].num_steps
            self._admitted[request_id] = one = _Admitted(work, rank, since)
            self._waiting[request_id] = None
            account = self._accounts[work.client]
            account.admitted += 1
            account.media_bytes += work.media_bytes
            self._bytes += work.media_bytes
            self._count_sequences(one, one.sequences)
            self._count_waiting(one, 1)

    def is_admitted(self, request_id: str) -> bool:
        """Whether a request was admitted and has not ended."""
        return request_id in self._admitted

    def compiled(self, request_id: str) -> bool:
        """A request waits for its grammar no more; False if it did not wait for one."""
        one = self._admitted.get(request_id)
        if one is None or not one.compiles:
            return False
        self._count_waiting(one, -1)
        one.compiles, one.sequences = False, one.work.sequences
        one.since = self._engines[one.work.engine].num_steps
        self._count_waiting(one, 1)
        self._count_sequences(one, one.sequences)
        return True

    def ended(self, request_id: str) -> None:
        """All sequences of a request have ended, or it was never sent; unknown ones are let be."""
        one = self._admitted.pop(request_id, None)
        if one is None:
            return
        freed = 0 if one.waits or self._engines[one.work.engine].is_lost else one.sequences
        self._count_sequences(one, -one.sequences)
        self._freed += min(freed, self.capacity)  # of a large group few have a slot
        if one.waits:
            self._begin(request_id, one)
        del self._begun[request_id]
        account = self._accounts[one.work.client]
        account.admitted -= 1
        account.media_bytes -= one.work.media_bytes
        self._bytes -= one.work.media_bytes
        self._tidy(one.work.client)

    def moved(self, request_id: str, engine: int) -> None:
        """A request that was admitted is another engine's from now on."""
        one = self._admitted[request_id]
        self._count(one, -1)
        one.work, one.since = one.work._replace(engine=engine), self._engines[engine].num_steps
        self._count(one, 1)

    def sequence_ended(self, request_id: str) -> None:
        """A sequence of a request has ended; its slot is free."""
        one = self._admitted.get(request_id)
        if one is not None and one.sequences:
            if one.waits:
                self._begin(request_id, one)
            one.sequences -= 1
            self._count_sequences(one, -1)
            self._freed += 1

    def stepped(
        self, begun: Iterable[str], num_running: int, ended_at: float | None, engine: int = 0
    ) -> None:
        """An engine has run or planned a step.

        Args:
            begun: requests that are in a step for the first time.
            num_running: sequences with a slot.
            ended_at: when the step ended, by the clock; None: none has run.
            engine: its number.
        """
        now, pace = self._catch_up(), self._engines[engine]
        for request_id in begun:
            one = self._admitted.get(request_id)
            if one is not None and one.waits:
                self.compiled(request_id)
                self._begin(request_id, one)
        pace.num_steps += 1
        pace.last_step = now
        if ended_at is not None:
            pace.behind = max(0.0, now - ended_at)
        oldest = self._oldest_of(engine) if self._waiting else None
        is_passed_over = oldest is not None and pace.num_steps - oldest.since > PASSED_OVER
        # where pages or prompt tokens are short, fewer run than there are slots
        pace.capacity = max(1, num_running) if is_passed_over else self._slots

    def _oldest_of(self, engine: int) -> _Admitted | None:
        """The request that has waited longest for a slot of an engine."""
        queued = (self._admitted[name] for name in self._waiting)
        of_engine = (one for one in queued if one.work.engine == engine)
        return next((one for one in of_engine if not one.compiles), None)

    def lost(self, engine: int) -> None:
        """An engine serves nothing until it is restarted; its requests want no others' slots."""
        pace = self._engines[engine]
        if not pace.is_lost:
            self._catch_up()
            self._recount(engine, is_lost=True)

    def restarted(self, engine: int = 0) -> None:
        """Another engine begins: what the slots of the last one did says nothing of its own."""
        now, pace = self._catch_up(), self._engines[engine]
        self._recount(engine, is_lost=False)
        self._held = self._freed = 0.0
        pace.num_steps, pace.last_step, pace.capacity, pace.behind = 0, now, self._slots, 0.0
        for request_id in self._waiting:
            one = self._admitted[request_id]
            if one.work.engine == engine:
                one.since = 0

    def predicted_wait(self, client: str, rank: int) -> float:
        """Seconds until a request that comes now has its first step; 0 before anything is known.

        The sequences that its client has beyond its share wait for as many slots to become free;
        requests of a greater rank do not go before it. A slot is held for as long as slots were of
        late, and nothing waits while one is free.
        """
        now, capacity = self._catch_up(), self.capacity
        behind = min(
            (
                2 * one.behind if now - one.last_step < LEAST_S else 0.0
                for one in self._engines
                if not one.is_lost
            ),
            default=0.0,
        )
        entering = self.num_entering if self._serves_by_arrival else 0
        is_known = self._held >= LEAST_S * capacity
        if self._sequences + entering < capacity or not is_known:
            return behind
        level = self._level(client)
        ahead = 0
        account = self._accounts.get(client)
        if account is not None:
            ahead = account.sequences + (account.entering if self._serves_by_arrival else 0)
            ahead -= sum(n for other, n in account.waiting_by_rank.items() if other > rank)
        excess = ahead + 1 - level
        if excess <= 0:
            return behind
        # where few have ended of late, those that run are taken to be half done
        most = 2 * max(MEMORY_S, now - next(iter(self._begun.values()), now))
        return behind + excess * min(self._held / max(self._freed, 1.0), most) / level

    def count_entering(self, client: str, change: int) -> None:
        """So many more requests of a client have arrived and are not admitted."""
        self._accounts[client].entering += change
        self.num_entering += change
        self._tidy(client)

    def _catch_up(self) -> float:
        """Count for how long slots were held until now, which is returned, and forget as much.

        Called before anything changes that says how many are held.
        """
        now = self._clock()
        kept = math.exp((self._told - now) / self._memory)
        held = min(self._sequences, self.capacity)
        self._held = self._held * kept + held * self._memory * (1 - kept)
        self._freed *= kept
        self._told = now
        return now

    def _level(self, client: str) -> float:
        """Slots that each client may have, if it wants as many, `client` counted (max-min)."""
        wanted = [
            account.sequences + account.entering
            for name, account in self._accounts.items()
            if name != client
        ]
        wanted.sort()
        left, others = float(self.capacity), len(wanted)
        for place, count in enumerate(wanted):
            share = left / (others - place + 1)
            if count >= share:
                return share
            left -= count
        return left

    def _check(
        self, client: str, requests: int, tokens: int, rank: int, media_bytes: int = 0
    ) -> None:
        account, (most, most_tokens) = self._accounts.get(client) or Account(), self._most
        here, mine = self.num_entering + self.num_waiting, account.entering + account.waiting
        if not _has_room(here, mine, requests, most, self._waiting_by_client()):
            self._refuse("max_num_queued_reqs", f"{here} requests wait, {most} may", client, rank)
        if self._waiting and not _has_room(
            self._tokens, account.tokens, tokens, most_tokens, self._waiting_by_client()
        ):
            text = f"{self._tokens} prompt tokens wait, {most_tokens} may"
            self._refuse("max_num_queued_tokens", text, client, rank)
        holding = (one.media_bytes for one in self._accounts.values())
        mine = account.media_bytes
        if (
            self._bytes
            and media_bytes
            and not _has_room(self._bytes, mine, media_bytes, self._most_bytes, holding)
        ):
            held = f"{self._bytes} bytes of images and embeddings"
            text = f"requests hold {held}, {self._most_bytes} may"
            self._refuse("max_media_bytes", text, client, rank)
        if self._longest < math.inf:
            wait = self.predicted_wait(client, rank)
            if wait > self._longest:
                text = f"the predicted wait is {wait:.1f} s, {self._longest:g} s is allowed"
                self._refuse("max_queue_wait", text, client, rank)

    def _waiting_by_client(self) -> Iterable[int]:
        return (one.waiting + one.entering for one in self._accounts.values())

    def _refuse(self, limit: str, text: str, client: str, rank: int) -> NoReturn:
        raise QueueFullError(limit, text, self.predicted_wait(client, rank))

    def _tidy(self, client: str) -> None:
        account = self._accounts[client]
        if not (account.entering or account.admitted):
            del self._accounts[client]

    def _begin(self, request_id: str, one: _Admitted) -> None:
        """A request waits no more."""
        self._count_waiting(one, -1)
        one.waits = False
        del self._waiting[request_id]
        self._begun[request_id] = self._told

    def _recount(self, engine: int, *, is_lost: bool) -> None:
        """Count the requests of an engine as those of one that is lost, or is there again."""
        mine = [one for one in self._admitted.values() if one.work.engine == engine]
        for one in mine:
            self._count(one, -1)
        self._engines[engine].is_lost = is_lost
        for one in mine:
            self._count(one, 1)

    def _count(self, one: _Admitted, sign: int) -> None:
        """Count all that a request has and wants, or no more."""
        self._count_sequences(one, sign * one.sequences)
        if one.waits:
            self._count_waiting(one, sign)

    def _count_waiting(self, one: _Admitted, change: int) -> None:
        account = self._accounts[one.work.client]
        account.waiting += change
        account.tokens += change * one.work.num_prompt
        self._tokens += change * one.work.num_prompt
        pace = self._engines[one.work.engine]
        pace.work += change * one.work.num_prompt
        if pace.is_lost:
            return
        account.waiting_by_rank[one.rank] += change * one.sequences
        if not account.waiting_by_rank[one.rank]:
            del account.waiting_by_rank[one.rank]

    def _count_sequences(self, one: _Admitted, change: int) -> None:
        self._catch_up()
        pace = self._engines[one.work.engine]
        pace.work += change * one.work.output_work
        if pace.is_lost:
            return
        self._accounts[one.work.client].sequences += change
        self._sequences += change


def _has_room(here: int, mine: int, more: int, most: float, others: Iterable[int]) -> bool:
    """Whether so many more may be let in: there is room, or their client has not its share.

    Args:
        here, mine: how many there are, and of them the client's.
        more, most: that come, and that there is room for.
        others: what each client has, this one too; those that have some share the room.
    """
    if here + more <= most:
        return True
    clients = sum(1 for count in others if count)
    share = most / max(1, clients if mine else clients + 1)
    return mine + more <= max(1.0, share) and here + more <= OVERFLOW * most
