"""Requests are made of messages, queued, and ended: what the loop does between two steps."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, NamedTuple

from jaxserve.boundary.messages import AddGroup, Refusal
from jaxserve.engine.features import EngineFeatures, shared_of
from jaxserve.engine.waiting_room import WaitingRoom
from jaxserve.memory.cold_store import PATIENCE_S
from jaxserve.observability.step_clock import StepClock
from jaxserve.request.request import Request
from jaxserve.scheduling.beams import BeamGroups
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

ABORTS_A_STEP = 2048
BEGIN_WAIT_S = 0.005  # that a step without other work waits for what features have begun


class Parked(NamedTuple):
    """A request that waits for pages of a slow tier, and when it waits no longer."""

    request: Request
    fetched: Future[None]
    deadline: float


class RequestIntake:
    """Queues what messages ask for.

    Args:
        scheduler: takes the requests.
        features: prepare the requests.
        beams: takes the searches.
        clock: is told when requests came and which were aborted.
    """

    def __init__(
        self, scheduler: Scheduler, features: EngineFeatures, beams: BeamGroups, clock: StepClock
    ):
        self._scheduler, self._features = scheduler, features
        self._beams, self._clock = beams, clock
        self._waiting = WaitingRoom()
        self._parked: list[Parked] = []
        self._to_abort: list[str] = []
        # sequences that ended with an error of their own, see `StepOutput.failed`
        self._failed: dict[str, Refusal | None] = {}
        self._queued: list[str] = []  # first sequences of messages for which something was begun

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell that no step brings."""
        return bool(self._failed)

    def __bool__(self) -> bool:
        return bool(self._waiting or self._parked or self._failed)

    def add(self, asked: AddGroup) -> None:
        """Queue what a message asks for, once the features are ready for it.

        An error ends the requests of this message alone.
        """
        try:
            begun = self._features.begin(asked)
            if all(future.done() for future in begun.values()):
                self._queue(asked, shared_of(begun))
            else:
                self._waiting.add(asked, begun)
        except Exception as error:  # whatever it is: its client hears of it by `failed`
            self._fail_message(asked, error)

    def begin_step(self, *, idle: bool) -> None:
        """Queue what has become ready, and end what is to be aborted.

        Args:
            idle: there is nothing else to do, so what is nearly ready is waited for.
        """
        if self._waiting:
            for asked, begun, aborted in self._waiting.take(BEGIN_WAIT_S if idle else 0.0):
                if aborted.issuperset(asked.sequence_ids):
                    continue  # what it waited for may have been cancelled
                try:
                    self._queue(asked, shared_of(begun))
                except Exception as error:  # as in `add`
                    self._fail_message(asked, error)
                self._to_abort += [name for name in asked.sequence_ids if name in aborted]
        if self._parked:
            self._unpark(BEGIN_WAIT_S if idle else 0.0)
        if self._to_abort:
            self._abort_some()

    def abort(self, sequence_ids: list[str]) -> None:
        """End sequences; where they are thousands, others run on between them."""
        self._to_abort += sequence_ids
        self._abort_some()

    def fail(self, request_id: str, error: BaseException | None) -> None:
        """End a sequence with an error of its own; of a search all of it.

        The error is logged unless it says what of the request a feature refuses.
        """
        refusal = Refusal.of(error)
        if refusal is None:
            logger.error("request %s ends with an error", request_id, exc_info=error)
        name = self._beams.name_of(request_id) or request_id
        self._end(name)
        self._failed[name] = refusal

    def take_failed(self) -> dict[str, Refusal | None]:
        """What has failed since the last call, by first sequence, see `StepOutput.failed`."""
        found, self._failed = self._failed, {}
        return found

    def take_queued(self) -> list[str]:
        """The first sequences of messages that were queued since, see `StepOutput.queued`."""
        found, self._queued = self._queued, []
        return found

    def close(self) -> None:
        self._waiting.clear()
        self._parked.clear()

    def _queue(self, asked: AddGroup, shared: Mapping[str, Any]) -> None:
        first, seed = asked.sequence_ids[0], asked.seeds[0]

        def make(name: str, seed: int, group: SequenceGroup | None, what: AddGroup) -> Request:
            request = Request(name, what, seed, group, shared)
            self._features.prepare(request)
            return request

        if asked.beams is not None:
            self._beams.add(asked, lambda name, of_beam: make(name, seed, None, of_beam))
        else:
            group = None
            if len(asked.sequence_ids) > 1:
                ids, seeds = reversed(asked.sequence_ids[1:]), reversed(asked.seeds[1:])
                params = copy.copy(asked.params)
                params.prompt_logprobs = None  # the first one's are those of all
                rest = replace(asked, params=params)
                group = SequenceGroup(
                    dict(zip(ids, seeds, strict=True)),
                    lambda name, seed, group: make(name, seed, group, rest),
                )
            self._schedule(make(first, seed, group, asked))
        self._clock.added(first, asked.queueing.arrival_time)
        if shared:
            self._queued.append(first)

    def _schedule(self, request: Request) -> None:
        """Give the scheduler a request, once pages that it can wait for are there."""
        fetched = self._scheduler.pages.fetch(request)
        if fetched is None:
            self._scheduler.add(request)
            return
        request.lacks_pages_since = now = time.monotonic()
        self._parked.append(Parked(request, fetched, now + PATIENCE_S))

    def _unpark(self, seconds: float = 0.0, sequence_id: str | None = None) -> None:
        """Give the scheduler what need not wait any longer, and the request of a sequence."""
        if seconds:
            wait([one.fetched for one in self._parked], seconds, FIRST_COMPLETED)
        now, parked = time.monotonic(), self._parked
        self._parked = []
        for one in parked:
            request = one.request
            is_named = sequence_id in request.asked.sequence_ids
            if not (one.fetched.done() or now > one.deadline or is_named):
                self._parked.append(one)
                continue
            # there may have been a reset since
            request.cache_root, request.page_keys = None, None
            self._scheduler.add(request)

    def _fail_message(self, asked: AddGroup, error: Exception) -> None:
        for sequence_id in reversed(asked.sequence_ids[1:]):
            self._end(sequence_id)
        self.fail(asked.sequence_ids[0], error)

    def _abort_some(self) -> None:
        for _ in range(min(ABORTS_A_STEP, len(self._to_abort))):
            # the last first: ending the first of a group would make the next of it
            self._end(self._to_abort.pop())

    def _end(self, sequence_id: str) -> None:
        """End a sequence wherever it is, if it is."""
        self._features.ended(sequence_id)
        self._clock.aborted(sequence_id)
        if self._parked:
            self._unpark(sequence_id=sequence_id)
        if not self._beams.abort(sequence_id) and not self._waiting.abort(sequence_id):
            self._scheduler.abort(sequence_id)
