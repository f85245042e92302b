"""The engine's loop on a simulated clock: its scheduler, pages, policies and admission are real.

What the loop of an engine does between two steps is done here in the same order
(`jaxserve/engine/loop.py`, `jaxserve/isolation/child.py`): messages are handled, a step is planned
and handed over, and the step before is waited for and committed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jaxserve.boundary.messages import AddGroup
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import QueueFullError, ValidationError
from jaxserve.memory.manager import PageManager
from jaxserve.observability.busy_window import BusyWindow
from jaxserve.observability.load_trace import KEY_PAGE, TracedRequest, block_tokens
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.ledger_accounts import RequestWork
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policies import PolicyInputs, make_policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.simulation.served import NEVER, Served
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.step_time import StepTime

FAR = math.inf
ANY_TOKEN = 0
FIRST_TOKEN = 2**29  # of tokens that no other request has: keys are below


class _InFlight(NamedTuple):
    plan: StepPlan
    end: float  # when the device is done
    seconds: float  # that it took
    after: float  # seconds of the host then
    delivery: float


class Simulation:
    """One run. It is exact: the same requests and the same costs give the same times.

    Args:
        setting: what an engine would decide for the model and the device.
        step_time: tells what steps take.
        asked: the settings, where they are not those of `setting`: another policy.
        max_concurrency: requests that are under way at once: others wait at their client.
    """

    def __init__(
        self,
        setting: Setting,
        step_time: StepTime,
        asked: EngineConfig | None = None,
        max_concurrency: int | None = None,
    ):
        asked = asked or setting.config.asked
        pages = PageManager(
            setting.num_pages,
            setting.config.cache.page_size,
            caching=asked.enable_prefix_caching,
            groups=setting.groups,
        )
        self.now = 0.0
        self._window = BusyWindow(lambda: self.now)
        inputs = PolicyInputs(
            num_found=lambda request: pages.tokens_in(len(pages.find(request))),
            device_busy=self._window.fraction,
        )
        self.scheduler = Scheduler(
            setting.limits, pages, ClientTurns(partial(make_policy, asked, inputs))
        )
        self._times, self._overlap = step_time, asked.overlap
        self._longest_wait = asked.max_queue_wait or FAR
        self._ledger = Ledger(replace(setting.config, asked=asked), lambda: self.now)
        self._most = max_concurrency or FAR
        self._max_len = setting.limits.max_model_len
        self._device_free = self._busy = 0.0
        self._served = Served(setting.limits.max_num_seqs)
        self._keys: dict[str, int] = {}
        self._params: dict[int, tuple[SamplingParams, StopRule]] = {}
        self._outputs: dict[str, list[int]] = {}  # of requests whose output has keys
        self._slots: dict[str, int] = {}  # of requests that have a token
        self._lost: dict[str, float] = {}  # of those that lost their slots, the newest token
        self._deadlines: deque[tuple[float, int]] = deque()
        self._requests: Iterator[TracedRequest] = iter(())
        self._item: TracedRequest | None = None  # the next one
        self._under_way = 0
        self._free_since = 0.0  # when one of those under way ended last
        self._read = 0.0  # when the server had read the newest request
        self._begun: list[str] = []

    def run(self, requests: Iterable[TracedRequest]) -> Served:
        """Serve all requests, which come by arrival.

        Raises:
            ValidationError: one is longer than the context.
        """
        scheduler = self.scheduler
        self._requests = iter(requests)
        self._item = next(self._requests, None)
        in_flight: _InFlight | None = None
        while self._item is not None or in_flight is not None or scheduler.has_unfinished:
            if in_flight is None and not scheduler.has_unfinished:
                self.now = max(self.now, self._next_arrival())
            while self._next_arrival() <= self.now:
                self._arrive()
            if self._deadlines:
                self._refuse_late()
            dispatched = self._begin_step()
            if dispatched is None and in_flight is None and scheduler.has_unfinished:
                raise RuntimeError("no request can run and none is in flight: the scheduler stalls")
            if self._overlap:
                done, in_flight = in_flight, dispatched
            else:
                done = dispatched
            if done is not None:
                self._commit(done)
                if self._overlap and in_flight is None and scheduler.has_unfinished:
                    in_flight = self._begin_step()
        scheduler.check_integrity()
        served, pages = self._served, scheduler.pages
        served.num_preemptions, served.busy = scheduler.num_preemptions, self._busy
        served.num_queried, served.num_found = pages.num_queried, pages.num_found
        return served

    def _next_sent(self) -> float:
        """When a client sends the next request."""
        if self._item is None or self._under_way >= self._most:
            return FAR
        return max(self._item.arrival, self._free_since)

    def _next_read(self) -> float:
        """When the server has read the next request: one after the other."""
        return max(self._next_sent(), self._read) + self._times.intake

    def _next_arrival(self) -> float:
        """When the engine has the next request."""
        return self._next_read() + self._times.handover

    def _arrive(self) -> None:
        item = self._item
        assert item is not None
        sent, self._read = self._next_sent(), self._next_read()
        self._item = next(self._requests, None)
        prompt, output = item.prompt_tokens, item.output_tokens
        if prompt + output > self._max_len:
            allowed = f"at most max_model_len={self._max_len} tokens of prompt and output"
            raise ValidationError("workload", f"{prompt} + {output} tokens", allowed)
        number = self._served.add(sent, prompt, output, item.priority)
        name = str(number)
        try:
            self._ledger.admit(
                {name: RequestWork(item.client, prompt, 1, item.priority, False, output)}
            )
        except QueueFullError:
            self._served.num_refused += 1
            return
        if output not in self._params:
            params = SamplingParams(max_tokens=output)
            self._params[output] = params, StopRule(frozenset(), frozenset(), 0, output)
        tokens = block_tokens(self._keys, item, FIRST_TOKEN + number)
        if len(item.keys) * KEY_PAGE > prompt:
            self._outputs[name] = tokens[prompt:]
        params, rule = self._params[output]
        turn = Queueing(sent, item.priority, None, item.client)
        asked = AddGroup([name], [0], tokens[:prompt], params, rule, [], turn)
        self.scheduler.add(Request(name, asked))
        self._under_way += 1
        if self._longest_wait < FAR:
            self._deadlines.append((self.now + self._longest_wait, number))

    def _refuse_late(self) -> None:
        """End requests that had no first step in `max_queue_wait`."""
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, number = self._deadlines.popleft()
            if self._served.started[number] == NEVER:
                name = str(number)
                self.scheduler.abort(name)
                self._served.num_refused += 1
                self._end(name, self.now)

    def _end(self, name: str, moment: float) -> None:
        self._ledger.ended(name)
        self._under_way -= 1
        self._free_since = moment
        self._outputs.pop(name, None)
        self._slots.pop(name, None)
        self._lost.pop(name, None)

    def _begin_step(self) -> _InFlight | None:
        """Plan a step and hand it over; None if nothing can run before a commit."""
        scheduler, served = self.scheduler, self._served
        plan = scheduler.plan()
        for request in scheduler.take_preempted():
            name = request.request_id
            if name in self._slots:
                self._lost[name] = served.gaps.newest(self._slots.pop(name))
        if not plan:
            return None
        pages = scheduler.pages.pool.num_used
        took = self._times.of(plan, pages)
        self.now += took.before
        num_decode = plan.num_decode
        rows = plan.rows
        if plan.tokens:
            for request in rows.requests[num_decode:]:
                number = int(request.request_id)
                if served.started[number] == NEVER:
                    served.started[number] = self.now
                    self._begun.append(request.request_id)
        running = len(scheduler.running)
        decoded = sum(rows.lengths[:num_decode])
        served.step(
            self.now, running, scheduler.num_waiting, pages, decoded, sum(rows.lengths) - decoded
        )
        end = max(self.now, self._device_free) + took.device
        self._device_free = end
        return _InFlight(plan, end, took.device, took.after, took.delivery)

    def _commit(self, done: _InFlight) -> None:
        """Take in the tokens of a step once the device is done."""
        plan, samples = done.plan, done.plan.samples
        self.now = max(self.now, done.end)
        moment, served = done.end + done.delivery, self._served
        num_decode = plan.num_decode
        if self._outputs:
            tokens = [self._token(request) for request in samples.requests]
        else:
            tokens = [ANY_TOKEN] * len(samples)
        if num_decode:
            served.gaps.took(samples.slots[:num_decode], moment)
        if self._lost:  # the step was in flight when they lost their slots
            for request in samples.requests[:num_decode]:
                if request.request_id in self._lost:
                    self._lost[request.request_id] = moment
        for request, slot in zip(samples.requests[num_decode:], samples.slots[num_decode:]):
            name = request.request_id
            if served.first[int(name)] == NEVER:
                first = done.end + self._times.first_delivery()
                served.first[int(name)] = first
                served.gaps.begin(slot, first)
            else:  # it goes on
                served.gaps.begin(slot, self._lost.pop(name))
                served.gaps.took([slot], moment)
            if request.slot == slot:
                self._slots[name] = slot
            else:
                self._lost[name] = moment
        seen = self.scheduler.commit(plan, tokens)
        self.now += done.after
        self._busy += done.seconds
        self._window.record(self._busy)
        for entry in seen.ends:
            name = seen.requests[entry].request_id
            served.last[int(name)] = max(moment, served.first[int(name)])
            self._end(name, moment)
        self._ledger.stepped(self._begun, len(self.scheduler.running), done.end)
        self._begun.clear()

    def _token(self, request: Request) -> int:
        """The next token of a request, where its keys say so."""
        known = self._outputs.get(request.request_id)
        return ANY_TOKEN if known is None else known[len(request.output_token_ids)]
