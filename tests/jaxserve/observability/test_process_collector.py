"""Memory and time of the processes, from the system's own figures."""

from __future__ import annotations

import os
import sys

import pytest
from prometheus_client import CollectorRegistry

from jaxserve.observability.metric_names import MetricNames
from jaxserve.observability.process_collector import ProcessCollector, process_use, usable_cpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_processor_time_and_memory_of_this_process():
    psutil = pytest.importorskip("psutil", reason="needs the extra `test`")
    mine = psutil.Process()
    before, use, after = mine.cpu_times(), process_use(os.getpid()), mine.cpu_times()
    assert use is not None
    low, high = (round(one.user + one.system, 2) for one in (before, after))
    assert low <= round(use.cpu_seconds, 2) <= high
    assert use.resident_bytes == pytest.approx(mine.memory_info().rss, rel=0.1)


def test_a_process_whose_name_has_blanks_and_brackets(tmp_path):
    fields = ["S", *map(str, range(4, 53))]  # from the third on, each by its number in proc(5)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c)) {' '.join(fields)}")
    use = process_use(7, tmp_path)
    assert use is not None
    assert use.cpu_seconds == (14 + 15) / os.sysconf("SC_CLK_TCK")
    assert use.resident_bytes == 24 * os.sysconf("SC_PAGE_SIZE")


def test_each_process_is_a_series_while_it_is_there():
    registry, engine = CollectorRegistry(), [None]
    registry.register(
        ProcessCollector(MetricNames("m"), {"server": os.getpid, "engine": lambda: engine[0]})
    )
    labels = {"model_name": "m", "engine": "0"}
    name = "jaxserve:process_cpu_seconds_total"
    assert registry.get_sample_value(name, labels | {"process": "server"}) > 0
    assert registry.get_sample_value(name, labels | {"process": "engine"}) is None
    engine[0] = os.getppid()
    assert registry.get_sample_value(name, labels | {"process": "engine"}) is not None
    engine[0] = 2**22 + 1  # above what Linux gives out
    assert registry.get_sample_value(name, labels | {"process": "engine"}) is None
    assert registry.get_sample_value("jaxserve:process_cpus", labels) == usable_cpus()


def test_a_quota_is_less_than_the_cpus_of_the_machine(tmp_path):
    bound = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path) == bound
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(tmp_path) == bound
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(tmp_path) == 0.5
