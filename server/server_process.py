"""The server process: socket, signals, the announcement, the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import math
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from checkpoints.errors import CheckpointError
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import JaxServeError
from jaxserve.observability.json_log import JSON
from jaxserve.observability.process_collector import usable_cpus
from jaxserve.observability.trace_recorder import TraceRecorder
from server.admission import Admission
from server.app import create_app
from server.commands.edge_flags import allowed_hosts
from server.commands.log_flags import tracer, unlogged_paths
from server.commands.socket_flags import listen_at, tls
from server.descriptors import Descriptors
from server.engine_route import engine_paths
from server.http_protocol import connection_class
from server.listen_socket import BACKLOG, as_many, listen
from server.logs import log_config
from server.process_end import EXIT_S, exit_after, exit_now
from server.service import Service

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.processes.launch import EarlyProcess

logger = logging.getLogger("jaxserve.server")

# Seconds that connections get to end after their requests were aborted.
DRAIN_S = 2
SWITCH_S = 0.0005  # between two threads that both want the interpreter
WATCH_S = 0.2
# The exit code once the engine has died too often.
ENGINE_LOST = 70


def serve(
    config: EngineConfig,
    args: argparse.Namespace,
    told: Mapping[str, Any],
    isolation: Isolation | None,
    early: EarlyProcess | None,
) -> int:
    """Load the model and serve it until SIGINT or SIGTERM.

    Args:
        config: the engine's configuration.
        args: the parsed flags of `jaxserve serve`.
        told: what of them `create_app` is told, checked.
        isolation: of the engine; None: it is in this process.
        early: its process, where it has been started already.

    Returns:
        The exit code: 0 after a signal, 1 when the model cannot be served, ENGINE_LOST when its
        engine has died too often.

    Raises:
        ValidationError: uvicorn, or the limit on open files, is not as it has to be.
        JaxServeError: the port is taken.
    """
    limits = told["limits"]
    protocol = connection_class()
    descriptors = Descriptors.raised(limits.max_connections)
    spans = tracer(args, config.model_names[0])
    try:
        listener = listen_at(args.uds) if args.uds else listen(args.host, args.port)
    except OSError as error:
        where, reason = args.uds or f"{args.host}:{args.port}", error.strerror or str(error)
        raise JaxServeError(f"cannot listen on {where}: {reason}") from error
    from jaxserve.async_engine import AsyncEngine

    # the event loop asks for the interpreter at each event, and would wait so long for a thread
    sys.setswitchinterval(SWITCH_S)
    engine = AsyncEngine(config, start=False, isolation=isolation, early=early)
    recorder = None
    if args.record_trace is not None:
        recorder = engine.client.recorder = TraceRecorder(Path(args.record_trace))
    app = create_app(
        engine,
        allowed_origins=args.allowed_origins,
        allowed_hosts=allowed_hosts(args),
        tracer=spans,
        has_page=args.page,
        **told,
    )
    service = app.state.service
    admission = Admission(service, engine_paths(app.routes, service.options.root_path))
    settings = uvicorn.Config(
        app,
        http=protocol.limited(limits, admission, descriptors),
        ws="none",
        lifespan="on",
        log_config=log_config(args.uvicorn_log_level, args.log_format, unlogged_paths(args)),
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.idle_timeout),
        **tls(args),
    )
    base_url = f"unix:{args.uds}" if args.uds else _base_url(listener, settings.is_ssl)
    server = _Server(settings, args, service, descriptors, base_url)
    engine.start()
    try:
        server.run(sockets=as_many(listener, descriptors.listeners))
    finally:
        if args.uds:
            Path(args.uds).unlink(missing_ok=True)
        if recorder is not None:
            recorder.close()
    return server.exit_code


def workers_of(asked: int | None) -> int | None:
    """Threads for `--num-workers`: no more than there are cores, which a log line says."""
    cores = max(1, int(usable_cpus()))
    if asked is None or asked <= cores:
        return asked
    logger.warning("--num-workers %d is lowered to %d, the cores", asked, cores)
    return cores


class _Server(uvicorn.Server):
    """uvicorn with our signals (a signal is a normal end) and a watch over the engine's loading."""

    def __init__(
        self,
        settings: uvicorn.Config,
        args: argparse.Namespace,
        service: Service,
        descriptors: Descriptors,
        base_url: str,
    ) -> None:
        super().__init__(settings)
        self.exit_code = 0
        self._logs_json = args.log_format == JSON
        self._num_workers = workers_of(args.num_workers)
        self._shutdown_timeout = args.shutdown_timeout
        self._service, self._engine = service, service.engine
        self._descriptors, self._base_url = descriptors, base_url
        self._is_loaded = False
        # asyncio keeps only weak references to tasks.
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._num_workers is not None:  # what `asyncio.to_thread` uses
            workers = ThreadPoolExecutor(self._num_workers, "jaxserve-worker")
            asyncio.get_running_loop().set_default_executor(workers)
        await super().startup(sockets)
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
        service = self._service
        if not await self._engine.drain(self._shutdown_timeout, lambda: service.num_entering > 0):
            logger.warning(
                "some requests had not finished after %g s: they end with an error",
                self._shutdown_timeout,
            )
        self.should_exit = True
        await self._engine.shutdown()

    async def _announce(self) -> None:
        """Say when the server is healthy, or why it never will be."""
        start = time.monotonic()
        try:
            await self._engine.wait_ready()
        except Exception as error:
            # Loading failed: one line for people; the engine has logged the traceback of bugs.
            expected = isinstance(error, JaxServeError | CheckpointError | OSError)
            text = str(error) if expected else repr(error)
            self._fail(f"{self._engine.asked.model}: {text}")
            return
        room = self._descriptors.room(len(self.server_state.connections))
        if room is not None and room < 1:
            self._fail(f"{self._descriptors.limit} open files (ulimit -n) leave no connection")
            return
        engine = self._engine
        engine.warm_up()
        _leave_out_of_collections()
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
        self._tasks.append(asyncio.ensure_future(self._watch()))
        names = self._service.model_names
        text = (
            f"jaxserve serves {', '.join(names)} on {self._base_url} (context "
            f"{engine.max_model_len} tokens, ready after {time.monotonic() - start:.1f} s)"
        )
        if self._logs_json:
            logger.info(text)
            return
        curl = _curl(engine, self._base_url, names[0])
        print(f"\n{text}. Try:\n\n{curl}\n", flush=True)

    async def _watch(self) -> None:
        """End the server when its engine has died for good and cannot be started again here."""
        while not self._engine.is_draining:
            if self._engine.is_dead and self._engine.is_isolated:
                break
            await asyncio.sleep(WATCH_S)
        else:
            return
        self._say_error(str(self._engine.error))
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


def _leave_out_of_collections() -> None:
    """What lives as long as the server is not looked at for garbage any more.

    A collection that walks it stops the event loop for tenths of a second, once a second under
    load.
    """
    gc.collect()  # what is garbage already would never be freed
    gc.freeze()


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
