"""What a simulation found: `bench serve`'s fields and table, and what of it is estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.serving_report import METRICS, figures_of, markdown
from jaxserve.simulation.served import Served
from jaxserve.simulation.setting import Setting

QUEUE = {"queue": "arrival to dispatch of the first step"}


def report_of(
    served: Served, percentiles: Sequence[float], chosen: np.ndarray | None = None
) -> dict[str, Any]:
    """The figures of one simulation, under the names of `vllm bench serve`.

    Args:
        served: what became of the requests.
        percentiles: which percentiles of each metric.
        chosen: bool[requests]: some of them alone; then gaps are left out.
    """
    done = served.done if chosen is None else served.done & chosen
    duration = served.duration or 1e-9
    prompt, output = (
        int(np.asarray(lengths)[done].sum())
        for lengths in (served.prompt_tokens, served.output_tokens)
    )
    count = int(done.sum())
    report: dict[str, Any] = {
        "duration": duration,
        "completed": count,
        "failed": served.num_refused if chosen is None else int((~served.done & chosen).sum()),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": count / duration,
        "request_goodput": None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": _most_at_once(served, done),
    }
    for name, values in served.samples(chosen).items():
        report |= figures_of(name, 1e3 * values, percentiles)
    if chosen is None:
        gaps = served.gaps
        report |= {
            "mean_itl_ms": 1e3 * gaps.mean,
            "median_itl_ms": 1e3 * gaps.percentile(50),
            "std_itl_ms": 1e3 * gaps.deviation,
            **{f"p{one:g}_itl_ms": 1e3 * gaps.percentile(one) for one in percentiles},
            "num_steps": served.num_steps,
            "device_busy": served.busy / duration,
            "mean_batch": _mean(served.running),
            "max_running": max(served.running, default=0),
            "max_waiting": max(served.waiting, default=0),
            "max_pages": max(served.pages, default=0),
            "num_preemptions": served.num_preemptions,
            "prefix_tokens_found": served.num_found,
            "prefix_hit_rate": served.num_found / served.num_queried if served.num_queried else 0.0,
        }
    return report


def sums_of(setting: Setting) -> dict[str, Any]:
    """What the memory of one device holds."""
    demand, page_size = setting.demand, setting.config.cache.page_size
    return {
        "weights": demand.weights,
        "temporaries": demand.temporaries,
        "tables": demand.tables,
        "kv_bytes_per_token": setting.token_bytes // setting.devices,
        "num_pages": setting.num_pages,
        "page_size": page_size,
        "kv_tokens": (setting.num_pages - 1) * page_size // setting.groups.num_groups,
        "max_num_seqs": setting.limits.max_num_seqs,
        "max_num_batched_tokens": setting.limits.max_num_batched_tokens,
        "max_model_len": setting.limits.max_model_len,
        "tensor_parallel_size": setting.devices,
        "device": setting.device.name,
    }


def text_of(
    title: str, report: Mapping[str, Any], sources: Sequence[str], percentiles: Sequence[float]
) -> str:
    """A heading, the table, a line about the engine, and what is estimated."""
    engine = (
        f"{report['num_steps']} steps of {report['mean_batch']:.1f} sequences in the mean (at most "
        f"{report['max_running']}), at most {report['max_waiting']} waiting, device busy "
        f"{report['device_busy']:.0%}, {report['num_preemptions']} preemptions, "
        f"{report['prefix_hit_rate']:.0%} of the prompt tokens found in the prefix cache"
    )
    table = markdown(report, percentiles, METRICS | QUEUE)
    told = "\n".join(f"- {source}" for source in sources)
    return f"# {title}\n\n{table}\n\n{engine}\n\nSimulated, not measured:\n{told}"


def _most_at_once(served: Served, done: np.ndarray) -> int:
    sent, last = np.asarray(served.sent)[done], np.asarray(served.last)[done]
    times = np.concatenate([sent, last])
    changes = np.repeat([1, -1], len(sent))
    # an end sorts before a start at the same instant
    order = np.lexsort((changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))


def _mean(values: Sequence[int]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
