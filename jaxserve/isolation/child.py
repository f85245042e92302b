"""The engine's own process: `python -m jaxserve.isolation.child DESCRIPTOR`.

It says when it is ready, steps while there is work, and ends when it is told to or when the other
side has gone. An error ends it too: the supervisor knows what to do. Of an engine of several
processes it is process 0, or another one, which runs what that one tells it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxserve.boundary.messages import Action, AddGroup, Body, Control, FirstSteps
from jaxserve.errors import JaxServeError, lacks_memory
from jaxserve.liveness.pulse import BEAT_S, Pulse
from jaxserve.observability.json_log import JSON, JsonFormatter
from jaxserve.observability.repeated import RepeatedFilter
from jaxserve.processes.launch import stream_of
from jaxserve.processes.oom_score import offer_to_oom_killer
from jaxserve.processes.wire import Channel, ModelSizes, Ready, Start, StartRefusal, Sync

if TYPE_CHECKING:
    from jaxserve.loading.engine_plan import EnginePlan

logger = logging.getLogger(__name__)

# Of 1000: where memory runs out, the kernel ends this process and not the server.
OOM_SCORE = 800


def main(arguments: list[str]) -> int:
    """Serve the server at the other end of a socket; returns the exit code."""
    # a signal to the whole group is for the server, which lets requests finish
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    offer_to_oom_killer(OOM_SCORE)
    pulse = Pulse()
    threading.Thread(target=_end_with, args=(int(arguments[1]), pulse), daemon=True).start()
    channel = Channel(stream_of(arguments[0]))
    # a spare is told what to load when another one has died: this is done by then
    gc.disable()  # imports make hundreds of thousands of objects, and nearly no garbage
    import jaxserve.loading.follower  # noqa: F401

    gc.enable()
    start = channel.receive()
    if start is None:
        return 0
    assert isinstance(start, Start)
    _log_as(start.log_level, start.log_format)
    try:
        return _run(start, channel, pulse)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the server has gone


def _run(start: Start, channel: Channel, pulse: Pulse) -> int:
    from checkpoints.errors import CheckpointError
    from jaxserve.engine.pace import Pace
    from jaxserve.isolation.probe import probe
    from jaxserve.loading.engine_build import load_engine

    ending = _Ending(channel)
    try:
        if start.config.process_id:
            return _follow(start, channel, ending)
        loaded = load_engine(
            start.config, with_tokenizer=False, keep_steps=True, on_lost=ending.now
        )
    except (JaxServeError, CheckpointError, OSError) as error:
        return ending.refuse(str(error))
    engine, decided = loaded.engine, loaded.decided
    probe(engine, decided.config.scheduler.max_model_len)
    engine.announce = channel.send
    engine.pace = Pace(engine.runner, channel.send, pulse)
    ending.ready(decided, loaded.page_bytes)
    while True:
        for body in _sent(channel, wait=engine.is_idle):
            if isinstance(body, Sync):
                channel.send(body)
                continue
            try:
                engine.handle(body)
            except Exception:  # ends the process; the message at fault is named before
                if isinstance(body, AddGroup):  # the one at hand is at fault
                    channel.send(FirstSteps(body.sequence_ids))
                raise
            if engine.is_closed:
                return 0
        channel.send(engine.step())  # also where nothing is left to do: its counts say so


def _follow(start: Start, channel: Channel, ending: _Ending) -> int:
    """The life of a process that is not the first of its engine."""
    from jaxserve.loading.follower import Follower

    follower = Follower(start.config, ending.now)
    ending.ready(follower.decided, follower.runner.cache.page_bytes(1))
    follower.run()
    channel.send(Control(Action.CLOSE))  # in good order: no other process is to be started
    return 0


class _Ending:
    """How the process says that it serves, or that it ends with an error.

    Args:
        channel: to the server.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._is_ready = False
        self._saying = threading.Lock()

    def ready(self, decided: EnginePlan, page_bytes: int) -> None:
        """It serves as was decided."""
        model = decided.model
        sizes = ModelSizes(
            model.vocab_size,
            model.hidden_size,
            model.num_layers,
            tuple(model.eos_token_ids),
            model.labels,
            model.matryoshka,
            model.images,
        )
        folders = decided.model_path, decided.tokenizer_path
        with self._saying:
            self._channel.send(Ready(decided.config, sizes, *folders, page_bytes))
            self._is_ready = True

    def refuse(self, why: str) -> int:
        """It cannot serve, or no longer; returns the exit code."""
        with self._saying:
            if self._is_ready:
                logger.error("%s", why)
            else:
                self._channel.send(StartRefusal(why))
        return 1

    def now(self, why: str) -> None:
        """Another process of the engine is lost, and a step may wait for it without end."""
        os._exit(self.refuse(why))


def _sent(channel: Channel, *, wait: bool) -> Iterator[Body]:
    """What was sent; `wait`: at least one message."""
    if wait:
        first = channel.receive()
        if first is None:
            raise EOFError("the other side has gone")
        yield first
    yield from channel.arrived()


def _end_with(parent: int, pulse: Pulse) -> None:
    """End with the server, also in the middle of a download or a compilation."""
    while os.getppid() == parent:
        pulse.beat()
        time.sleep(BEAT_S)
    os._exit(0)


def _log_as(level: int, form: str) -> None:
    """Messages in the form of the server's."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(levelname)s:     %(message)s")
    handler.setFormatter(JsonFormatter() if form == JSON else text)
    handler.addFilter(RepeatedFilter())
    ours = logging.getLogger("jaxserve")
    ours.addHandler(handler)
    ours.setLevel(level)
    ours.propagate = False
    warnings.showwarning = _log_warning


def _log_warning(message: Warning | str, *_: object, **__: object) -> None:
    """What a library warns of, as JAX does of a cache on a full disk, is a line of the log."""
    logger.warning("%s", message)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Ends the process when the block is left: a thread may be in a compilation."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        reason = lacks_memory(error)
        if reason is None:
            traceback.print_exc()
        else:
            text = "jaxserve: too little memory for the engine, or a limit on it (ulimit -v)"
            print(f"{text}: {reason}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with ended_at_once():
        sys.exit(main(sys.argv[1:]))
