"""`jaxserve serve` in another process than 0 of its engine: no HTTP, devices that are watched."""

from __future__ import annotations

import logging
import sys
import threading

from jaxserve.boundary.messages import Control
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.isolation.supervisor import EngineStart, Supervisor
from jaxserve.processes.launch import EarlyProcess

logger = logging.getLogger(__name__)

LOST = 70  # the exit code where it ended too often, as that of a server


def follow(config: EngineConfig, isolation: Isolation, early: EarlyProcess | None = None) -> int:
    """Serve process 0 until that closes its engine; the process is started again when it ends.

    Args:
        config: of the engine, as this host has it.
        isolation: how the process is watched.
        early: the process, where it has been started already.

    Returns:
        The exit code: 0 when process 0 has closed, 1 when the process cannot serve, LOST when it
        has ended too often.
    """
    news = threading.Event()
    supervisor = Supervisor(
        config,
        isolation,
        on_start=lambda: None,
        on_ready=lambda ready: None,
        has_work=lambda: False,
        notify=news.set,
        early=early,
    )
    supervisor.start()
    while not supervisor.ended.is_set():
        news.wait()
        news.clear()
        while supervisor.events:
            event = supervisor.events.popleft()
            if isinstance(event, EngineStart):
                print(_ready(config), flush=True)
            elif isinstance(event, Control):  # process 0 has closed the engine
                supervisor.close()
                supervisor.join()
                return 0
    print(f"jaxserve: {config.model}: {supervisor.error}", file=sys.stderr, flush=True)
    return LOST if supervisor.loaded.is_set() else 1


def _ready(config: EngineConfig) -> str:
    return (
        f"jaxserve has the devices of process {config.process_id} of {config.num_processes} for "
        f"{config.model}; process 0 is at {config.coordinator}"
    )
