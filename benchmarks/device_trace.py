"""The operations of a device and their times, from JAX's own profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

GPU_PLANE = "/device:GPU:0"  # the others do the same at the same time
STREAM_LINE = "Stream"  # other lines of the plane show the same time once more, by module or by op
HOST_PLANE = "/host:CPU"
CPU_STEP = "ThunkExecutor::Execute"  # XLA:CPU runs an executable, or waits for its other threads
LONGEST_NAME = 60
CRITICAL_EVENTS = 1  # of the host; XLA:CPU's runs are among them


class NoTraceError(RuntimeError):
    """The profiler saw the device do nothing; the message says what it saw."""


@dataclass(slots=True)
class DeviceTime:
    """The device in a traced run.

    Attributes:
        calls: how often each kernel ran; on a CPU the executable is the only one.
        seconds: on the device in each.
        busy: seconds in which at least one ran.
        span: seconds from the first one's begin to the last one's end.
        pauses: seconds of each interval between in which none ran, in order.
        before: seconds of the pauses that a kernel of that name ended.
    """

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    span: float = 0.0
    pauses: list[float] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)

    def largest(self, count: int) -> list[tuple[str, int, float]]:
        """Name, calls and seconds of the kernels that took the longest."""
        names = sorted(self.seconds, key=lambda name: -self.seconds[name])[:count]
        return [(name, self.calls[name], self.seconds[name]) for name in names]


def summed(events: Iterable[tuple[str, float, float]]) -> DeviceTime:
    """Name, start and duration in nanoseconds of each event, to totals."""
    found = DeviceTime()
    intervals = []
    for name, start, duration in events:
        short = name[:LONGEST_NAME]
        found.calls[short] = found.calls.get(short, 0) + 1
        found.seconds[short] = found.seconds.get(short, 0.0) + duration / 1e9
        intervals.append((start, start + duration, short))
    intervals.sort()
    reached = intervals[0][0] if intervals else 0.0
    for begin, end, short in intervals:
        if begin > reached:
            pause = (begin - reached) / 1e9
            found.pauses.append(pause)
            found.before[short] = found.before.get(short, 0.0) + pause
        found.busy += max(0.0, end - max(begin, reached)) / 1e9
        reached = max(reached, end)
    if intervals:
        found.span = (reached - intervals[0][0]) / 1e9
    return found


def serves_traced() -> bool:
    """Whether the device works under the profiler as without: a GPU leaves its CUDA graphs."""
    return jax.default_backend() != "gpu"


def device_events(profile: Any) -> list[tuple[str, float, float]]:
    """Kernels and copies on the first GPU's streams, or XLA:CPU's runs where there is no GPU.

    Raises:
        NoTraceError: there are none.
    """
    kernels, runs, seen = [], [], []
    for plane in profile.planes:
        for line in plane.lines:
            seen.append(f"{plane.name}/{line.name}")
            if plane.name == GPU_PLANE and line.name.startswith(STREAM_LINE):
                kernels += [(e.name, float(e.start_ns), float(e.duration_ns)) for e in line.events]
            elif plane.name == HOST_PLANE:
                runs += [
                    (e.name, float(e.start_ns), float(e.duration_ns))
                    for e in line.events
                    if e.name.startswith(CPU_STEP)
                ]
    if not kernels and not runs:
        raise NoTraceError(f"no kernel in the trace; it has the lines {', '.join(seen)[:300]}")
    return kernels or runs


def traced(run: Callable[[], Any]) -> DeviceTime:
    """Runs once under the profiler and sums up what the device did.

    Raises:
        NoTraceError: the profiler saw nothing on the device.
    """
    options = jax.profiler.ProfileOptions()
    # a GPU is traced alone: to trace the host would slow down what feeds it; a CPU is the host
    on_cpu = jax.default_backend() == "cpu"
    options.host_tracer_level = CRITICAL_EVENTS if on_cpu else 0
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
            try:
                jax.profiler.stop_trace()
            except RuntimeError as error:
                raise NoTraceError(f"the profiler did not stop: {error}") from error
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise NoTraceError("the profiler wrote no trace")
        return summed(device_events(jax.profiler.ProfileData.from_file(str(files[0]))))
