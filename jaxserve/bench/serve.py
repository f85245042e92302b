"""`jaxserve bench serve`: load on a running server, ours or any with an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.bench import datasets
from jaxserve.bench.arrivals import RAMPS, arrival_times
from jaxserve.bench.client import (
    ENDPOINTS,
    RequestTimes,
    Target,
    first_model,
    open_client,
    send,
    wait_until_ready,
)
from jaxserve.bench.datasets import BenchPrompt
from jaxserve.bench.server_metrics import (
    Histogram,
    queue_markdown,
    queue_report,
    read_histograms,
)
from jaxserve.bench.serving_report import (
    METRICS,
    details,
    markdown,
    parse_goodput,
    plot,
    serving_report,
)
from jaxserve.errors import ValidationError

DATASETS = ("random", "prefix_repetition", "custom", "sharegpt")
DEFAULT_VOCABULARY = 1000  # token ids that any tokenizer has


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm bench serve` that apply to a text model."""
    add = parser.add_argument
    add("--backend", choices=sorted(ENDPOINTS), default="openai", help="kind of API")
    add("--base-url", help="such as http://127.0.0.1:8000; takes the place of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="path, when it is not the API's usual one")
    add("--model", help="name that the server knows (default: the first that it lists)")
    add("--tokenizer", help="folder; turns random token ids into text, counts a file's tokens")
    add("--api-key", help="bearer token")
    add("--dataset-name", choices=DATASETS, default="random")
    add("--dataset-path", type=Path, help="file of the custom and sharegpt datasets")
    add("--num-prompts", type=int, default=1000)
    add("--random-input-len", type=int, default=1024)
    add("--random-output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0)
    add("--random-prefix-len", type=int, default=0)
    add("--prefix-repetition-prefix-len", type=int, default=256)
    add("--prefix-repetition-suffix-len", type=int, default=256)
    add("--prefix-repetition-num-prefixes", type=int, default=10)
    add("--prefix-repetition-output-len", type=int, default=128)
    add("--custom-output-len", type=int, default=256, help="where a line does not say")
    add("--sharegpt-output-len", type=int, help="in place of the answers' lengths")
    add("--request-rate", type=float, default=math.inf, help="requests a second (default: inf)")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier")
    add("--ramp-up-strategy", choices=RAMPS)
    add("--ramp-up-start-rps", type=float, default=1.0)
    add("--ramp-up-end-rps", type=float, default=10.0)
    add("--max-concurrency", type=int, help="requests under way at once")
    add("--num-warmups", type=int, default=0, help="requests sent first and not counted")
    add("--ready-check-timeout-sec", type=float, default=60.0)
    add("--ignore-eos", action="store_true", help="generate the whole length")
    add("--temperature", type=float, help="(default: the server's)")
    add("--extra-body", type=json.loads, default={}, help="JSON object added to each request")
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", help="metrics to report")
    add("--metric-percentiles", default="99", help="such as 50,90,99")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft:500 tpot:100")
    add("--seed", type=int, default=0)
    add("--save-result", action="store_true", help="write JSON, Markdown and a plot")
    add("--save-detailed", action="store_true", help="the JSON holds every request too")
    add("--result-dir", type=Path, default=Path("."))
    add("--result-filename", help="name of the JSON file")


def run_serve(options: argparse.Namespace) -> int:
    """Send the requests, print the report; 1 when a request failed."""
    percentiles = parse_percentiles(options.metric_percentiles)
    goodput = parse_goodput(options.goodput)
    metrics = parse_metrics(options.percentile_metrics)
    times, duration, before, after = asyncio.run(measure(options))
    report = serving_report(
        times, duration, percentiles=percentiles, metrics=metrics, goodput=goodput
    )
    shown = sorted({50.0, *percentiles})
    report |= queue_report(before, after, shown)
    text = f"{markdown(report, percentiles)}\n\n{queue_markdown(report, shown)}"
    print(text)
    for error in sorted({t.error for t in times if t.error})[:5]:
        print(f"failed: {error}", file=sys.stderr)
    if options.save_result:
        _save(options, times, report, text)
    return 1 if report["failed"] else 0


class LoadTest(NamedTuple):
    """All requests, the duration in seconds, and the server's own histograms around it."""

    times: list[RequestTimes]
    duration: float
    before: dict[str, Histogram]
    after: dict[str, Histogram]


async def measure(options: argparse.Namespace) -> LoadTest:
    """Send all requests of one load test.

    Raises:
        ValidationError: options that contradict each other.
        TimeoutError: the server does not answer.
    """
    base_url = options.base_url or f"http://{options.host}:{options.port}"
    target = Target(
        base_url=base_url,
        backend=options.backend,
        model=options.model or "",
        endpoint=options.endpoint,
        body=_body(options),
        api_key=options.api_key,
    )
    prompts = make_prompts(options)
    moments = arrival_times(
        len(prompts),
        options.request_rate,
        burstiness=options.burstiness,
        ramp_up=options.ramp_up_strategy,
        start_rate=options.ramp_up_start_rps,
        end_rate=options.ramp_up_end_rps,
        seed=options.seed,
    )
    async with open_client(target) as client:
        await wait_until_ready(client, options.ready_check_timeout_sec)
        if not target.model:
            target = replace(target, model=await first_model(client))
        for index in range(options.num_warmups):
            await send(client, target, prompts[index % len(prompts)])
        before = await read_histograms(client)
        gate = asyncio.Semaphore(options.max_concurrency or len(prompts))
        start = time.perf_counter()

        async def one(prompt: BenchPrompt, moment: float) -> RequestTimes:
            await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
            async with gate:
                return await send(client, target, prompt)

        times = await asyncio.gather(*(one(p, moment) for p, moment in zip(prompts, moments)))
        duration = time.perf_counter() - start
        return LoadTest(times, duration, before, await read_histograms(client))


def make_prompts(options: argparse.Namespace) -> list[BenchPrompt]:
    """The requests that the options describe.

    Raises:
        ValidationError: a dataset without its file, or one that needs a tokenizer without one.
    """
    tokenizer = _tokenizer(options.tokenizer)
    vocabulary = len(tokenizer) if tokenizer is not None else DEFAULT_VOCABULARY
    name, path = options.dataset_name, options.dataset_path
    if name in ("custom", "sharegpt") and path is None:
        raise ValidationError("dataset_path", None, f"the file of the {name} dataset")
    if name == "random":
        prompts = datasets.random_prompts(
            options.num_prompts,
            options.random_input_len,
            options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            vocab_size=vocabulary,
            seed=options.seed,
        )
    elif name == "prefix_repetition":
        prompts = datasets.prefix_repetition(
            options.num_prompts,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_len=options.prefix_repetition_output_len,
            vocab_size=vocabulary,
            seed=options.seed,
        )
    elif name == "custom":
        prompts = datasets.custom_file(path, options.num_prompts, options.custom_output_len)
    else:
        if tokenizer is None:
            raise ValidationError("tokenizer", None, "a folder: sharegpt counts tokens with it")
        prompts = datasets.sharegpt_file(
            path, options.num_prompts, options.sharegpt_output_len, tokenizer.encode, options.seed
        )
    if tokenizer is not None:
        return datasets.as_text(prompts, tokenizer.decode)
    if options.backend == "openai-chat" and any(not isinstance(p.prompt, str) for p in prompts):
        raise ValidationError("tokenizer", None, "a folder: a chat takes text, not token ids")
    return prompts


def parse_percentiles(text: str) -> list[float]:
    """`50,90,99` as numbers.

    Raises:
        ValidationError: one of them is no number in [0, 100].
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValidationError("metric_percentiles", text, "numbers such as 50,90,99") from error
    if not all(0 <= value <= 100 for value in values):
        raise ValidationError("metric_percentiles", text, "numbers from 0 to 100")
    return values


def parse_metrics(text: str) -> list[str]:
    """`ttft,itl` as names of METRICS.

    Raises:
        ValidationError: an unknown name.
    """
    names = text.split(",")
    if not set(names) <= set(METRICS):
        raise ValidationError("percentile_metrics", text, f"of {', '.join(METRICS)}")
    return names


def _tokenizer(folder: str | None) -> Any:
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _body(options: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.temperature is not None:
        body["temperature"] = options.temperature
    return body | options.extra_body


def _save(
    options: argparse.Namespace,
    times: list[RequestTimes],
    report: dict[str, Any],
    text: str,
) -> None:
    options.result_dir.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = options.result_filename or f"serve-{options.dataset_name}-{stamp}.json"
    path = options.result_dir / name
    written = {"date": stamp, **_settings(options), **report}
    if options.save_detailed:
        written |= details(times)
    path.write_text(json.dumps(written, indent=2) + "\n")
    path.with_suffix(".md").write_text(text + "\n")
    plot(times, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.md').name}, {path.with_suffix('.png').name}")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without what must not be written down."""
    hidden = ("api_key", "func", "goodput", "extra_body")
    return {
        name: value if isinstance(value, (int, str, type(None))) else str(value)
        for name, value in vars(options).items()
        if name not in hidden
    }
