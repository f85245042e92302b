"""The sub-commands of `jaxserve bench`, with vLLM's option names."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.bench import serve_options, startup
from jaxserve.bench.serve_options import at_least
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.bench.measure import Measurement
    from jaxserve.bench.workloads import WorkItem
    from jaxserve.llm import LLM

# what is measured is an engine that compiles nothing any more
ALL_COMPILED = {"compile_ahead": 1000, "compile_in_background": False}


def register(
    subparsers: Any,
    add_engine_flags: Callable[[argparse.ArgumentParser], None],
    engine_config: Callable[[argparse.Namespace], EngineConfig],
) -> None:
    """Add the benchmarks to the sub-commands of `jaxserve bench`.

    Args:
        subparsers: of `jaxserve bench`.
        add_engine_flags: gives a parser MODEL and the engine's flags.
        engine_config: the configuration that these flags describe.
    """

    def add_engine_options(parser: argparse.ArgumentParser) -> None:
        add_engine_flags(parser)
        parser.add_argument("--output-json", type=Path, help="also write the results to this file")
        parser.add_argument(
            "--save-result",
            action="store_true",
            help="write JSON, pictures of pages, steps and latency, and a trace for Perfetto",
        )
        parser.add_argument("--result-dir", type=Path, default=Path("."), help="where to")
        parser.set_defaults(engine_config=engine_config, loads_model=True, **ALL_COMPILED)

    latency = subparsers.add_parser(
        "latency", help="seconds to complete one batch of equal requests"
    )
    add_engine_options(latency)
    latency.add_argument("--input-len", type=int, default=32, help="prompt tokens")
    latency.add_argument("--output-len", type=int, default=128, help="generated tokens")
    latency.add_argument("--batch-size", type=int, default=8, help="requests in the batch")
    latency.add_argument("--n", type=int, default=1, help="sequences sampled for each request")
    latency.add_argument(
        "--use-beam-search", action="store_true", help="search for the n most likely ones instead"
    )
    latency.add_argument("--num-iters-warmup", type=int, default=3, help="runs not counted")
    latency.add_argument("--num-iters", type=int, default=10, help="runs counted")
    latency.set_defaults(func=run_latency, bench="latency", enable_prefix_caching=False)

    throughput = subparsers.add_parser(
        "throughput", help="tokens per second over many requests queued at once"
    )
    add_engine_options(throughput)
    throughput.add_argument("--num-prompts", type=int, default=64, help="requests")
    serve_options.add_dataset_options(throughput.add_argument_group("dataset"))
    throughput.add_argument("--input-len", type=int, help="prompt tokens; random when left out")
    throughput.add_argument("--output-len", type=int, help="output tokens of every dataset")
    throughput.add_argument("--min-len", type=int, default=8, help="shortest random length")
    throughput.add_argument("--max-len", type=int, default=256, help="longest random length")
    throughput.set_defaults(func=run_throughput, bench="throughput")

    load = subparsers.add_parser("serve", help="load on a running server")
    serve_options.add_options(load)
    load.set_defaults(func=run_serve)

    many = subparsers.add_parser("sweep", help="a load test for each of several loads")
    serve_options.add_sweep_options(many)
    many.set_defaults(func=run_sweep)

    start = subparsers.add_parser("startup", help="seconds from process start to a ready server")
    startup.add_options(start)
    start.set_defaults(func=startup.run_startup)


def run_latency(options: argparse.Namespace) -> int:
    """Time `--num-iters` batches and print percentiles, tok/s and GB/s."""
    at_least(options, "batch_size", "input_len", "output_len", "num_iters", "n")
    at_least(options, "num_iters_warmup", least=0)
    _check_results(options)
    from jaxserve.bench.measure import describe, environment, run_workload
    from jaxserve.bench.percentiles import PERCENTILES, percentile
    from jaxserve.bench.workloads import fixed

    llm = _make_llm(options, options.input_len + options.output_len)
    vocab = llm.model_config.vocab_size
    sizes = options.batch_size, options.input_len, options.output_len, vocab

    def run(number: int) -> Measurement:
        """Batch `number`, with prompts of its own: what was served before may be cached."""
        items = fixed(*sizes, f"{options.seed} {number}")
        return run_workload(llm, items, n=options.n, use_beam_search=options.use_beam_search)

    for number in range(options.num_iters_warmup):
        run(number)
    runs = [run(options.num_iters_warmup + number) for number in range(options.num_iters)]
    times = [run.elapsed_time for run in runs]
    middle = sorted(runs, key=lambda run: run.elapsed_time)[len(runs) // 2]
    report: dict[str, Any] = {
        "avg_latency": statistics.fmean(times),
        "std_latency": statistics.pstdev(times),
        "latencies": times,
        "percentiles": {str(p): percentile(times, p) for p in PERCENTILES},
        "median_run": middle.as_json(),
        "environment": environment(),
    } | _utilisation(llm, middle)
    print(
        f"{describe(report['environment'])}\n"
        f"batch {options.batch_size}, {options.input_len} -> {options.output_len} tokens: "
        f"{middle.elapsed_time:.3f} s (median of {len(times)}), "
        f"{middle.output_tokens_per_second:.1f} tok/s, {middle.gigabytes_per_second:.2f} GB/s\n"
        f"{_shares(report)}\n{middle.savings()}{middle.breakdown()}"
    )
    return _finish(llm, report, options)


def run_throughput(options: argparse.Namespace) -> int:
    """Queue `--num-prompts` requests at once and print tok/s and GB/s."""
    at_least(options, "input_len", "output_len", "min_len", "max_len")
    serve_options.check_dataset(options)
    _check_results(options)
    items, longest = _throughput_items(options)
    from jaxserve.bench.measure import describe, environment, run_workload
    from jaxserve.bench.workloads import fixed

    llm = _make_llm(options, longest)
    vocab = llm.model_config.vocab_size
    run_workload(llm, fixed(2, 8, 8, vocab, options.seed + 1))
    run = run_workload(llm, items, use_tqdm=sys.stderr.isatty())
    report = run.as_json() | {"environment": environment()} | _utilisation(llm, run)
    print(
        f"{describe(report['environment'])}\n"
        f"{run.num_requests} requests, {run.num_prompt_tokens} prompt and "
        f"{run.num_output_tokens} output tokens in {run.elapsed_time:.2f} s, "
        f"{run.num_steps} steps: "
        f"{report['requests_per_second']:.2f} requests/s, "
        f"{report['tokens_per_second']:.1f} tok/s in all, "
        f"{run.output_tokens_per_second:.1f} output tok/s, {run.gigabytes_per_second:.2f} GB/s\n"
        f"{_shares(report)}\n{run.savings()}{run.breakdown()}"
    )
    return _finish(llm, report, options)


def _throughput_items(options: argparse.Namespace) -> tuple[list[WorkItem], int]:
    """The requests, and the tokens that the longest may have."""
    from jaxserve.bench.workloads import fixed, uniform
    from jaxserve.loading.hub import locate
    from jaxserve.models.config_reader import read_model_config

    config = options.engine_config(options)
    folder = locate(config).model
    vocab = read_model_config(folder, config.hf_overrides).vocab_size
    if options.dataset_name != "random":
        items = _dataset_items(options, config, vocab)
        return items, max(len(item.prompt_token_ids) + item.output_len for item in items)
    lengths = options.input_len, options.output_len
    if lengths == (None, None):
        shortest, longest = options.min_len, options.max_len
        return uniform(options.num_prompts, shortest, longest, vocab, options.seed), 2 * longest
    if None in lengths:
        allowed = "both, or neither for random lengths"
        raise ValidationError("input_len, output_len", lengths, allowed)
    return fixed(options.num_prompts, *lengths, vocab, options.seed), sum(lengths)


def _dataset_items(
    options: argparse.Namespace, config: EngineConfig, vocab_size: int
) -> list[WorkItem]:
    from jaxserve.bench.workloads import WorkItem, context_length
    from jaxserve.loading.hub import locate
    from jaxserve.tokenization import Tokenizer

    if options.input_len is not None:
        allowed = f"none with the {options.dataset_name} dataset"
        raise ValidationError("input_len", options.input_len, allowed)

    @cache
    def tokenizer() -> Tokenizer:  # not needed by a file of token ids
        return Tokenizer(locate(config).tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer().encode(text)

    context = context_length(config)
    prompts = serve_options.dataset_prompts(options, vocab_size, encode, longest=context)
    return [
        WorkItem(encode(p.prompt) if isinstance(p.prompt, str) else p.prompt, p.output_len)
        for p in prompts
    ]


def run_serve(options: argparse.Namespace) -> int:
    """A load test of a server."""
    serve_options.require("httpx", "a load test")
    from jaxserve.bench import serve

    return serve.run_serve(options)


def run_sweep(options: argparse.Namespace) -> int:
    """A load test of a server for each of several loads."""
    serve_options.require("httpx", "a load test")
    from jaxserve.bench import sweep

    return sweep.run_sweep(options)


def _make_llm(options: argparse.Namespace, longest: int) -> Any:
    """An engine for requests of up to so many tokens of prompt and output."""
    from jaxserve.bench.workloads import require_room

    config = options.engine_config(options)
    require_room(longest, config)
    _check_output(options.output_json)
    from jaxserve.llm import LLM

    return LLM(**asdict(config) | {"skip_tokenizer_init": True})


def _utilisation(llm: LLM, run: Measurement) -> dict[str, Any]:
    """MFU and the share of the bandwidth, against what this device does now, and what is wrong."""
    from jaxserve.bench.device_limits import measure_limits
    from jaxserve.models.cost import weight_numbers

    weight_bytes = llm.footprint.weight_bytes
    limits = measure_limits(weight_bytes)
    bits = 8 * weight_bytes // weight_numbers(llm.model_config)
    wrong = limits.beyond("the run", run.elapsed_time, run.flops, run.bytes_read, bits)
    return run.utilisation(limits) | {"impossible": wrong}


def _shares(report: dict[str, Any]) -> str:
    limits = report["limits"]
    return (
        f"MFU {report['mfu']:.1%} of {limits['flops_per_second'] / 1e9:.0f} GFLOP/s "
        f"({limits['product']}), {report['bandwidth_utilisation']:.1%} of "
        f"{limits['bytes_per_second'] / 1e9:.1f} GB/s, both measured here"
    )


def _check_output(path: Path | None) -> None:
    """A file that cannot be written is better known before the measurement than after it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()


def _check_results(options: argparse.Namespace) -> None:
    """Refuse results that could not be written before anything is measured."""
    if options.save_result:
        serve_options.require("matplotlib", "the pictures")
        options.result_dir.mkdir(parents=True, exist_ok=True)


def _finish(llm: LLM, report: dict[str, Any], options: argparse.Namespace) -> int:
    text = json.dumps(report, indent=2) + "\n"
    if options.output_json is not None:
        options.output_json.write_text(text)
    if options.save_result:
        date = time.strftime("%Y%m%d-%H%M%S")
        path = options.result_dir / f"{options.bench}-{date}.json"
        path.write_text(text)
        names = [
            path.with_suffix(f".{one}") for one in ("pages.png", "timeline.png", "latency.png")
        ]
        for draw, name in zip((llm.plot_pages, llm.plot_timeline, llm.plot_latency), names):
            draw(name)
        names.append(llm.trace(path.with_suffix(".trace.json")))
        print(f"\nwritten: {', '.join([str(path), *(name.name for name in names)])}")
    llm.close()
    for line in report["impossible"]:
        print(f"IMPOSSIBLE: {line}", file=sys.stderr)
    return 1 if report["impossible"] else 0
