"""Tables and plot of what was measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from benchmarks.scheduling.served import Figures, interval

ROWS = {
    "short_p50": "short prompts, p50 to the first token, s",
    "short_p99": "short prompts, p99, s",
    "long_p50": "long prompts, p50, s",
    "long_p99": "long prompts, p99, s",
    "all_p99": "all, p99, s",
    "tokens_per_second": "tokens of prompts and outputs a second",
}
LIMITS = (0.1, 0.2, 0.3, 0.5)  # of p99 to the first token, s
assert tuple(ROWS) == Figures._fields


def change(report: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Mean and 95 % interval of length / fcfs - 1 over the seeds, which are pairs."""
    runs = report["runs"]
    return interval([b[name] / a[name] - 1 for a, b in zip(runs["fcfs"], runs["length"])])


def print_table(report: dict[str, Any]) -> None:
    """A Markdown table: means over the seeds, and the paired change with its interval."""
    load = "" if report["load"] is None else f", load {report['load']:g}"
    print(
        f"{report['clock']} clock, {report['requests']} requests a run at {report['rate']:.3g} a "
        f"second{load}, {len(report['runs']['fcfs'])} seeds\n"
    )
    print("| | fcfs | length | change, 95 % interval |\n|---|---:|---:|---:|")
    for name, text in ROWS.items():
        means = [interval([run[name] for run in report["runs"][p]])[0] for p in report["runs"]]
        mean, low, high = change(report, name)
        cells = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in means]
        print(f"| {text} | {' | '.join(cells)} | {mean:+.1%} ({low:+.1%} to {high:+.1%}) |")


def highest_rate(rows: list[dict[str, Any]], column: str, limit: float) -> float | None:
    """The rate up to which a latency stays within a limit, between two loads by interpolation.

    None: it is above the limit at the lowest load already.
    """
    if rows[0][column] > limit:
        return None
    rate = rows[0]["rate"]
    for before, after in itertools.pairwise(rows):
        if after[column] > limit:
            part = (limit - before[column]) / (after[column] - before[column])
            return float(before["rate"] + part * (after["rate"] - before["rate"]))
        rate = after["rate"]
    return float(rate)


def print_limits(rows: list[dict[str, Any]]) -> None:
    """Requests a second within a limit of tail latency, by policy."""
    print("| load | " + " | ".join(name for name in rows[0] if name.endswith("p99")) + " |")
    print("|---|" + "---:|" * 6)
    for row in rows:
        cells = (f"{value:.3g}" for name, value in row.items() if name.endswith("p99"))
        print(f"| {row['load']:g} | {' | '.join(cells)} |")
    print("\n| p99 to the first token | fcfs, requests/s | length, requests/s | ratio |")
    print("|---|---:|---:|---:|")
    for name, text in (("short_p99", "of short prompts"), ("all_p99", "of all")):
        for limit in LIMITS:
            rates = [highest_rate(rows, f"{policy}_{name}", limit) for policy in ("fcfs", "length")]
            cells = ["none measured" if rate is None else f"{rate:.2f}" for rate in rates]
            ratio = f"{rates[1] / rates[0]:.2f}" if rates[0] and rates[1] else "-"
            print(f"| {text}, {limit:g} s | {' | '.join(cells)} | {ratio} |")
    print()


def plot(report: dict[str, Any], path: Path) -> None:
    """p99 to the first token: over the load where there are several, else by seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, size in zip(axes, ("short", "long")):
        for policy, marker in (("fcfs", "o-"), ("length", "s-")):
            if "loads" in report:
                values = [row[f"{policy}_{size}_p99"] for row in report["loads"]]
                axis.plot([row["load"] for row in report["loads"]], values, marker, label=policy)
                axis.set_xlabel("load, share of the capacity")
            else:
                values = [run[f"{size}_p99"] for run in report["runs"][policy]]
                axis.plot(range(len(values)), values, marker, label=policy)
                axis.set_xlabel("seed")
        axis.set_title(f"{size} prompts ({report['clock']} clock)")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("p99 to the first token, s")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
