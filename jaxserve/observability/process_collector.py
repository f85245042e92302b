"""Processor time and memory of the processes that serve, and how many CPUs they may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.observability.metric_names import LABELS, MetricNames

SERVER = "server"  # the process that is scraped
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# places among the fields of /proc/PID/stat after the command's name, see proc(5)
_UTIME, _STIME, _RSS = 11, 12, 21


class ProcessUse(NamedTuple):
    """What a process has used.

    Attributes:
        cpu_seconds: processor time of all its threads since it started.
        resident_bytes: bytes of memory now.
    """

    cpu_seconds: float
    resident_bytes: int


def process_use(pid: int, proc: Path = PROC) -> ProcessUse | None:
    """What a process has used; None where it is gone or the system does not say."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold blanks and brackets
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    page = os.sysconf("SC_PAGE_SIZE")
    return ProcessUse(ticks / os.sysconf("SC_CLK_TCK"), int(fields[_RSS]) * page)


def usable_cpus(cgroup: Path = CGROUP) -> float:
    """CPUs that this process may use: those that it is bound to, or its cgroup's quota if less."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    count = float(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return count if quota == "max" else min(count, int(quota) / int(period))
    except OSError:
        return count  # no cgroup of version 2


class ProcessCollector(Collector):
    """Reads the processes when they are scraped.

    Args:
        names: prefix and labels.
        processes: what each is called, and its id now; None while there is none.
    """

    def __init__(self, names: MetricNames, processes: Mapping[str, Callable[[], int | None]]):
        self._names, self._processes = names, processes

    def collect(self) -> Iterator[Metric]:
        names, labels = self._names, [*LABELS, "process"]
        seconds = CounterMetricFamily(
            names.full("process_cpu_seconds"), "Processor seconds by process.", labels=labels
        )
        memory = GaugeMetricFamily(
            names.full("process_resident_memory_bytes"), "Resident bytes.", labels=labels
        )
        for process, find in self._processes.items():
            pid = find()
            use = None if pid is None else process_use(pid)
            if use is not None:
                seconds.add_metric([*names.values, process], use.cpu_seconds)
                memory.add_metric([*names.values, process], use.resident_bytes)
        yield seconds
        yield memory
        if SERVER not in self._processes:
            return  # the collector of its process tells what all may use
        cpus = GaugeMetricFamily(
            names.full("process_cpus"), "CPUs that the processes may use.", labels=LABELS
        )
        cpus.add_metric(names.values, usable_cpus())
        yield cpus
