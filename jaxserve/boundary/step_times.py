"""Where the time of the engine's steps goes, phase by phase."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from operator import attrgetter


@dataclass(slots=True)
class StepTimes:
    """Seconds since the engine started, by phase.

    Attributes:
        plan: the scheduler chooses requests and pages.
        pack: the plan becomes one int32 array.
        dispatch: the compiled program is called; returns before the device is done.
        wait: the host waits for the device. Large is good: the device is the limit.
        commit: tokens reach their requests, logprobs are collected.
        detokenise: tokens become text, stop strings are searched. Off the engine's thread in a
            server.
        http: other work of the event loop's thread while requests run (a server only): parsing
            requests, writing chunks.
        device_idle: at most this long the device had nothing to do between two steps of a backlog,
            without the time that the runtime takes to begin a dispatched step. An upper bound:
            the host sees that a step has ended, not when.
        device_busy: at least this long it computed a step.
    """

    plan: float = 0.0
    pack: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    detokenise: float = 0.0
    http: float = 0.0
    device_idle: float = 0.0
    device_busy: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def copy(self) -> StepTimes:
        """The same seconds, which stay: this runs twice a step, where `replace` is slow."""
        return StepTimes(*_seconds(self))

    def since(self, earlier: StepTimes) -> StepTimes:
        """The seconds added since an earlier copy."""
        before = earlier.as_dict()
        return StepTimes(**{name: value - before[name] for name, value in self.as_dict().items()})

    def plus(self, other: StepTimes) -> StepTimes:
        """The sum, phase by phase."""
        more = other.as_dict()
        return StepTimes(**{name: value + more[name] for name, value in self.as_dict().items()})


_seconds = attrgetter(*(field.name for field in fields(StepTimes)))
