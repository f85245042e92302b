"""The server process: socket, signals, the announcement, the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from checkpoints.errors import CheckpointError
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import JaxServeError
from jaxserve.isolation.models import ModelPart
from jaxserve.observability.json_log import JSON
from jaxserve.observability.trace_recorder import TraceRecorder
from jaxserve.processes.launch import ANYWHERE, Place
from server.app import create_app
from server.commands.edge_flags import allowed_hosts
from server.commands.log_flags import tracer
from server.commands.socket_flags import listen_at
from server.descriptors import Descriptors
from server.engine_route import engine_paths
from server.http_protocol import connection_class
from server.http_settings import http_settings
from server.listen_socket import as_many, listen
from server.process_end import EXIT_S, exit_after, exit_now
from server.process_settings import SWITCH_S, leave_out_of_collections, workers_of
from server.service import Service

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.isolation.process_client import ProcessClient
    from jaxserve.observability.step_clock import ClientClock
    from jaxserve.processes.launch import EarlyProcess
    from server.fronts.hub import Hub
    from server.tools.choice import Parsers

logger = logging.getLogger("jaxserve.server")

WATCH_S = 0.2
# The exit code once the engine has died too often.
ENGINE_LOST = 70


def serve(
    config: EngineConfig,
    args: argparse.Namespace,
    told: Mapping[str, Any],
    isolation: Isolation | None,
    early: EarlyProcess | None,
    place: Place = ANYWHERE,
    others: Sequence[tuple[ModelPart, Parsers]] = (),
) -> int:
    """Load the model and serve it until SIGINT or SIGTERM.

    Args:
        config: the engine's configuration.
        args: the parsed flags of `jaxserve serve`.
        told: what of them `create_app` is told, checked.
        isolation: of the engine; None: it is in this process.
        early: its process, where it has been started already.
        place: the part of the machine that its engine has, where there are others.
        others: more models, with what reads their answers; each has an isolated engine.

    Returns:
        The exit code: 0 after a signal, 1 when the model cannot be served, ENGINE_LOST when its
        engine has died too often.

    Raises:
        ValidationError: uvicorn, or the limit on open files, is not as it has to be.
        JaxServeError: the port is taken.
    """
    limits = told["limits"]
    connection_class()  # before anything is loaded
    descriptors = Descriptors.raised(limits.max_connections)
    spans = tracer(args, config.model_names[0])
    try:
        listener = listen_at(args.uds) if args.uds else listen(args.host, args.port)
    except OSError as error:
        where, reason = args.uds or f"{args.host}:{args.port}", error.strerror or str(error)
        raise JaxServeError(f"cannot listen on {where}: {reason}") from error
    from jaxserve.async_engine import AsyncEngine

    sys.setswitchinterval(SWITCH_S)
    if others:
        engine = _engine_of(ModelPart(config, place), isolation, early)
    else:
        engine = AsyncEngine(config, start=False, isolation=isolation, early=early)
    hub = None
    if args.api_server_count > 1:
        from server.fronts.hub import Hub

        hub = Hub(args, told["api_keys"], listener)
    recorder = None
    if args.record_trace is not None:
        recorder = engine.client.recorder = TraceRecorder(Path(args.record_trace))
    app = create_app(
        engine,
        allowed_origins=args.allowed_origins,
        allowed_hosts=allowed_hosts(args),
        tracer=spans,
        has_page=args.page,
        counts=None if hub is None else hub.counts,
        others=[(_engine_of(part, isolation), parsers) for part, parsers in others],
        **told,
    )
    service = app.state.service
    if hub is not None:
        hub.serve(service, app)
    paths = engine_paths(app.routes, service.options.root_path)
    settings = http_settings(app, args, service, paths, descriptors)
    base_url = f"unix:{args.uds}" if args.uds else _base_url(listener, settings.is_ssl)
    server = _Server(settings, args, service, descriptors, base_url, hub)
    engine.start()
    # fronts listen, where there are some
    sockets = as_many(listener, descriptors.listeners) if hub is None else []
    try:
        server.run(sockets=sockets)
    finally:
        if hub is not None:
            hub.close()
            listener.close()
        if args.uds:
            Path(args.uds).unlink(missing_ok=True)
        if recorder is not None:
            recorder.close()
    return server.exit_code


def _engine_of(
    part: ModelPart, isolation: Isolation | None, early: EarlyProcess | None = None
) -> AsyncEngine:
    """The engine of one of several models, which is not loaded yet."""
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.isolation.process_client import ProcessClient

    assert isolation is not None

    def make(clock: ClientClock, notify: Callable[[], None]) -> ProcessClient:
        return ProcessClient(
            part.config,
            clock,
            notify,
            isolation,
            early,
            place=part.place,
            tells_server=early is not None,
        )

    return AsyncEngine(part.config, start=False, isolation=isolation, make=make)


class _Server(uvicorn.Server):
    """uvicorn with our signals (a signal is a normal end) and a watch over the engine's loading."""

    def __init__(
        self,
        settings: uvicorn.Config,
        args: argparse.Namespace,
        service: Service,
        descriptors: Descriptors,
        base_url: str,
        hub: Hub | None = None,
    ) -> None:
        super().__init__(settings)
        self.exit_code = 0
        self._logs_json = args.log_format == JSON
        self._num_workers = workers_of(args.num_workers)
        self._shutdown_timeout = args.shutdown_timeout
        self._service, self._engine = service, service.engine
        self._engines = [one.engine for one in service.models]
        self._descriptors, self._base_url = descriptors, base_url
        self._hub = hub  # of fronts, which have the connections; None: there are none
        self._hold(is_held=hub is not None or len(service.models) > 1)
        self._is_loaded = False
        # asyncio keeps only weak references to tasks.
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._num_workers is not None:  # what `asyncio.to_thread` uses
            workers = ThreadPoolExecutor(self._num_workers, "jaxserve-worker")
            asyncio.get_running_loop().set_default_executor(workers)
        await super().startup(sockets)
        if self._hub is not None:
            self._hub.begin()
        self._tasks.append(asyncio.ensure_future(self._announce()))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for one in signals:
            loop.add_signal_handler(one, self._stop)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)

    def _stop(self) -> None:
        """Let running requests finish, then close; a second signal ends the process at once."""
        if self.should_exit or self._engine.is_draining or not self._is_loaded:
            # Loading cannot be interrupted, and no request is being served yet.
            exit_now(self.exit_code)
        exit_after(self._shutdown_timeout + EXIT_S, self.exit_code)
        self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        text = "stopping: what runs may finish within %g s; a second signal ends it at once"
        logger.info(text, self._shutdown_timeout)
        service, seconds = self._service, self._shutdown_timeout
        drained = None if self._hub is None else asyncio.ensure_future(self._hub.drain(seconds))

        def is_entering() -> bool:
            return service.num_entering > 0 or (drained is not None and not drained.done())

        drains = (engine.drain(seconds, is_entering) for engine in self._engines)
        if not all(await asyncio.gather(*drains)):
            logger.warning(
                "some requests had not finished after %g s: they end with an error",
                self._shutdown_timeout,
            )
        self.should_exit = self._hub is None
        await asyncio.gather(*(engine.shutdown() for engine in self._engines))
        if self._hub is not None:
            await self._hub.settle()
        self.should_exit = True

    async def _announce(self) -> None:
        """Say when the server is healthy, or why it never will be."""
        start = time.monotonic()
        for engine in self._engines:
            try:
                # what is free is known once the one before has its own
                if engine is not self._engine:
                    engine.start()
                await engine.wait_ready()
            except Exception as error:
                if engine.is_draining:
                    return  # the server ends
                # Loading failed: one line for people; the engine has logged the traceback of bugs.
                expected = isinstance(error, JaxServeError | CheckpointError | OSError)
                text = str(error) if expected else repr(error)
                self._fail(f"{engine.asked.model}: {text}")
                return
        if self._hub is not None:
            self._hub.load()
            await self._hub.wait_ready()
            if self._hub.error is not None:
                self._fail(self._hub.error)
                return
        room = self._descriptors.room(len(self.server_state.connections))
        if room is not None and room < 1:
            self._fail(f"{self._descriptors.limit} open files (ulimit -n) leave no connection")
            return
        for engine in self._engines:
            engine.warm_up()
        leave_out_of_collections()
        most = self._service.limits.max_connections
        if room is not None and room < most:
            logger.warning(
                "--max-connections %d is lowered to %d: the system lets this process have %d open "
                "files (ulimit -n)",
                most,
                room,
                self._descriptors.limit,
            )
        self._is_loaded = True
        self._hold(is_held=False)
        if self._hub is not None:
            self._hub.tell_standing()
        self._tasks.append(asyncio.ensure_future(self._watch()))
        names = [name for one in self._service.models for name in one.model_names]
        context = " and ".join(f"{engine.max_model_len}" for engine in self._engines)
        text = (
            f"jaxserve serves {', '.join(names)} on {self._base_url} (context "
            f"{context} tokens, ready after {time.monotonic() - start:.1f} s)"
        )
        if self._logs_json:
            logger.info(text)
            return
        curl = _curl(self._engine, self._base_url, names[0])
        print(f"\n{text}. Try:\n\n{curl}\n", flush=True)

    def _hold(self, *, is_held: bool) -> None:
        """Let in no request, or requests: a start that fails must have cut off no answer."""
        for one in self._service.models:
            one.is_held = is_held

    async def _watch(self) -> None:
        """End the server when its engines have died for good and cannot be started again here."""
        while not self._engine.is_draining:
            if all(engine.is_dead and engine.is_isolated for engine in self._engines):
                break
            if self._hub is not None and self._hub.error is not None:
                break
            await asyncio.sleep(WATCH_S)
        else:
            return
        lost = None if self._hub is None else self._hub.error
        self._say_error(lost or str(self._engine.error))
        self.exit_code = ENGINE_LOST
        self.should_exit = True

    def _fail(self, text: str) -> None:
        self._say_error(text)
        self.exit_code = 1
        self.should_exit = True

    def _say_error(self, text: str) -> None:
        if self._logs_json:
            logger.error(text)
        else:
            print(f"jaxserve: {text}", file=sys.stderr, flush=True)


def _base_url(listener: socket.socket, is_tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _curl(engine: AsyncEngine, base_url: str, model: str) -> str:
    """One line to paste: a chat where the model has a chat template, otherwise a completion."""
    body: dict[str, Any] = {"model": model, "max_tokens": 64}
    if engine.tokenizer.chat_template is not None:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is 12 + 30?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "Once upon a time"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    if base_url.startswith("unix:"):
        base_url = f"--unix-socket {shlex.quote(base_url[5:])} http://localhost"
    return f"curl {base_url}{path} -H 'Content-Type: application/json' -d {data}"
