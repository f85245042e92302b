"""The sub-commands of `jaxserve bench`, with vLLM's option names."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.bench import serve, startup, sweep
from jaxserve.errors import JaxServeError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def register(subparsers: Any) -> None:
    """Add the benchmarks to the sub-commands of `jaxserve bench`."""
    latency = subparsers.add_parser(
        "latency", help="seconds to complete one batch of equal requests"
    )
    _add_engine_options(latency)
    latency.add_argument("--input-len", type=int, default=32, help="prompt tokens")
    latency.add_argument("--output-len", type=int, default=128, help="generated tokens")
    latency.add_argument("--batch-size", type=int, default=8, help="requests in the batch")
    latency.add_argument("--num-iters-warmup", type=int, default=3, help="runs not counted")
    latency.add_argument("--num-iters", type=int, default=10, help="runs counted")
    latency.set_defaults(func=partial(_run, run_latency))

    throughput = subparsers.add_parser(
        "throughput", help="tokens per second over many requests queued at once"
    )
    _add_engine_options(throughput)
    throughput.add_argument("--num-prompts", type=int, default=64, help="requests")
    throughput.add_argument("--input-len", type=int, help="prompt tokens; random when left out")
    throughput.add_argument("--output-len", type=int, help="output tokens; random when left out")
    throughput.add_argument("--min-len", type=int, default=8, help="shortest random length")
    throughput.add_argument("--max-len", type=int, default=256, help="longest random length")
    throughput.set_defaults(func=partial(_run, run_throughput))

    load = subparsers.add_parser("serve", help="load on a running server")
    serve.add_options(load)
    load.set_defaults(func=partial(_run, serve.run_serve))

    many = subparsers.add_parser("sweep", help="a load test for each of several loads")
    sweep.add_options(many)
    many.set_defaults(func=partial(_run, sweep.run_sweep))

    start = subparsers.add_parser("startup", help="seconds from process start to a ready server")
    startup.add_options(start)
    start.set_defaults(func=partial(_run, startup.run_startup))


def run_latency(options: argparse.Namespace) -> int:
    """Time `--num-iters` batches and print percentiles, tok/s and GB/s."""
    from jaxserve.bench.measure import environment, run_workload
    from jaxserve.bench.percentiles import percentile
    from jaxserve.bench.workloads import fixed

    llm = _make_llm(options)
    vocab = llm.model_config.vocab_size
    items = fixed(options.batch_size, options.input_len, options.output_len, vocab, options.seed)
    for _ in range(options.num_iters_warmup):
        run_workload(llm, items)
    runs = [run_workload(llm, items) for _ in range(options.num_iters)]
    times = [run.elapsed_time for run in runs]
    middle = sorted(runs, key=lambda run: run.elapsed_time)[len(runs) // 2]
    report = {
        "avg_latency": statistics.fmean(times),
        "latencies": times,
        "percentiles": {str(p): percentile(times, p) for p in PERCENTILES},
        "median_run": middle.as_json(),
        "environment": environment(),
    }
    print(
        f"batch {options.batch_size}, {options.input_len} -> {options.output_len} tokens: "
        f"{middle.elapsed_time:.3f} s (median of {len(times)}), "
        f"{middle.output_tokens_per_second:.1f} tok/s, {middle.gigabytes_per_second:.2f} GB/s\n"
        f"{middle.breakdown()}"
    )
    return _finish(llm, report, options.output_json)


def run_throughput(options: argparse.Namespace) -> int:
    """Queue `--num-prompts` requests at once and print tok/s and GB/s."""
    from jaxserve.bench.measure import environment, run_workload
    from jaxserve.bench.workloads import fixed, uniform

    llm = _make_llm(options)
    vocab = llm.model_config.vocab_size
    if options.input_len and options.output_len:
        items = fixed(
            options.num_prompts, options.input_len, options.output_len, vocab, options.seed
        )
    else:
        items = uniform(options.num_prompts, options.min_len, options.max_len, vocab, options.seed)
    run_workload(llm, fixed(2, 8, 8, vocab, options.seed + 1))
    run = run_workload(llm, items, use_tqdm=True)
    report = run.as_json() | {"environment": environment()}
    print(
        f"{run.num_requests} requests, {run.num_prompt_tokens} prompt and "
        f"{run.num_output_tokens} output tokens in {run.elapsed_time:.2f} s, "
        f"{run.num_steps} steps: "
        f"{report['requests_per_second']:.2f} requests/s, "
        f"{report['tokens_per_second']:.1f} tok/s in all, "
        f"{run.output_tokens_per_second:.1f} output tok/s, {run.gigabytes_per_second:.2f} GB/s\n"
        f"{run.breakdown()}"
    )
    return _finish(llm, report, options.output_json)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model folder; the bundled model when left out")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--load-format", default="auto", help="auto, safetensors or dummy")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices")
    parser.add_argument("--max-num-seqs", type=int, help="slots")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus output")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens a step")
    parser.add_argument("--block-size", type=int, help="tokens a KV page")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    parser.add_argument("--output-json", type=Path, help="also write the results to this file")


def _make_llm(options: argparse.Namespace) -> Any:
    from checkpoints import bundled_model_path
    from jaxserve.llm import LLM

    return LLM(
        model=options.model or str(bundled_model_path()),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        load_format=options.load_format,
        tensor_parallel_size=options.tensor_parallel_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        compile_in_background=False,
        compile_ahead=1000,
    )


def _finish(llm: Any, report: dict[str, Any], path: Path | None) -> int:
    llm.close()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _run(benchmark: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Exit code of a benchmark; expected errors are one line."""
    from checkpoints import CheckpointError

    try:
        return benchmark(options)
    except (JaxServeError, CheckpointError, OSError) as error:
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 1
