"""The server process: socket, signals, the announcement, the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from checkpoints.errors import CheckpointError
from jaxserve.config import EngineConfig
from jaxserve.errors import JaxServeError
from server.app import create_app
from server.http_protocol import http_protocol
from server.process import exit_now

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine

# Seconds that connections get to end after their requests were aborted.
DRAIN_S = 2
# Seconds after a signal when the process ends whatever its threads are doing.
EXIT_S = 4.0


def serve(config: EngineConfig, args: argparse.Namespace) -> int:
    """Load the model and serve it until SIGINT or SIGTERM.

    Args:
        config: the engine's configuration.
        args: the parsed flags of `jaxserve serve`.

    Returns:
        The exit code: 0 after a signal, 1 when the port is taken or the model cannot be served.
    """
    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"jaxserve: cannot listen on {args.host}:{args.port}: {reason}", file=sys.stderr)
        return 1
    from jaxserve.async_engine import AsyncEngine

    engine = AsyncEngine(config, start=False)
    app = create_app(
        engine,
        api_keys=args.api_key or (),
        allowed_origins=args.allowed_origins,
        max_body_bytes=args.max_body_bytes,
    )
    settings = uvicorn.Config(
        app,
        http=http_protocol(),
        lifespan="on",
        log_config=_log_config(args.uvicorn_log_level),
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = _Server(settings, engine, _base_url(listener), app.state.service.model_names)
    engine.start()
    server.run(sockets=[listener])
    return server.exit_code


class _Server(uvicorn.Server):
    """uvicorn with our signals (a signal is a normal end) and a watch over the engine's loading."""

    def __init__(
        self,
        settings: uvicorn.Config,
        engine: AsyncEngine,
        base_url: str,
        model_names: tuple[str, ...],
    ) -> None:
        super().__init__(settings)
        self.exit_code = 0
        self._engine = engine
        self._base_url = base_url
        self._model_names = model_names
        # asyncio keeps only weak references to tasks.
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
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
        """Abort what is running and let uvicorn close; a second signal ends the process at once."""
        if self.should_exit or not self._engine.is_ready:
            # Loading cannot be interrupted, and nobody is being served yet.
            exit_now(self.exit_code)
        self.should_exit = True
        deadline = threading.Timer(EXIT_S, exit_now, (self.exit_code,))
        deadline.daemon = True
        deadline.start()
        self._tasks.append(asyncio.ensure_future(self._engine.shutdown()))

    async def _announce(self) -> None:
        """Say when the server is healthy, or why it never will be."""
        start = time.monotonic()
        try:
            await self._engine.wait_ready()
        except Exception as error:
            # Loading failed: one line for people; the engine has logged the traceback of bugs.
            expected = isinstance(error, JaxServeError | CheckpointError | OSError)
            text = str(error) if expected else repr(error)
            print(f"jaxserve: {self._engine.config.model}: {text}", file=sys.stderr, flush=True)
            self.exit_code = 1
            self.should_exit = True
            return
        engine = self._engine
        print(
            f"\njaxserve serves {', '.join(self._model_names)} on {self._base_url} "
            f"(context {engine.max_model_len} tokens, ready after "
            f"{time.monotonic() - start:.1f} s). Try:\n\n"
            f"{_curl(engine, self._base_url, self._model_names[0])}\n",
            flush=True,
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=2048)


def _base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    return f"curl {base_url}{path} -H 'Content-Type: application/json' -d {data}"


def _log_config(level: str) -> dict[str, Any]:
    """uvicorn's logging, with the engine's and the server's messages in the same form."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["jaxserve"] = {
        "handlers": ["default"],
        "level": "DEBUG" if level in ("debug", "trace") else level.upper(),
        "propagate": False,
    }
    return config
