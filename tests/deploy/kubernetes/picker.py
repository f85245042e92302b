"""What the endpoint picker of the Gateway API inference extension reads of a server's `/metrics`.

Written after its metrics extractor (v1.6, `core-metrics-extractor`, the engine "vllm"): each family
is found by its name, of several series the newest counts, values are gauges or counters, and the
rest stands in labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

QUEUED = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
KV_USAGE = "vllm:kv_cache_usage_perc"
ADAPTERS = "vllm:lora_requests_info"
CACHE = "vllm:cache_config_info"


class Endpoint(NamedTuple):
    """What the picker knows of a server.

    Attributes:
        waiting: requests in the queue.
        running: requests that run.
        kv_usage: share of the KV cache in use, 0 to 1.
        max_adapters: most adapters at once.
        active, queued: names of adapters that run and wait.
        block_size: tokens of a KV page.
        num_blocks: KV pages.
    """

    waiting: int
    running: int
    kv_usage: float
    max_adapters: int
    active: set[str]
    queued: set[str]
    block_size: int
    num_blocks: int


def scrape(text: str) -> Endpoint:
    """Read the metrics of a server.

    Args:
        text: the body of `/metrics`, in Prometheus' text format.

    Raises:
        KeyError: a family is missing, by its name.
        ValueError: a family is no gauge or counter, is empty, or a label is no integer.
    """
    families = {family.name: family for family in text_string_to_metric_families(text)}
    adapters = max(_samples(families[ADAPTERS]), key=lambda sample: sample.value).labels
    cache = _newest(families[CACHE]).labels
    return Endpoint(
        waiting=int(_newest(families[QUEUED]).value),
        running=int(_newest(families[RUNNING]).value),
        kv_usage=_newest(families[KV_USAGE]).value,
        max_adapters=int(adapters["max_lora"]),
        active=_names(adapters["running_lora_adapters"]),
        queued=_names(adapters["waiting_lora_adapters"]),
        block_size=int(cache["block_size"]),
        num_blocks=int(cache["num_gpu_blocks"]),
    )


def _samples(family: Metric) -> list[Sample]:
    if family.type not in ("gauge", "counter") or not family.samples:
        raise ValueError(f"{family.name} is an empty family, or a {family.type}")
    return list(family.samples)


def _newest(family: Metric) -> Sample:
    """The first of the series with the latest time; a server that gives none has one series."""
    return max(_samples(family), key=lambda sample: float(sample.timestamp or 0))


def _names(listed: str) -> set[str]:
    parts: Iterable[str] = (name.strip() for name in listed.split(","))
    return {name for name in parts if name}
