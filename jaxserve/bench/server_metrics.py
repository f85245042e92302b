"""What the server itself says of the requests of a load test: the histograms of its `/metrics`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

# metric -> (its name after the server's prefix, what it is)
QUEUE_METRICS = {
    "queue": ("request_queue_time_seconds", "arrival to dispatch of the first step"),
    "queue_overhead": (
        "request_queue_overhead_seconds",
        "the same without the step in flight, room being free",
    ),
}
PREFIXES = ("jaxserve:", "vllm:")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket: `counts[i]` of them are at most `bounds[i]` seconds."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        return self.counts[-1]

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def bound(self, percent: float) -> float:
        """The upper end of the bucket that holds a percentile; infinite above the last bound."""
        wanted = self.count * percent / 100
        return next(b for b, c in zip(self.bounds, self.counts) if c >= wanted)

    def since(self, earlier: Histogram | None) -> Histogram:
        """What was observed after an earlier copy."""
        if earlier is None:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts))
        return Histogram(self.bounds, counts, self.total - earlier.total)


def parse_histograms(text: str) -> dict[str, Histogram]:
    """The histograms of QUEUE_METRICS that are in a Prometheus text, summed over their labels."""
    found = {}
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric, (name, _) in QUEUE_METRICS.items():
        family = next((families[p + name] for p in PREFIXES if p + name in families), None)
        if family is None:
            continue
        buckets: dict[float, float] = {}
        total = 0.0
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
        bounds = tuple(sorted(buckets))
        found[metric] = Histogram(bounds, tuple(buckets[bound] for bound in bounds), total)
    return found


async def read_histograms(client: httpx.AsyncClient) -> dict[str, Histogram]:
    """The histograms that a server has; none where it has no readable `/metrics`."""
    try:
        response = await client.get("/metrics")
        return parse_histograms(response.text) if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}  # a server that has ended, or a page of another kind under that path


def queue_report(
    before: dict[str, Histogram], after: dict[str, Histogram], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Count, mean and upper bounds of percentiles of each histogram between two readings, in ms.

    A bound is None above the histogram's last bucket.
    """
    report: dict[str, float | None] = {}
    for metric, histogram in after.items():
        new = histogram.since(before.get(metric))
        if not new.count:
            continue
        report[f"num_{metric}"] = new.count
        report[f"mean_{metric}_ms"] = 1e3 * new.mean
        for percent in percentiles:
            bound = 1e3 * new.bound(percent)
            report[f"p{percent:g}_{metric}_ms_at_most"] = bound if bound < math.inf else None
    return report


def queue_markdown(report: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """A table of a `queue_report`; a line that says so where the server reports none."""
    if not any(f"num_{metric}" in report for metric in QUEUE_METRICS):
        return "queue time: the server reports none"
    heads = ["mean", *(f"p{percent:g}, at most" for percent in percentiles)]
    lines = [f"| of the server, ms | requests | {' | '.join(heads)} |"]
    lines.append(f"|{'---|' * (len(heads) + 2)}")
    for metric, (_, text) in QUEUE_METRICS.items():
        if f"num_{metric}" not in report:
            continue
        bounds = [report[f"p{percent:g}_{metric}_ms_at_most"] for percent in percentiles]
        cells = [f"{report[f'mean_{metric}_ms']:.2f}"]
        cells += ["more" if bound is None else f"{bound:g}" for bound in bounds]
        lines.append(f"| {text} ({metric}) | {report[f'num_{metric}']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)
