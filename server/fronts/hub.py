"""The fronts of a server: started, told of the engine's steps, replaced when they die.

The server's process has the clients of the engines, their ledgers, the metrics, kept responses and
everything else that there is once. It accepts no connection: fronts do.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from starlette.types import ASGIApp

from jaxserve.boundary.front_messages import (
    AboutModel,
    Drain,
    EngineStanding,
    FrontClose,
    FrontStart,
)
from jaxserve.boundary.messages import StepOutput
from jaxserve.errors import EngineDeadError
from jaxserve.liveness.pulse import Pulse
from server.counts import REFUSED, Cell, Counts
from server.fronts.board import Board
from server.fronts.front_process import HUNG_S, FrontProcess
from server.fronts.step_slices import slices
from server.http_settings import DRAIN_S
from server.keys import ApiKey
from server.service import Service

logger = logging.getLogger("jaxserve.server")

LOOK_S = 0.1  # between two looks at the engine
POLL_S = 0.02
MOST_DEATHS = 3  # of a front in a row, before it has answered
OWN_ROW = 0  # of the board: the server's


class Hub:
    """The fronts of one server; the thread of its event loop uses them.

    Args:
        args: the flags of `jaxserve serve`, checked, with those of other models as `others`.
        keys: the API keys.
        listener: the socket that clients connect to.

    Attributes:
        counts: of the server's process.
        error: why no front can be kept running; None: they run.
    """

    def __init__(self, args: argparse.Namespace, keys: Sequence[ApiKey], listener: socket.socket):
        self._keys, self._listener = keys, listener
        count = args.api_server_count
        without = ("func", "others")
        self._flags = [
            {name: value for name, value in vars(one).items() if name not in without}
            for one in (args, *args.others)
        ]
        self._board = Board(1 + count, len(keys), len(self._flags))
        self.counts = self._board.counts(OWN_ROW)
        self.error: str | None = None
        self._fronts: list[FrontProcess | None] = [None] * count
        self._by_name: dict[str, FrontProcess] = {}
        self._deaths = [0] * count  # in a row
        self._num_started = 0
        self._is_loaded = self._is_ending = False

    def serve(self, service: Service, app: ASGIApp) -> None:
        """Serve by an application, which answers what fronts do not."""
        self._service, self._app = service, app
        self._models = [
            _Model(one, self._board.counts(OWN_ROW, place))
            for place, one in enumerate(service.models)
        ]

    def begin(self) -> None:
        """Start the fronts, which wait for the engine, and look after them from now on.

        Raises:
            EngineDeadError: one cannot be started.
        """
        for place, _ in enumerate(self._fronts):
            self._start(place)
        for model in self._models:
            model.engine.client.on_step = partial(self._stepped, model.name)
        pids = {f"front-{place}": partial(self._pid, place) for place, _ in enumerate(self._fronts)}
        self._models[0].engine.metrics.watch_processes(pids)
        self._looking = asyncio.ensure_future(self._look())

    def load(self) -> None:
        """The engines are ready: the fronts are told what they are.

        They let in no request before the server does, see `Service.is_held` and `tell_standing`.
        """
        self._is_loaded = True
        for model in self._models:
            model.standing = self._now(model)
        for front in self._by_name.values():
            self._tell_engines(front)

    async def wait_ready(self) -> None:
        """Wait until all fronts answer, or `error` says why they never will."""
        while not self.error and not all(one is not None and one.is_ready for one in self._fronts):
            await asyncio.sleep(POLL_S)

    def tell_standing(self) -> None:
        """Tell fronts whether each engine serves and how full it is, where that has changed."""
        for model in self._models:
            now = self._now(model)
            if now != model.standing:
                model.standing = now
                for front in self._by_name.values():
                    front.send(AboutModel(model.name, now))

    async def drain(self, seconds: float) -> None:
        """Wait until no front has a request any more, as long as that."""
        self._is_ending = True
        fronts = [*self._by_name.values()]
        for front in fronts:
            front.send(Drain(seconds))
        waits = [one.drained.wait() for one in fronts]
        try:
            await asyncio.wait_for(asyncio.gather(*waits), seconds)
        except TimeoutError:
            return

    async def settle(self) -> None:
        """Wait until the answers are made that fronts pass on, at most as long as connections."""
        deadline = time.monotonic() + DRAIN_S
        while any(one.num_answers for one in self._by_name.values()):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """End the fronts, once their connections have ended."""
        self._is_ending = True
        fronts = [*self._by_name.values()]
        for front in fronts:
            for model in self._models:
                front.send(AboutModel(model.name, self._now(model)))
            front.send(FrontClose())
        deadline = time.monotonic() + DRAIN_S + 1
        for front in fronts:
            front.wait(max(0.1, deadline - time.monotonic()))

    # -- within ----------------------------------------------------------------------------------

    def _pid(self, place: int) -> int | None:
        front = self._fronts[place]
        return None if front is None else front.pid

    def _start(self, place: int) -> None:
        self._num_started += 1
        start = FrontStart(
            [one.engine.asked for one in self._models],
            self._flags,
            [asdict(one) for one in self._keys],
            str(self._num_started),
            1 + place,
            self._board.rows,
            self._board.descriptor,
            self._listener.fileno(),
            self._service.created,
        )
        front = FrontProcess(start, self._service, self._app, self._ended, self.tell_standing)
        self._fronts[place] = self._by_name[front.name] = front
        if self._is_loaded:
            self._tell_engines(front)

    def _tell_engines(self, front: FrontProcess) -> None:
        for model in self._models:
            ready = model.engine.client.ready
            assert ready is not None
            front.send(AboutModel(model.name, ready))
            front.send(AboutModel(model.name, model.standing))

    def _ended(self, front: FrontProcess, how: str) -> None:
        """A front has ended: its requests do, and another one takes its place."""
        front.lost()
        self._by_name.pop(front.name, None)
        if self._is_ending:
            return
        self._board.clear(front.row)
        place = front.row - 1
        self._deaths[place] = 0 if front.is_ready else self._deaths[place] + 1
        logger.error("a front process %s: another one is started", how)
        self._fronts[place] = None
        if self._deaths[place] < MOST_DEATHS:
            try:
                return self._start(place)
            except EngineDeadError as error:
                how = str(error)
        self.error = f"the front processes of --api-server-count cannot be kept running: one {how}"

    def _stepped(self, model: str, step: StepOutput) -> None:
        for name, part in slices(step).items():
            front = self._by_name.get(name)
            if front is not None:
                front.send(AboutModel(model, part))

    async def _look(self) -> None:
        """Tell fronts how engines stand, add up what they have counted, end those that hang."""
        pulse = Pulse()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.tell_standing()
                self._add_up()
                self._end_hung(pulse.beat())
            except Exception:  # the loop goes on, or hung fronts would stay
                logger.exception("fronts could not be told how the engines stand")

    def _end_hung(self, seconds: float) -> None:
        """Kill fronts that stand still; others take their places. `seconds`: see `is_hung`."""
        for front in self._by_name.values():
            if front.is_ready and front.is_hung(self._board.of_row(front.row, Cell.TURNS), seconds):
                logger.error("a front process has not answered for %g s: it is killed", HUNG_S)
                front.kill()

    def _now(self, model: _Model) -> EngineStanding:
        word, text = self._word(model)
        stats = model.engine.client.stats()
        return EngineStanding(word, text, stats.num_waiting, stats.page_usage)

    def _word(self, model: _Model) -> tuple[str, str]:
        engine = model.engine
        if engine.is_dead:
            return "dead", str(engine.error or "the engine was shut down")
        if engine.is_restarting:
            return "restarting", ""
        if model.service.is_held or not engine.is_ready:
            return "loading", ""
        if engine.refusal is not None:
            return "paused", engine.refusal
        silence = engine.silence
        return ("ok", "") if silence is None else ("silent", silence)

    def _add_up(self) -> None:
        for model in self._models:
            model.add_up()


class _Model:
    """One of the models, as the hub has it.

    Args:
        service: of it.
        counts: of the server's process, of this model.

    Attributes:
        name: the first of its names.
        engine: of it.
        standing: what fronts were told last.
    """

    def __init__(self, service: Service, counts: Counts):
        self.service, self._counts = service, counts
        self.name, self.engine = service.model_names[0], service.engine
        self.standing = EngineStanding("loading")
        self._refused = dict.fromkeys(REFUSED, 0.0)

    def add_up(self) -> None:
        """Tell its engine's metrics what fronts have computed and refused."""
        total = self._counts.total
        self.engine.clock.elsewhere = total(Cell.TEXT_S), total(Cell.HTTP_S)
        for limit, cell in REFUSED.items():
            count = total(cell) - self._refused[limit]
            if count:
                self._refused[limit] += count
                self.engine.metrics.record_refused(limit, int(count))
