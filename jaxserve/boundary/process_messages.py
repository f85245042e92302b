"""The messages between the processes of one engine, as plain data.

Process 0 decides everything; the others send what is compared at a start, and then nothing but that
they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxserve.config.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class Join:
    """What a process is, to process 0.

    Attributes:
        process_id: its number, from 1.
        versions: of the packages that have to be the same, by name.
        settings: `repr` of each setting that has to be the same, by name.
    """

    kind: ClassVar[str] = "join"
    process_id: int
    versions: dict[str, str]
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """All processes are there, alike.

    Attributes:
        address: HOST:PORT of JAX's own service in process 0.
    """

    kind: ClassVar[str] = "joined"
    address: str


@dataclass(frozen=True, slots=True)
class WeightsFound:
    """Which weights a process has found.

    Attributes:
        digest: see `weights_digest` of `jaxserve.loading.weights_digest`.
    """

    kind: ClassVar[str] = "weights"
    digest: str


@dataclass(frozen=True, slots=True)
class EngineDecision:
    """What process 0 has decided: the others make the same engine of it.

    Attributes:
        config: with pages and context.
        steps: a digest of what decides the compiled steps.
    """

    kind: ClassVar[str] = "decision"
    config: ResolvedConfig
    steps: str


@dataclass(frozen=True, slots=True)
class RunCommand:
    """What a runner does on its devices next, see `jaxserve.execution.runner.Command`.

    Attributes:
        program: its name.
        operand: int32, in the order of bytes of the machine.
    """

    kind: ClassVar[str] = "run"
    program: str
    operand: bytes


@dataclass(frozen=True, slots=True)
class Beat:
    """The process is there."""

    kind: ClassVar[str] = "beat"


PROCESS_BODIES = (Join, Joined, WeightsFound, EngineDecision, RunCommand, Beat)
