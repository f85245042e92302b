"""What a load test found: vLLM's JSON fields, a Markdown report and a plot of percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.bench.percentiles import percentile
from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.bench.http_client import RequestTimes

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def samples_ms(times: Sequence[RequestTimes]) -> dict[str, list[float]]:
    """Milliseconds of each metric over the requests that succeeded."""
    done = [t for t in times if not t.error]
    seconds = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in done if t.tpot is not None],
        "itl": [gap for t in done for gap in t.itl],
        "e2el": [t.e2el for t in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:100"]` as milliseconds by metric.

    Raises:
        ValidationError: an unknown metric or a limit that is no positive number.
    """
    parsed = {}
    for text in limits:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in ("ttft", "tpot", "e2el") or not 0 < limit < math.inf:
            raise ValidationError("goodput", text, "ttft:MS, tpot:MS or e2el:MS")
        parsed[name] = limit
    return parsed


def serving_report(
    times: Sequence[RequestTimes],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    metrics: Sequence[str] = tuple(METRICS),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of one load test, under the names of `vllm bench serve`.

    Args:
        times: one entry a request.
        duration: seconds from the first request sent to the last output.
        percentiles: which percentiles of each metric.
        metrics: the keys of METRICS to report.
        goodput: limits in milliseconds by metric: requests within all of them count.
    """
    done = [t for t in times if not t.error]
    prompt_tokens = sum(t.prompt_tokens for t in done)
    output_tokens = sum(t.output_tokens for t in done)
    report: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(times) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "max_concurrent_requests": _most_at_once(done),
        "max_output_tokens_per_s": _most_a_second(done),
    }
    if goodput:
        report["request_goodput"] = sum(_is_good(t, goodput) for t in done) / duration
    samples = samples_ms(times)
    for name in metrics:
        report |= figures_of(name, samples[name], percentiles)
    return report


def figures_of(name: str, values: Any, percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles of a metric, whose values are milliseconds."""
    import numpy as np  # here: flags of commands need none

    found = np.asarray(values, np.float64)
    mean, deviation = (float(found.mean()), float(found.std())) if len(found) else (0.0, 0.0)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(found, 50),
        f"std_{name}_ms": deviation,
        **{f"p{percent:g}_{name}_ms": percentile(found, percent) for percent in percentiles},
    }


def details(times: Sequence[RequestTimes]) -> dict[str, Any]:
    """One entry a request, under the names of vLLM's detailed results."""
    return {
        "input_lens": [t.prompt_tokens for t in times],
        "output_lens": [t.output_tokens for t in times],
        "ttfts": [t.ttft if t.chunks else None for t in times],
        "itls": [t.itl for t in times],
        "latencies": [t.e2el if t.chunks else None for t in times],
        "start_times": [t.sent for t in times],
        "generated_texts": [t.text for t in times],
        "errors": [t.error for t in times],
    }


def describe(written: Mapping[str, Any]) -> str:
    """A heading and a line that say what was measured; `written` is the JSON of the results."""
    where = written["base_url"] or f"http://{written['host']}:{written['port']}"
    ramp = written["ramp_up_strategy"]
    load = f"{written['request_rate']} requests/s"
    if written["request_rate"] == "inf":
        load = "all at once"
    if ramp:
        load = f"{written['ramp_up_start_rps']:g} to {written['ramp_up_end_rps']:g} requests/s"
        load += f" ({ramp})"
    if written["max_concurrency"]:
        load += f", at most {written['max_concurrency']} at once"
    return (
        f"# {written['model_id']} on {where}\n\n"
        f"{written['num_prompts']} prompts of the {written['dataset_name']} dataset, {load}, "
        f"{written['date']}"
    )


def markdown(
    report: Mapping[str, Any], percentiles: Sequence[float], metrics: Mapping[str, str] = METRICS
) -> str:
    """A table of the metrics and a line of throughputs."""
    heads = ["mean", "median", *(f"p{percent:g}" for percent in percentiles)]
    lines = [
        f"{report['completed']} requests in {report['duration']:.2f} s, {report['failed']} failed: "
        f"{report['request_throughput']:.2f} requests/s, "
        f"{report['output_throughput']:.1f} output tok/s, "
        f"{report['total_token_throughput']:.1f} tok/s in all, "
        f"at most {report['max_concurrent_requests']} at once"
        + (
            f", goodput {report['request_goodput']:.2f} requests/s"
            if report["request_goodput"] is not None
            else ""
        ),
        "",
        f"| ms | {' | '.join(heads)} |",
        f"|{'---|' * (len(heads) + 1)}",
    ]
    for name, text in metrics.items():
        if f"mean_{name}_ms" not in report:
            continue
        cells = [f"{report[f'{head}_{name}_ms']:.2f}" for head in heads]
        lines.append(f"| {text} ({name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(times: Sequence[RequestTimes], path: Path) -> None:
    """A PNG with the percentiles of every metric."""
    # imported here, as below: the flags of other commands need no numpy
    from jaxserve.observability.figures import new_figure

    figure = new_figure(4 * len(METRICS), 3.2)
    percents = [*range(100), 99.5, 99.9, 100]
    for axis, (name, values) in zip(figure.subplots(1, len(METRICS)), samples_ms(times).items()):
        axis.plot(percents, [percentile(values, percent) for percent in percents])
        axis.set(title=METRICS[name], xlabel="percentile", ylabel="ms", ylim=(0, None))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_timeline(times: Sequence[RequestTimes], path: Path) -> None:
    """A PNG with a bar a request that succeeded: until its first token, and until its last."""
    from jaxserve.observability.figures import Span, timeline_figure

    spans = [Span(t.sent, None, t.chunks[0], t.chunks[-1]) for t in times if not t.error]
    timeline_figure([], spans).savefig(path, dpi=120)


def plot_latency(times: Sequence[RequestTimes], path: Path) -> None:
    """A PNG with the distribution of every metric."""
    seconds = {
        METRICS[name]: [value / 1e3 for value in values]
        for name, values in samples_ms(times).items()
    }
    from jaxserve.observability.figures import latency_figure

    latency_figure(seconds).savefig(path, dpi=120)


def _is_good(times: RequestTimes, limits: Mapping[str, float]) -> bool:
    values = {"ttft": times.ttft, "tpot": times.tpot or 0.0, "e2el": times.e2el}
    return all(1e3 * values[name] <= limit for name, limit in limits.items())


def _most_at_once(times: Sequence[RequestTimes]) -> int:
    # an end sorts before a start at the same instant
    edges = sorted([(t.sent, 1) for t in times] + [(t.chunks[-1], -1) for t in times])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def _most_a_second(times: Sequence[RequestTimes]) -> float:
    """Most output tokens in one whole second after the first request."""
    if not times:
        return 0.0
    start = min(t.sent for t in times)
    counts: dict[int, float] = {}
    for t in times:
        share = t.output_tokens / len(t.chunks)  # a piece may hold several tokens
        for moment in t.chunks:
            counts[int(moment - start)] = counts.get(int(moment - start), 0.0) + share
    return max(counts.values())
