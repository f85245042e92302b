"""What the server itself says of a load test in its `/metrics`: queue times, where steps spend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        if not buckets:
            continue  # a family that nothing has been observed of
        bounds = tuple(sorted(buckets))
        found[metric] = Histogram(bounds, tuple(buckets[bound] for bound in bounds), total)
    return found


class Reading(NamedTuple):
    """What `/metrics` showed at one time; empty where there is none that can be read.

    Attributes:
        histograms: of QUEUE_METRICS.
        phase_seconds: of all engine steps so far, by phase (jaxserve only).
        steps: how many there were.
    """

    histograms: dict[str, Histogram]
    phase_seconds: dict[str, float]
    steps: float


async def read_metrics(client: httpx.AsyncClient) -> Reading:
    """Read a server's `/metrics`."""
    try:
        response = await client.get("/metrics")
        text = response.text if response.status_code == 200 else ""
        return Reading(parse_histograms(text), *parse_phases(text))
    except (httpx.HTTPError, ValueError):
        # a server that has ended, or a page of another kind under that path
        return Reading({}, {}, 0.0)


def parse_phases(text: str) -> tuple[dict[str, float], float]:
    """Seconds by phase of the engine's steps, and the number of steps, in a Prometheus text."""
    phases: dict[str, float] = {}
    steps = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            if name == "step_phase_seconds_total":
                phase = sample.labels["phase"]
                phases[phase] = phases.get(phase, 0.0) + sample.value
            elif name == "engine_steps_total":
                steps += sample.value
    return phases, steps


def step_report(before: Reading, after: Reading) -> dict[str, float]:
    """Steps between two readings, and the microseconds that each spent by phase."""
    steps = after.steps - before.steps
    if steps <= 0:
        return {}
    found = {"num_steps": steps}
    for phase, seconds in after.phase_seconds.items():
        found[f"{phase}_us_per_step"] = 1e6 * (seconds - before.phase_seconds.get(phase, 0)) / steps
    return found


def step_markdown(report: Mapping[str, Any]) -> str:
    """A line of a `step_report`."""
    ending = "_us_per_step"
    phases = [(name[: -len(ending)], us) for name, us in report.items() if name.endswith(ending)]
    shown = ", ".join(f"{phase} {us:.0f}" for phase, us in phases)
    return f"of the server, us a step in {report['num_steps']:g} steps: {shown}"


def queue_report(
    before: Mapping[str, Histogram], after: Mapping[str, Histogram], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Count, mean and upper bounds of percentiles of each histogram between two readings, in ms.

    A bound is None above the histogram's last bucket.
    """
    report: dict[str, float | None] = {}
    for metric, histogram in after.items():
        new = histogram.since(before.get(metric))
        if new.count <= 0:
            continue  # no request, or another process since the first reading
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
