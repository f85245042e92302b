"""Medians and ratios of a comparison, as JSON and as Markdown tables."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peers.limits import least_work, weight_bits
from benchmarks.peers.rounds import EngineRecord
from benchmarks.peers.workload import Cell
from jaxserve.bench.device_limits import Limits
from jaxserve.models.config import ModelConfig


def cell_result(record: EngineRecord, number: int, cell: Cell) -> dict[str, Any]:
    """One engine in one cell: its seconds and what follows, or the reason for having none."""
    answers = record.answers.get(number)
    if not answers:
        return {"failure": record.failures.get(number) or record.failure or "was not run"}
    seconds = [float(answer["seconds"]) for answer in answers]
    median = statistics.median(seconds)
    result = {
        "seconds": seconds,
        "median_seconds": median,
        "output_tokens_per_second": cell.output_tokens / median,
        "first_tokens": answers[-1]["first_tokens"],
    }
    device = [
        float(a["figures"]["device_peak_mib"]) for a in answers if "device_peak_mib" in a["figures"]
    ]
    if device:
        result["device_peak_mib"] = max(device)
    moved = [float(a["figures"]["bytes_read"]) for a in answers if "bytes_read" in a["figures"]]
    if moved:
        result["gigabytes_per_second"] = statistics.median(moved) / median / 1e9
    return result


def compare(base: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Figures of `peer` against those of `base`; none where either has no figures.

    `ratio` is the speed of the base over the peer's: above 1 the base is faster. The share of equal
    first tokens says whether both ran the same model: greedy sequences drift apart by rounding.
    """
    if "failure" in base or "failure" in peer:
        return {}
    pairs = list(zip(base["first_tokens"], peer["first_tokens"], strict=True))
    return {
        "ratio": peer["median_seconds"] / base["median_seconds"],
        "same_first_tokens": sum(a == b for a, b in pairs) / len(pairs),
    }


def make_report(
    records: list[EngineRecord],
    cells: list[Cell],
    environment: dict[str, Any],
    rules: dict[str, str],
) -> dict[str, Any]:
    """Everything that was measured; the first record is the base of the ratios."""
    results = []
    for number, cell in enumerate(cells):
        by_engine = {record.name: cell_result(record, number, cell) for record in records}
        base = by_engine[records[0].name]
        for name, result in by_engine.items():
            if name != records[0].name:
                result |= compare(base, result)
        results.append(
            {
                "cell": cell.name,
                "requests": len(cell.prompts),
                "prompt_tokens": sum(map(len, cell.prompts)),
                "output_tokens": cell.output_tokens,
                "in_flight": cell.in_flight,
                "engines": by_engine,
            }
        )
    engines = {
        record.name: {
            "versions": record.versions,
            "startup_seconds": record.startup_seconds,
            "conversion_seconds": record.conversion_seconds,
            "peak_rss_mib": record.peak_rss_mib,
            "failure": record.failure,
        }
        for record in records
    }
    return {
        "environment": environment,
        "rules": rules,
        "engines": engines,
        "cells": results,
        "impossible": [],
    }


def impossible(
    report: dict[str, Any],
    cells: list[Cell],
    config: ModelConfig,
    limits: Limits,
    settings: dict[str, dict[str, Any]],
) -> list[str]:
    """A line for each figure of a report that is beyond what the machine can do.

    Args:
        report: result of `make_report`.
        cells: the cells of the report, in its order.
        config: sizes of the model.
        limits: rates of the machine.
        settings: engine name -> its settings.
    """
    lines = []
    for cell, entry in zip(cells, report["cells"], strict=True):
        for name, result in entry["engines"].items():
            if "failure" in result:
                continue
            what = f"{name}, {cell.name}"
            bits = weight_bits(report["environment"]["dtype"], settings[name])
            work = least_work(cell, config, bits)
            seconds = result["median_seconds"]
            lines += limits.beyond(what, seconds, work.flops, work.read_bytes, bits)
    return lines


def _row(values: list[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _speed(result: dict[str, Any]) -> str:
    if "failure" in result:
        return "failed"
    speed = result["output_tokens_per_second"]
    text = f"{speed:.0f}" if speed >= 20 else f"{speed:.1f}"
    return f"{text} ({result['ratio']:.2f}x)" if "ratio" in result else text


def _reasons(report: dict[str, Any]) -> list[str]:
    """Cells that failed although their engine started."""
    return [
        f"- {name}, {cell['cell']}: {result['failure']}"
        for cell in report["cells"]
        for name, result in cell["engines"].items()
        if "failure" in result and result["failure"] != report["engines"][name]["failure"]
    ]


def _extras(report: dict[str, Any]) -> list[str]:
    """The figures beside the speeds: bytes read a second, and equal first tokens."""
    lines = []
    for cell in report["cells"]:
        parts = [
            f"{name} {result['gigabytes_per_second']:.1f} GB/s"
            for name, result in cell["engines"].items()
            if "gigabytes_per_second" in result
        ]
        parts += [
            f"{name} {result['same_first_tokens']:.0%}"
            for name, result in cell["engines"].items()
            if "same_first_tokens" in result
        ]
        lines.append(f"- {cell['cell']}: {', '.join(parts) or 'nothing ran'}")
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Output tok/s by engine and cell, then machine and versions."""
    base = next(iter(report["engines"]))
    names = [cell["cell"] for cell in report["cells"]]
    lines = [
        f"Output tok/s, medians; in brackets how many times as fast {base} is.",
        "",
        _row(["engine", *names, "start s", "peak MiB"]),
        "|---" * (len(names) + 3) + "|",
    ]
    for name, engine in report["engines"].items():
        results = [cell["engines"][name] for cell in report["cells"]]
        if engine["failure"] and all("failure" in result for result in results):
            reason = engine["failure"].replace("|", "\\|")
            lines.append(_row([name, f"not run: {reason}", *["-"] * (len(names) + 1)]))
            continue
        about = [f"{engine['startup_seconds']:.1f}", f"{engine['peak_rss_mib']:.0f}"]
        lines.append(_row([name, *map(_speed, results), *about]))
    if report["impossible"]:
        lines += ["", "IMPOSSIBLE on this machine:", ""]
        lines += [f"- {line}" for line in report["impossible"]]
    if reasons := _reasons(report):
        lines += ["", "Failed:", "", *reasons]
    lines += ["", f"Least bytes read a second, and first tokens that equal those of {base}:", ""]
    lines += _extras(report)
    lines += ["", "Rules of all engines:", ""]
    lines += [f"- {key}: {value}" for key, value in report["rules"].items()]
    lines += ["", "Measured with:", ""]
    lines += [f"- {key}: {value}" for key, value in report["environment"].items()]
    for name, engine in report["engines"].items():
        if engine["versions"]:
            versions = ", ".join(f"{key} {value}" for key, value in engine["versions"].items())
            lines.append(f"- {name}: {versions}")
    return "\n".join(lines)
