"""`jaxserve simulate --workload NAME`: the scheduler on a simulated clock, without a device."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.bench.serve_options import at_least, parse_percentiles, require
from jaxserve.errors import ValidationError
from jaxserve.simulation.devices import DEVICES, device_of
from jaxserve.simulation.workload import PRESETS, Recorded, Workload, workload_of
from server.commands.engine_flags import (
    SERVER_QUEUE,
    add_engine_flags,
    add_model_argument,
    engine_config,
    model_path,
)

if TYPE_CHECKING:
    from jaxserve.config.engine_config import EngineConfig
    from jaxserve.simulation.served import Served
    from jaxserve.simulation.setting import Setting
    from jaxserve.simulation.step_time import StepTime

# flags of a workload's numbers
NUMBERS: dict[str, tuple[type, str]] = {
    "num_prompts": (int, "requests"),
    "request_rate": (float, "requests a second, inf: all at once"),
    "burstiness": (float, "1 is a Poisson process, less is burstier"),
    "input_len": (int, "prompt tokens beside a shared prefix"),
    "output_len": (int, "output tokens"),
    "random_range_ratio": (float, "lengths are N * (1 - R .. 1 + R)"),
    "prefix_len": (int, "tokens that prompts begin with beside --input-len"),
    "num_prefixes": (int, "how many different ones there are"),
    "num_priorities": (int, "requests have priorities from 0 below it, in turn"),
    "num_clients": (int, "requests come from so many clients, in turn"),
}
SHARES = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)  # of the capacity, for --sweep


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "simulate", help="latency and throughput by the real scheduler on a simulated clock"
    )
    add_model_argument(parser)
    add_device_flags(parser)
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default="steady",
        metavar="FILE",
        help="trace of jaxserve serve --record-trace, or JSON lines of arrival, prompt_tokens and "
        f"output_tokens; or one of {', '.join(PRESETS)} (default: steady)",
    )
    for name, (kind, text) in NUMBERS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, help=f"{text} (default: the workload's)")
    group.add_argument("--max-concurrency", type=int, help="requests under way at once")
    group.add_argument(
        "--request-rates", type=float, nargs="+", default=[], help="a simulation for each rate"
    )
    group.add_argument(
        "--sweep",
        action="store_true",
        help="likewise, for shares of the capacity that is found first",
    )
    group.add_argument(
        "--policy",
        type=Path,
        metavar="FILE.py",
        help="compare this scheduling policy with those that come along, on the same requests",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--metric-percentiles", default="99", help="such as 50,90,99")
    results.add_argument("--output-json", type=Path, help="also write the results to this file")
    results.add_argument("--save-result", action="store_true", help="write JSON and pictures")
    results.add_argument("--result-dir", type=Path, default=Path("."), help="where to")
    add_engine_flags(parser)
    parser.set_defaults(func=run, **SERVER_QUEUE)


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """The device and what is known of its speed."""
    group = parser.add_argument_group("device")
    group.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)} (default: cpu)",
    )
    group.add_argument(
        "--device-memory-gb",
        type=float,
        metavar="GB",
        help="of a device, where it has another size",
    )
    group.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="results of jaxserve bench latency --output-json on the device, in place of its data "
        "sheet; a CPU without them is measured now",
    )
    group.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="trace of jaxserve serve --record-trace: steps take what they took there",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, print the report; returns the exit code."""
    percentiles = sorted({50.0, 99.0, *parse_percentiles(args.metric_percentiles)})
    if args.save_result:
        require("matplotlib", "the pictures")
        args.result_dir.mkdir(parents=True, exist_ok=True)
    device_of(args.device)
    at_least(args, "max_concurrency")
    requests = _workload(args)
    asked, setting = simulated(args)
    from jaxserve.simulation.simulator import Simulation

    times, sources = times_of(args, setting)
    described = f"{requests.num_prompts} requests of {args.workload}"

    def serve(load: Workload | Recorded, config: EngineConfig = asked) -> Served:
        simulation = Simulation(setting, times(), config, args.max_concurrency)
        return simulation.run(load.requests())

    title = f"{asked.model} on {setting.devices} x {setting.device.name}: {described}"
    if args.policy is not None:
        return _compare(args, asked, title, sources, lambda config: serve(requests, config))
    if args.request_rates or args.sweep:
        return _sweep(args, title, sources, requests, serve, percentiles)
    begin = time.monotonic()
    served = serve(requests)
    from jaxserve.simulation.report import report_of, sums_of, text_of

    report = report_of(served, percentiles)
    shown = [one for one in percentiles if one != 50]
    print(text_of(title, report, sources, shown))
    print(f"\n{time.monotonic() - begin:.1f} s of this machine", file=sys.stderr)
    written = {"model_id": asked.model, "request_rate": _finite(requests.rate), **report}
    written |= {"estimated": sources, "engine": sums_of(setting)}

    def draw(path: Path) -> list[Path]:
        from jaxserve.simulation.pictures import plot_engine

        picture = path.with_suffix(".engine.png")
        plot_engine(served, setting.num_pages - 1, title, picture)
        return [picture]

    return _write(args, written, draw)


def simulated(args: argparse.Namespace) -> tuple[EngineConfig, Setting]:
    """The settings of the flags, and what an engine would decide by them.

    Raises:
        ValidationError, HubError, CheckpointError: there is no such model, or it does not fit.
    """
    from jaxserve.models.known_shapes import shape_of
    from jaxserve.simulation.setting import find_model, settle

    named = args.model_path or args.model
    path = Path(named) if named else None
    is_config = path is not None and path.suffix == ".json" and path.is_file()
    is_known = path is not None and not path.exists() and shape_of(str(named)) is not None
    asked = engine_config(args, str(named) if is_config or is_known else model_path(args))
    model, found = find_model(asked)
    memory = args.device_memory_gb
    if memory is not None and not memory > 0:
        raise ValidationError("--device-memory-gb", memory, "above 0")
    size = None if memory is None else int(memory * 1e9)
    setting = settle(asked, model, device_of(args.device), found, size)
    return setting.config.asked, setting


def times_of(
    args: argparse.Namespace, setting: Setting
) -> tuple[Callable[[], StepTime], list[str]]:
    """What makes the times of steps, anew for each simulation, and what of it is estimated.

    Raises:
        ValidationError: a file of rates or steps that is none; names file, line and field.
    """
    from jaxserve.observability.load_trace import read_trace
    from jaxserve.simulation.calibration import Fitted
    from jaxserve.simulation.rates import rates_of
    from jaxserve.simulation.step_time import Roofline

    times: Callable[[], StepTime]
    if args.calibrate is not None:
        trace = read_trace(args.calibrate)
        seed = setting.config.asked.seed

        def times() -> StepTime:
            return Fitted(setting, trace, seed)
    else:
        rates = rates_of(setting, args.rates)

        def times() -> StepTime:
            return Roofline(setting, rates)

    told = [times().source, "lengths: every output has its full length, no text ends it before"]
    seen = "until the server has its tokens" if args.calibrate else "of the engine alone"
    told.append(f"latency: {seen}, without HTTP and network")
    return times, told


def _workload(args: argparse.Namespace) -> Workload | Recorded:
    found = workload_of(args.workload)
    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    if isinstance(found, Workload):
        changed = {{"random_range_ratio": "range_ratio"}.get(n, n): v for n, v in given.items()}
        return replace(found, **changed, seed=args.seed)
    rate = given.pop("request_rate", None)
    if given:
        name, value = next(iter(given.items()))
        raise ValidationError(name, value, f"none: {args.workload} says it for each request")
    return found if rate is None else found.at_rate(rate)


def _compare(
    args: argparse.Namespace,
    asked: EngineConfig,
    title: str,
    sources: list[str],
    serve: Callable[[EngineConfig], Served],
) -> int:
    from jaxserve.simulation.policy_file import compare, load_policy, table

    rows = compare(serve, asked, [load_policy(args.policy, asked)])
    print(f"# {title}\n\n{table(rows)}\n\nSimulated, not measured:")
    print("\n".join(f"- {source}" for source in sources))
    return _write(args, {"model_id": asked.model, "policies": rows, "estimated": sources})


def _sweep(
    args: argparse.Namespace,
    title: str,
    sources: list[str],
    requests: Workload | Recorded,
    serve: Callable[[Workload | Recorded], Served],
    percentiles: list[float],
) -> int:
    from jaxserve.simulation.pictures import knee, plot_rates
    from jaxserve.simulation.report import report_of

    rates = sorted(args.request_rates)
    if any(not rate > 0 for rate in rates):
        raise ValidationError("request_rates", rates, "above 0")
    if args.sweep:
        most = report_of(serve(requests.at_rate(1e9)), percentiles)["request_throughput"]
        rates = [share * most for share in SHARES]
        title += f", capacity {most:.3g} requests/s"
    rows = []
    for rate in rates:
        report = report_of(serve(requests.at_rate(rate)), percentiles)
        rows.append({"request_rate": rate, **report})
    columns = ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "failed")
    print(f"# {title}\n\n| offered/s | served/s | ttft p50, ms | ttft p99 | tpot p99 | refused |")
    print("|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [f"{row[name]:.4g}" for name in columns]
        print(f"| {row['request_rate']:.4g} | {' | '.join(cells)} |")
    place = knee(rates, [row["p99_ttft_ms"] for row in rows])
    found = None if place is None else rates[place]
    if found is not None:
        print(f"\nknee of the p99 of ttft: {found:.3g} requests/s")
    print("\nSimulated, not measured:\n" + "\n".join(f"- {source}" for source in sources))

    def draw(path: Path) -> list[Path]:
        picture = path.with_suffix(".rates.png")
        plot_rates(rows, title, picture)
        return [picture]

    return _write(args, {"runs": rows, "knee": found, "estimated": sources}, draw)


def _write(
    args: argparse.Namespace,
    written: dict[str, Any],
    draw: Callable[[Path], list[Path]] = lambda path: [],
) -> int:
    text = json.dumps(written, indent=2) + "\n"
    if args.output_json is not None:
        args.output_json.write_text(text)
    if args.save_result:
        date = time.strftime("%Y%m%d-%H%M%S")
        path = args.result_dir / f"simulate-{Path(args.workload).stem}-{date}.json"
        path.write_text(text)
        print(f"\nwritten: {', '.join(map(str, [path, *draw(path)]))}")
    return 0


def _finite(rate: float) -> float | str:
    return rate if rate < float("inf") else "inf"
