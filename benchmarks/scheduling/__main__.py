"""First come, first served against short prompts first: the same arrivals for both.

    python -m benchmarks.scheduling simulated --output docs/figures
    python -m benchmarks.scheduling processor
    python -m benchmarks.scheduling wall

80 % of the prompts are short. `simulated` runs the scheduler on a device with a formula as clock,
`wall` an engine in this process, `processor` the same on one core by that core's own seconds, which
others on the machine hardly disturb. The load is a share of the capacity: the rate at which the
same requests are served first come, first served when all of them wait from the start.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scheduling.formula import simulate
from benchmarks.scheduling.report import plot, print_limits, print_table
from benchmarks.scheduling.served import Served, figures
from benchmarks.scheduling.trace import Item, bimodal

POLICIES = ("fcfs", "length")
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
Serve = Callable[[list[Item], str, int], list[Served]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clock", choices=("simulated", "processor", "wall"))
    parser.add_argument("--model", help="folder of the model (default: the bundled one)")
    parser.add_argument(
        "--num-prompts", type=int, help="requests a run (default: 2000, of an engine 150)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="traces")
    parser.add_argument("--load", type=float, default=0.9, help="share of the capacity")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="of the engine")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=256,
        help="of the engine: a step in progress is what nobody can overtake (default: %(default)s)",
    )
    parser.add_argument("--rate", type=float, help="requests a second, in place of --load")
    parser.add_argument("--output", type=Path, help="folder for scheduling-CLOCK.json and .png")
    options = parser.parse_args()
    report = run(options)
    print_table(report)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"scheduling-{options.clock}"
        path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        plot(report, path.with_suffix(".png"))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The runs of all seeds, in turn, and where the clock is simulated those at other loads."""
    simulated = options.clock == "simulated"
    count = options.num_prompts or (2000 if simulated else 150)
    serve, facts = _simulated() if simulated else _real(options)
    capacity = options.rate or _capacity(serve, count)
    rate = options.rate or options.load * capacity
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for seed in range(options.seeds):
        items = bimodal(count, rate, seed)
        for policy in POLICIES if seed % 2 else POLICIES[::-1]:
            found = figures(serve(items, policy, seed))._asdict()
            runs[policy].append(found)
            print(f"seed {seed} {policy}: {_line(found)}", file=sys.stderr, flush=True)
    report = {
        "clock": options.clock,
        "requests": count,
        "rate": rate,
        "load": None if options.rate else options.load,
        "runs": runs,
        **facts,
    }
    if simulated:
        report["loads"] = _at_loads(serve, count, capacity, options.seeds)
        print_limits(report["loads"])
    return report


def _simulated() -> tuple[Serve, dict[str, Any]]:
    return lambda items, policy, seed: simulate(items, policy), {}


def _real(options: argparse.Namespace) -> tuple[Serve, dict[str, Any]]:
    from benchmarks.scheduling.measure import Clock, ProcessorClock, WallClock, make_llm, measure

    clock: Clock = WallClock()
    if options.clock == "processor":
        clock = ProcessorClock()
        clock.use_one_core()
    from checkpoints import bundled_model_path
    from jaxserve.bench.measure import environment

    model = options.model or str(bundled_model_path())
    sizes = {name: getattr(options, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    engines = {policy: make_llm(model, policy, **sizes) for policy in POLICIES}
    for policy in POLICIES:
        measure(engines[policy], bimodal(10, math.inf, 99), 99, clock)

    def serve(items: list[Item], policy: str, seed: int) -> list[Served]:
        return measure(engines[policy], items, seed, clock)

    return serve, {"environment": environment(), "model": Path(model).name, **sizes}


def _capacity(serve: Serve, count: int) -> float:
    """Requests a second, first come, first served, when all wait from the start."""
    served = serve(bimodal(count, math.inf, 0), "fcfs", 0)
    return count / max(one.last_token for one in served)


def _at_loads(serve: Serve, count: int, capacity: float, seeds: int) -> list[dict[str, Any]]:
    """Mean p99 seconds to the first token at several loads."""
    found = []
    for load in LOADS:
        row: dict[str, Any] = {"load": load, "rate": load * capacity}
        for policy in POLICIES:
            runs = [
                figures(serve(bimodal(count, load * capacity, seed), policy, seed))
                for seed in range(seeds)
            ]
            for name in ("short_p99", "long_p99", "all_p99"):
                row[f"{policy}_{name}"] = sum(getattr(run, name) for run in runs) / seeds
        found.append(row)
    return found


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())


if __name__ == "__main__":
    raise SystemExit(main())
