"""Prometheus takes its files, alerts fire where they should, and every metric named exists."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.boundary.messages import EngineStats, StepOutput
from jaxserve.boundary.step_times import StepTimes
from jaxserve.observability.metric_values import Histogram, metric_values
from jaxserve.observability.metrics import Metrics
from tests.server.server_process import ROOT, Server, running_server

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "jaxserve.json"
# what an alert says it is about -> by what, at which threshold, and for how long
ALERTS = {
    "DecodeSlow": ("inter_token_latency_seconds", "0.2", "10s", "warning"),
    "DecodeVerySlow": ("inter_token_latency_seconds", "0.5", "10s", "critical"),
    "PagingSlow": ("paging_latency_seconds", "0.5", "10s", "warning"),
    "PagingVerySlow": ("paging_latency_seconds", "1", "10s", "critical"),
    "CpuBusy": ("process_cpu_seconds_total", "0.95", "10s", "warning"),
    "CpuVeryBusy": ("process_cpu_seconds_total", "0.98", "5s", "critical"),
    "QueueSlow": ("request_queue_time_seconds", "0.05", "10s", "warning"),
    "DeviceIdle": ("device_busy_fraction", "0.8", "1m", "warning"),
    "KvCacheWasted": ("kv_active_ratio", "0.85", "1m", "warning"),
}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, which Debian's prometheus has"
)


def load(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    return [rule["expr"] for rule in rules()] + shown


def named() -> set[str]:
    found = {name for text in expressions() for name in re.findall(r"jaxserve:\w+", text)}
    assert len(found) > 25
    return found


def test_the_server_is_scraped_as_job_vllm() -> None:
    (job,) = load("prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "vllm" and job["metrics_path"] == "/metrics"
    (target,) = job["static_configs"]
    assert target == {"targets": ["localhost:8080"], "labels": {"instance": "vllm-prod"}}


@pytest.mark.parametrize("name", ALERTS)
def test_thresholds(name: str) -> None:
    metric, threshold, duration, severity = ALERTS[name]
    (rule,) = [rule for rule in rules() if rule["alert"] == name]
    assert metric in rule["expr"] and rule["labels"]["severity"] == severity
    assert re.search(rf"[<>] {re.escape(threshold)}( and |$)", rule["expr"])
    assert rule["for"] == duration


def quantile(share: float, buckets: dict[str, int]) -> float:
    """Prometheus' `histogram_quantile` of counts up to each bound."""
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    rank, low, below = share * bounds[-1][1], 0.0, 0
    for bound, count in bounds:
        if count >= rank:
            return (
                low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
            )
        low, below = bound, count
    raise AssertionError("no observations")


@pytest.mark.parametrize(
    ("waits", "firing"),
    [
        ([0.0] * 99 + [0.4], set()),
        ([0.7] * 5, {"PagingSlow"}),
        ([0.0] * 50 + [3.0] * 2, {"PagingSlow", "PagingVerySlow"}),
        ([0.0] * 500 + [3.0], set()),
    ],
)
def test_waits_for_pages_fire_their_alerts(waits: list[float], firing: set[str]) -> None:
    """Without promtool: the rules' own shares and thresholds on what the engine's waits become."""
    metrics = Metrics("m")
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())
    metrics.record_step(StepOutput([], [], {}, {}, {}, {}, stats, page_waits=waits))
    (found,) = [
        one
        for one in metric_values(metrics.registry)
        if isinstance(one, Histogram) and one.name == "jaxserve:paging_latency_seconds"
    ]
    fired = set()
    for rule in rules():
        if rule["alert"].startswith("Paging"):
            share = float(re.findall(r"histogram_quantile\(([\d.]+),", rule["expr"])[0])
            threshold = float(rule["expr"].split(">")[1])
            if quantile(share, found.buckets) > threshold:
                fired.add(rule["alert"])
    assert fired == firing


def test_panels_have_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels})
    assert all(panel["title"] and panel["targets"] for panel in panels)


def test_mfu_and_bandwidth_are_shares_of_what_a_device_can() -> None:
    shown = " ".join(expressions())
    for done, limit in (("estimated_flops", "flops"), ("estimated_read_bytes", "bytes")):
        assert re.search(rf"{done}_per_gpu_total\S*\)\) / avg \(jaxserve:device_{limit}_per", shown)


def test_grafana_finds_its_data_and_its_dashboard() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus" and source["isDefault"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/jaxserve.yml").read_text())[
        "providers"
    ]
    mounts = yaml.safe_load((ROOT / "deploy/compose.yml").read_text())["services"]["grafana"][
        "volumes"
    ]
    assert f"./monitoring/grafana/dashboards:{provider['options']['path']}:ro" in mounts


@needs_promtool
def test_promtool_takes_configuration_and_rules() -> None:
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_promtool_takes_the_expression(expression: str, tmp_path: Path) -> None:
    text = expression.replace("$__rate_interval", "10s").replace("$model_name", ".*")
    file = tmp_path / "rules.yml"
    file.write_text(
        yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": "r", "expr": text}]}]})
    )
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def scraped(server: Server) -> set[str]:
    """Names of all samples, and of the counters that have none yet."""
    found = set()
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        found |= {sample.name for sample in family.samples}
        if family.type == "counter":
            found.add(f"{family.name}_total")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["jaxserve", "vllm"])
def test_every_metric_that_is_named_is_scraped(prefix: str) -> None:
    limits = ["--device-flops-per-second", "1e12", "--device-bytes-per-second", "1e11"]
    words = ["--metrics-prefix", prefix, "--enable-mfu-metrics", *limits]
    with running_server("none", *words) as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        wanted = {name.replace("jaxserve:", f"{prefix}:") for name in named()}
        assert wanted - scraped(server) == set()
        seconds = f'{prefix}:process_cpu_seconds_total{{engine="0",model_name="tiny",process='
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        assert sum(line.startswith(seconds) for line in lines) == 2  # server and engine
