"""What the device did, kernel by kernel, from JAX's own profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

DEVICE_PLANE = "/device:GPU"
STREAM_LINE = "Stream"  # other lines of the plane show the same time once more, by module or by op
LONGEST_NAME = 60


class NoTraceError(RuntimeError):
    """The profiler saw no kernel; the message says what it saw."""


@dataclass(slots=True)
class Kernels:
    """The kernels of a traced run.

    Attributes:
        calls: how often each ran.
        seconds: on the device in each.
        busy: seconds in which at least one ran.
        span: seconds from the first one's begin to the last one's end.
    """

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    span: float = 0.0

    def largest(self, count: int) -> list[tuple[str, int, float]]:
        """Name, calls and seconds of the kernels that took the longest."""
        names = sorted(self.seconds, key=lambda name: -self.seconds[name])[:count]
        return [(name, self.calls[name], self.seconds[name]) for name in names]


def summed(events: Iterable[tuple[str, float, float]]) -> Kernels:
    """Name, start and duration in nanoseconds of each event, to totals by name."""
    found = Kernels()
    intervals = []
    for name, start, duration in events:
        short = name[:LONGEST_NAME]
        found.calls[short] = found.calls.get(short, 0) + 1
        found.seconds[short] = found.seconds.get(short, 0.0) + duration / 1e9
        intervals.append((start, start + duration))
    reached = float("-inf")
    for begin, end in sorted(intervals):
        found.busy += max(0.0, end - max(begin, reached)) / 1e9
        reached = max(reached, end)
    if intervals:
        found.span = (reached - min(begin for begin, _ in intervals)) / 1e9
    return found


def device_events(profile: Any) -> list[tuple[str, float, float]]:
    """The kernels and copies on the streams of the GPUs in a ProfileData.

    Raises:
        NoTraceError: there are none.
    """
    events, seen = [], []
    for plane in profile.planes:
        for line in plane.lines:
            seen.append(f"{plane.name}/{line.name}")
            if plane.name.startswith(DEVICE_PLANE) and line.name.startswith(STREAM_LINE):
                events += [(e.name, float(e.start_ns), float(e.duration_ns)) for e in line.events]
    if not events:
        raise NoTraceError(f"no kernel in the trace; it has the lines {', '.join(seen)[:300]}")
    return events


def traced(run: Callable[[], Any]) -> Kernels:
    """Runs once under the profiler and sums up its kernels.

    Raises:
        NoTraceError: the profiler saw no kernel.
    """
    options = jax.profiler.ProfileOptions()
    # the device alone: to trace the host would slow down what feeds the device
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    options.raise_error_on_start_failure = True
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise NoTraceError(f"the profiler did not start: {error}") from error
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise NoTraceError("the profiler wrote no trace")
        return summed(device_events(jax.profiler.ProfileData.from_file(str(files[0]))))
