"""Scheduling policies on one trace: those that come along, and one of a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config.engine_config import SCHEDULING_POLICIES, EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.scheduling.policies import make_policy
from jaxserve.simulation.report import report_of
from jaxserve.simulation.served import Served

ROWS = {
    "request_throughput": "requests/s",
    "median_ttft_ms": "ttft p50, ms",
    "p99_ttft_ms": "ttft p99, ms",
    "short_p99_ttft_ms": "of shorter prompts",
    "long_p99_ttft_ms": "of longer prompts",
    "median_tpot_ms": "tpot p50, ms",
    "p99_tpot_ms": "tpot p99, ms",
    "median_queue_ms": "queue p50, ms",
    "p99_queue_ms": "queue p99, ms",
    "num_preemptions": "preemptions",
}


def load_policy(path: Path, config: EngineConfig) -> str:
    """Import the policy of a file; returns its name as `scheduling_policy` takes it.

    Args:
        path: a file of Python with one class that is a policy.
        config: the settings.

    Raises:
        ValidationError: names the file: it cannot be imported, or has no policy, or several.
    """
    if not path.is_file():
        raise ValidationError("--policy", str(path), "a file of Python")
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not name.isidentifier():
        raise ValidationError("--policy", str(path), "a file NAME.py")
    if name in sys.modules:
        raise ValidationError("--policy", str(path), "a file whose name is that of no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the operator's: whatever it raises is told
        del sys.modules[name]
        allowed = f"a file that can be imported ({error!r})"
        raise ValidationError("--policy", str(path), allowed) from error
    own = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == name and hasattr(one, "peek")
    ]
    if len(own) != 1:
        allowed = "a file with one class that has the methods of a policy"
        raise ValidationError("--policy", f"{path}: {len(own)} classes", allowed)
    found = f"{name}:{own[0].__name__}"
    make_policy(replace(config, scheduling_policy=found))
    return found


def compare(
    serve: Callable[[EngineConfig], Served], config: EngineConfig, policies: Sequence[str]
) -> list[dict[str, Any]]:
    """A report a policy, of the same requests.

    Args:
        serve: runs them with some settings.
        config: the settings but for the policy.
        policies: beside those that come along.
    """
    rows = []
    for name in (*SCHEDULING_POLICIES, *policies):
        served = serve(replace(config, scheduling_policy=name))
        lengths = np.asarray(served.prompt_tokens)
        middle = np.median(lengths)
        report = {"scheduling_policy": name, **report_of(served, [99.0])}
        if lengths.min() < lengths.max():
            for side, chosen in (("short", lengths <= middle), ("long", lengths > middle)):
                found = report_of(served, [99.0], chosen)
                report[f"{side}_p99_ttft_ms"] = found["p99_ttft_ms"]
        priorities = np.asarray(served.priority)
        if priorities.min() < priorities.max():
            for one in np.unique(priorities):
                found = report_of(served, [99.0], priorities == one)
                report[f"priority_{one}_p99_ttft_ms"] = found["p99_ttft_ms"]
        rows.append(report)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a column a policy."""
    names = [name for name in ROWS if name in rows[0]]
    names += [name for name in rows[0] if name.startswith("priority_")]
    lines = [f"| | {' | '.join(row['scheduling_policy'] for row in rows)} |"]
    lines.append(f"|---|{'---:|' * len(rows)}")
    for name in names:
        text = ROWS.get(name) or f"ttft p99 of {name.split('_p99')[0].replace('_', ' ')}, ms"
        cells = [row[name] for row in rows]
        shown = [f"{cell:,.0f}" if cell >= 1000 else f"{cell:.3g}" for cell in cells]
        lines.append(f"| {text} | {' | '.join(shown)} |")
    return "\n".join(lines)
