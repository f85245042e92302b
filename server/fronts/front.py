"""The HTTP server of a front, and what passes between it and the server that has the engines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import uvicorn

from jaxserve.async_engine import AsyncEngine
from jaxserve.boundary.front_messages import (
    AboutModel,
    Drain,
    FrontClose,
    FrontReady,
    FrontStart,
    HttpAnswer,
)
from jaxserve.boundary.messages import Body
from jaxserve.client.front_client import FrontClient
from jaxserve.config.engine_config import EngineConfig
from jaxserve.observability.step_clock import ClientClock
from jaxserve.processes.wire import Channel, Ready
from server.app import create_app
from server.commands.edge_flags import allowed_hosts, edge_limits
from server.commands.log_flags import tracer
from server.commands.parser_flags import parsers
from server.commands.surface_flags import options
from server.counts import REFUSED, Cell, Counts
from server.descriptors import Descriptors
from server.engine_route import engine_paths
from server.fronts.board import Board
from server.fronts.forwarding import Forwarding
from server.http_settings import http_settings
from server.keys import ApiKey
from server.listen_socket import as_many
from server.process_end import exit_now
from server.process_settings import SWITCH_S, leave_out_of_collections, workers_of
from server.service import Service

logger = logging.getLogger("jaxserve.server")

# What a front answers beside what waits for the engine; what is kept, is the server's.
BESIDE = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
KEPT = ("/v1/responses",)
CLOCK_S = 0.5  # between two looks at what this process has computed, and two signs of life


class Front:
    """Answers HTTP in this process until it is told to end.

    Args:
        start: what the server has told of itself.
        stream: to the server.
        channel: the messages on it.
    """

    def __init__(self, start: FrontStart, stream: socket.socket, channel: Channel):
        self._stream, self._channel, self._start = stream, channel, start
        args, *others = (argparse.Namespace(**one) for one in start.flags)
        keys = [ApiKey(**one) for one in start.keys]
        models, file = len(start.configs), open(start.board, "r+b")  # noqa: SIM115
        board = Board(start.rows, len(keys), models, file)
        self._counts = board.counts(start.row)
        sys.setswitchinterval(SWITCH_S)
        self._models = [
            _Model(config, board.counts(start.row, place), self._send)
            for place, config in enumerate(start.configs)
        ]
        self._by_name = {one.name: one for one in self._models}
        first, *more = (one.engine for one in self._models)
        app = create_app(
            first,
            api_keys=keys,
            allowed_origins=args.allowed_origins,
            allowed_hosts=allowed_hosts(args),
            limits=edge_limits(args),
            options=options(args),
            parsers=parsers(args),
            tracer=tracer(args, self._models[0].name),
            has_page=False,
            counts=self._counts,
            others=[(engine, parsers(flags)) for engine, flags in zip(more, others)],
        )
        self._service: Service = app.state.service
        for one in self._service.models:
            one.created = start.created
        descriptors = Descriptors.raised(self._service.limits.max_connections)
        waiting = {
            sent: path
            for sent, path in engine_paths(app.routes, self._service.options.root_path).items()
            if path not in KEPT
        }
        paths = {*waiting.values(), *BESIDE}
        self._forwarding = Forwarding(app, paths, self._service, self._send)
        settings = http_settings(self._forwarding, args, self._service, waiting, descriptors)
        listener = socket.socket(fileno=start.listener)
        self._sockets = as_many(listener, descriptors.listeners)
        self._server = _Server(settings, workers_of(args.num_workers), self._begin)
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        """Answer until the end."""
        self._server.run(sockets=self._sockets)

    def _send(self, body: Body) -> None:
        try:
            self._channel.send(body)
        except OSError:  # the server has gone, and the engines with it
            exit_now(0)

    def _begin(self) -> None:
        """The loop runs. One that takes another one's place knows its engines before it answers."""
        asyncio.get_running_loop().add_reader(self._stream.fileno(), self._read)
        self._read()
        self._tasks.append(asyncio.ensure_future(self._tell_clock()))

    def _read(self) -> None:
        try:
            for body in self._channel.arrived():
                self._take(body)
            for model in self._models:
                model.wake()
        except EOFError:  # the server has gone, and the engines with it
            exit_now(0)
        except Exception:  # the process ends, whatever it was
            self._end_with_an_error()

    def _take(self, body: Body) -> None:
        match body:
            case HttpAnswer():
                self._forwarding.take(body)
            case AboutModel(name, Ready() as ready):
                self._by_name[name].client.load(ready, self._start.name)
                if all(one.client.is_loaded for one in self._models):
                    leave_out_of_collections()
                    self._send(FrontReady())
            case AboutModel(name, message):
                self._by_name[name].take(message)
            case Drain(seconds):
                self._tasks.append(asyncio.ensure_future(self._drain(seconds)))
            case FrontClose():
                self._server.should_exit = True

    def _end_with_an_error(self) -> NoReturn:
        """End: the server starts another front."""
        logger.exception("a front cannot go on")
        exit_now(1)

    async def _drain(self, seconds: float) -> None:
        def is_entering() -> bool:
            return self._service.num_entering > 0

        try:
            await asyncio.gather(*(one.engine.drain(seconds, is_entering) for one in self._models))
        except Exception:  # the process ends, whatever it was
            self._end_with_an_error()
        self._send(Drain(0.0))

    async def _tell_clock(self) -> None:
        """Tell that the loop turns, and what text and HTTP have taken, which the server adds up."""
        while True:
            self._counts.add(Cell.TURNS, 1)
            await asyncio.sleep(CLOCK_S)
            if any(one.client.error is not None for one in self._models):  # streams have been told
                exit_now(1)
            try:
                for model in self._models:
                    model.tell_clock()
            except Exception:  # the loop goes on, for it shows that the front lives
                logger.exception("what a front has computed could not be told")


class _Model:
    """One of the models, as a front has it.

    Args:
        config: what the user asked for of its engine.
        counts: of this process, of this model.
        send: sends a message to the server.

    Attributes:
        name: the first of its names.
        engine, client: by which this process serves it.
    """

    client: FrontClient

    def __init__(self, config: EngineConfig, counts: Counts, send: Callable[[Body], None]):
        self.name = config.model_names[0]
        self._config, self._counts, self._send = config, counts, send
        # what one that has died in this place has counted
        self._before = counts.own(Cell.TEXT_S), counts.own(Cell.HTTP_S)
        self._has_news = False
        self.engine = AsyncEngine(config, start=False, make=self._make_client)

    def take(self, body: Body) -> None:
        """Take in what the server has sent; see `wake`."""
        self.client.take(body)
        self.engine.refusal = self.client.refusal
        self._has_news = True

    def wake(self) -> None:
        """Have what was taken in delivered."""
        if self._has_news:
            self._has_news = False
            self.client.wake()

    def tell_clock(self) -> None:
        """Tell what text and HTTP have taken, which the server adds up."""
        text, http = self._before
        times = self.client.stats().times
        self._counts.put(Cell.TEXT_S, text + times.detokenise)
        self._counts.put(Cell.HTTP_S, http + times.http)

    def _make_client(self, clock: ClientClock, notify: Callable[[], None]) -> FrontClient:
        self.client = FrontClient(self._config, clock, notify, self._send_of, self._count_refused)
        return self.client

    def _send_of(self, body: Body) -> None:
        self._send(AboutModel(self.name, body))

    def _count_refused(self, limit: str) -> None:
        self._counts.add(REFUSED[limit], 1)


class _Server(uvicorn.Server):
    """uvicorn without signals, which are the server's.

    Args:
        settings: of uvicorn.
        num_workers: threads beside the event loop; None: Python's number.
        on_begin: called before it accepts connections.
    """

    def __init__(
        self, settings: uvicorn.Config, num_workers: int | None, on_begin: Callable[[], None]
    ) -> None:
        super().__init__(settings)
        self._num_workers, self._on_begin = num_workers, on_begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._num_workers is not None:
            workers = ThreadPoolExecutor(self._num_workers, "jaxserve-worker")
            asyncio.get_running_loop().set_default_executor(workers)
        self._on_begin()
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
