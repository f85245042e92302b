"""How long an engine with work has said nothing, and from when on that is too long."""

from __future__ import annotations

AUTO = "auto"  # a step timeout that follows from what steps take
# An engine is silent after so many seconds, or after so many times what its step may take.
SILENT_S, SILENT_FACTOR = 5.0, 4.0
HUNG_S, HUNG_FACTOR = 15.0, 10.0  # likewise hung, where the step timeout is AUTO
HUNG_COMPILING_S = 60.0  # in place of HUNG_S, while a program is compiled beside the steps
SLOW_STEP_S = min(SILENT_S / SILENT_FACTOR, HUNG_S / HUNG_FACTOR)  # shorter ones change nothing


class Silence:
    """Counts the seconds in which an engine owes an answer and says nothing.

    `tick` is called by one thread and counts only the time that it is told of; any thread may call
    the others.

    Args:
        step_timeout: seconds after which the engine is hung; AUTO: the longer of HUNG_S and
            HUNG_FACTOR times what the step may take; None: never.
    """

    def __init__(self, step_timeout: float | str | None):
        self._step_timeout = step_timeout
        self._seconds = 0.0
        self._has_spoken = self._is_asked = False
        self._expected, self._compiles = 0.0, False

    def begin(self) -> None:
        """Another engine is there, which has no work."""
        self._expected, self._compiles = 0.0, False
        self.heard()

    def asked(self) -> None:
        """The engine was sent something, which it answers."""
        self._is_asked = True

    def heard(self) -> None:
        """The engine has said something."""
        self._is_asked, self._has_spoken = False, True

    def expect(self, seconds: float, *, compiles: bool) -> None:
        """What its steps may take until more is said, see `StepEstimate`."""
        self._expected, self._compiles = seconds, compiles

    def tick(self, seconds: float, *, has_work: bool) -> None:
        """Time has passed.

        Args:
            seconds: since the last tick, without those in which nothing could be heard.
            has_work: requests wait for the engine. What it was sent and has not answered counts
                too, though the request has left since.
        """
        owes = has_work or self._is_asked
        if self._has_spoken or not owes:
            self._has_spoken = False
            self._seconds = 0.0
        else:
            self._seconds += seconds

    @property
    def reason(self) -> str | None:
        """Why the engine counts as silent, for people; None: it does not."""
        allowed = max(SILENT_S, SILENT_FACTOR * self._expected)
        if self._has_spoken or self._seconds < allowed:
            return None
        return (
            f"no step of the engine has ended for {self._seconds:.0f} s while requests wait, "
            f"{allowed:.0f} s at most were expected"
        )

    @property
    def step_timeout(self) -> float | None:
        """Seconds that are allowed now; None: any."""
        if not isinstance(self._step_timeout, str):
            return self._step_timeout
        least = HUNG_COMPILING_S if self._compiles else HUNG_S
        return max(least, HUNG_FACTOR * self._expected)

    @property
    def is_hung(self) -> bool:
        """Whether it has said nothing for longer than the step timeout."""
        limit = self.step_timeout
        return limit is not None and not self._has_spoken and self._seconds >= limit
