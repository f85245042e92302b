"""The endpoint picker of the Gateway API reads our metrics, which mean what it takes them for."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client import generate_latest

from jaxserve.boundary.messages import EngineStats
from jaxserve.boundary.step_times import StepTimes
from jaxserve.observability.metrics import Metrics
from tests.deploy.kubernetes.picker import scrape
from tests.resolved_config import resolved_config
from tests.server.server_process import running_server

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")


def test_the_picker_reads_every_gauge_that_it_asks_for() -> None:
    metrics = Metrics("tiny", "vllm")
    config = resolved_config()
    metrics.set_engine(config, 4096)
    metrics.record_stats(EngineStats(3, 2, 0.25, 0, 0, 0, StepTimes()))
    found = scrape(generate_latest(metrics.registry).decode())
    assert (found.running, found.waiting, found.kv_usage) == (3, 2, 0.25)
    assert (found.block_size, found.num_blocks) == (config.cache.page_size, config.cache.num_pages)
    # no adapter is served: none runs, none waits, none can be loaded
    assert (found.max_adapters, found.active, found.queued) == (0, set(), set())


def test_under_its_own_prefix_the_picker_finds_nothing() -> None:
    with pytest.raises(KeyError, match="vllm:lora_requests_info"):
        scrape(generate_latest(Metrics("tiny").registry).decode())


@pytest.mark.slow
def test_a_server_under_load_tells_its_queue_and_its_pages() -> None:
    """Four slots and nine requests: four run, five wait, and pages are in use."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True}
    with running_server("none", "--metrics-prefix", "vllm") as server:
        idle = scrape(httpx.get(f"{server.url}/metrics").text)
        assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0)

        def ask() -> None:
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

        threads = [threading.Thread(target=ask) for _ in range(9)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while (seen := scrape(httpx.get(f"{server.url}/metrics").text)).waiting < 5:
            assert time.monotonic() < deadline, seen
            time.sleep(0.01)
        assert (seen.running, seen.waiting) == (4, 5) and 0 < seen.kv_usage <= 1
        for thread in threads:
            thread.join()
        assert idle == scrape(httpx.get(f"{server.url}/metrics").text)
