"""The engine's process with faults in it.

SIGUSR1 makes the phase that is named in the file FAULTS_PHASE fail at its next call; `memory` asks
for more than there is. A prompt that
begins with POISON ends the process whenever it is in a step. FAULTS_FILE_BYTES: no file may grow
beyond, as on a disk that is full.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.engine.loop import Engine
from jaxserve.execution.runner import Runner
from jaxserve.isolation.child import ended_at_once, main
from jaxserve.scheduling.scheduler import Scheduler

PHASE_FILE, FILE_BYTES = "FAULTS_PHASE", "FAULTS_FILE_BYTES"
POISON = 1999
MEMORY = "memory"
PHASES: dict[str, tuple[type, str]] = {
    "plan": (Scheduler, "plan"),
    "pack": (Runner, "pack"),
    "dispatch": (Runner, "dispatch"),
    "fetch": (Runner, "fetch"),
    "commit": (Scheduler, "commit"),
    MEMORY: (Engine, "step"),
}
armed: set[str] = set()


def failing(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if phase in armed:
            if phase == MEMORY:
                bytearray(1 << 40)  # the kernel has no more, and Python says so
            raise RuntimeError(f"injected into {phase}")
        return call(*arguments, **named)

    return wrapped


def poisonous(pack: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(runner: Runner, plan: Any) -> Any:
        if any(request.prompt_token_ids[0] == POISON for request in plan.rows.requests):
            os.kill(os.getpid(), signal.SIGSEGV)
        return pack(runner, plan)

    return wrapped


def install() -> None:
    """Put the faults where they are to happen."""
    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, failing(phase, getattr(owner, name)))
    Runner.pack = poisonous(Runner.pack)  # type: ignore[method-assign]
    file = Path(os.environ[PHASE_FILE])
    signal.signal(signal.SIGUSR1, lambda *_: armed.add(file.read_text()))
    limit = os.environ.get(FILE_BYTES)
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))


if __name__ == "__main__":
    with ended_at_once():
        install()
        sys.exit(main(sys.argv[1:]))
