"""`jaxserve bench serve`: load on a running server, ours or any with an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxserve.bench import datasets
from jaxserve.bench.arrivals import arrival_times
from jaxserve.bench.datasets import BenchPrompt
from jaxserve.bench.http_client import RequestTimes, Target, open_client, send, wait_until_ready
from jaxserve.bench.serve_options import (
    check,
    dataset_prompts,
    pairs,
    parse_metrics,
    parse_percentiles,
    request_fields,
    settings,
)
from jaxserve.bench.server_metrics import (
    Reading,
    queue_markdown,
    queue_report,
    read_metrics,
    step_markdown,
    step_report,
)
from jaxserve.bench.serving_report import (
    describe,
    details,
    markdown,
    parse_goodput,
    plot,
    plot_latency,
    plot_timeline,
    serving_report,
)
from jaxserve.errors import ValidationError
from jaxserve.loading.hub import Hub, is_hub_id

DEFAULT_VOCABULARY = 1000  # token ids that any tokenizer has
OTHER_FILES = 200  # of this process, besides its connections
SHOWN_ERRORS = 5


def run_serve(options: argparse.Namespace) -> int:
    """Send the requests, print the report; 1 when a request failed."""
    percentiles = parse_percentiles(options.metric_percentiles)
    goodput = parse_goodput(options.goodput)
    metrics = parse_metrics(options.percentile_metrics)
    test = asyncio.run(measure(options))
    report = serving_report(
        test.times, test.duration, percentiles=percentiles, metrics=metrics, goodput=goodput
    )
    shown = sorted({50.0, *percentiles})
    report |= queue_report(test.before.histograms, test.after.histograms, shown)
    steps = step_report(test.before, test.after)
    report |= steps
    written = head(options, test) | report
    text = "\n\n".join(
        [
            describe(written),
            markdown(report, percentiles),
            *remarks(test),
            queue_markdown(report, shown),
            *([step_markdown(steps)] if steps else []),
        ]
    )
    print(text)
    show_errors(test.times)
    if options.save_result or options.save_detailed:
        _save(options, test.times, written, text)
    return 1 if report["failed"] else 0


class LoadTest(NamedTuple):
    """All requests, the duration in seconds, and the server's own metrics around it.

    `model` is what the requests asked for, `prompts` what they sent.
    """

    model: str
    prompts: list[BenchPrompt]
    times: list[RequestTimes]
    duration: float
    before: Reading
    after: Reading


async def measure(options: argparse.Namespace) -> LoadTest:
    """Send all requests of one load test.

    Raises:
        ValidationError: options that contradict each other.
        JaxServeError: the server does not answer.
    """
    check(options)
    target = Target(
        base_url=options.base_url or f"http://{options.host}:{options.port}",
        backend=options.backend,
        model=options.model or "",
        endpoint=options.endpoint,
        body=request_fields(options),
        api_key=options.api_key,
        headers=pairs("header", options.header),
        verify=not options.insecure,
    )
    tokenizer = _tokenizer(options.tokenizer)
    prompts = make_prompts(options, tokenizer)
    moments = send_times(options, prompts)
    _allow_connections(min(len(prompts), options.max_concurrency or len(prompts)))
    async with open_client(target) as client:
        model = await wait_until_ready(client, options.ready_check_timeout_sec, target.model)
        target = replace(target, model=model)
        for index in range(options.num_warmups):
            await send(client, target, prompts[index % len(prompts)])
        before = await read_metrics(client)
        gate = asyncio.Semaphore(options.max_concurrency or len(prompts))
        # a bar for people: none where standard error is a file
        quiet = True if options.disable_tqdm else None
        with tqdm(total=len(prompts), desc="requests", disable=quiet, leave=False) as bar:
            start = time.perf_counter()

            async def one(prompt: BenchPrompt, moment: float) -> RequestTimes:
                await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
                async with gate:
                    times = await send(client, target, prompt)
                bar.update()
                return times

            times = await asyncio.gather(*(one(p, moment) for p, moment in zip(prompts, moments)))
            duration = time.perf_counter() - start
        after = await read_metrics(client)
    if tokenizer is not None:
        _count_tokens(prompts, times, tokenizer)
    return LoadTest(model, prompts, times, duration, before, after)


def make_prompts(options: argparse.Namespace, tokenizer: Any) -> list[BenchPrompt]:
    """The requests that the options describe.

    Raises:
        ValidationError: a dataset without its file, or one that needs a tokenizer without one.
    """
    vocabulary = len(tokenizer) if tokenizer is not None else DEFAULT_VOCABULARY
    if options.dataset_name == "random":
        prompts = datasets.random_prompts(
            options.num_prompts,
            options.random_input_len,
            options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            vocab_size=vocabulary,
            seed=options.seed,
        )
    else:
        encode = None if tokenizer is None else tokenizer.encode
        prompts = dataset_prompts(options, vocabulary, encode)
    if tokenizer is not None:
        return datasets.as_text(prompts, tokenizer.decode)
    if options.backend == "openai-chat" and any(not isinstance(p.prompt, str) for p in prompts):
        raise ValidationError("tokenizer", None, "a folder: a chat takes text, not token ids")
    return prompts


def send_times(options: argparse.Namespace, prompts: list[BenchPrompt]) -> list[float]:
    """Seconds after the start at which each prompt is sent: its own, or by the options' rate.

    Raises:
        ValidationError: a rate that is none.
    """
    has_rate = options.ramp_up_strategy or math.isfinite(options.request_rate)
    own = [prompt.arrival for prompt in prompts if prompt.arrival is not None]
    if len(own) == len(prompts) and not has_rate:
        return [arrival - own[0] for arrival in own]
    return arrival_times(
        len(prompts),
        options.request_rate,
        burstiness=options.burstiness,
        ramp_up=options.ramp_up_strategy,
        start_rate=options.ramp_up_start_rps,
        end_rate=options.ramp_up_end_rps,
        seed=options.seed,
    )


def remarks(test: LoadTest) -> list[str]:
    """What a reader of the figures should know: short outputs, tokens without a count."""
    done = [(p, t) for p, t in zip(test.prompts, test.times) if not t.error]
    found = []
    if not all(t.counted for _, t in done):
        found.append(
            "The server does not say how many tokens there were: each piece of a stream counts as "
            "one. With --tokenizer they are counted."
        )
    else:
        asked = sum(p.output_len for p, _ in done)
        given = sum(t.output_tokens for _, t in done)
        if given < asked:
            found.append(
                f"The outputs have {given} of the {asked} tokens that were asked for; "
                "--ignore-eos generates all where the server knows it."
            )
    return found


def show_errors(times: list[RequestTimes]) -> None:
    """The most frequent reasons of failures, a line each."""
    for error, count in Counter(t.error for t in times if t.error).most_common(SHOWN_ERRORS):
        print(f"failed: {count} x {error}", file=sys.stderr)


def _count_tokens(prompts: list[BenchPrompt], times: list[RequestTimes], tokenizer: Any) -> None:
    for prompt, t in zip(prompts, times):
        if t.counted or t.error:
            continue
        t.output_tokens = len(tokenizer.encode(t.text, add_special_tokens=False))
        t.prompt_tokens = t.prompt_tokens or len(tokenizer.encode(prompt.prompt))
        t.counted = True


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    folder = Hub().fetch_small_files(name, None) if is_hub_id("tokenizer", name) else name
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValidationError("tokenizer", name, f"a folder with a tokenizer ({reason})") from error


def _allow_connections(count: int) -> None:
    """Each request under way is an open file; the usual limit of 1024 is less than the default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def head(options: argparse.Namespace, test: LoadTest) -> dict[str, Any]:
    """What was measured, under vLLM's names, and every option."""
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "model_id": test.model,
        "tokenizer_id": options.tokenizer,
        **settings(options),
        **pairs("metadata", options.metadata),
    }


def _save(
    options: argparse.Namespace, times: list[RequestTimes], written: dict[str, Any], text: str
) -> None:
    name = options.result_filename or f"serve-{options.dataset_name}-{written['date']}.json"
    path = options.result_dir / name
    if options.save_detailed:
        written = written | details(times)
    path.write_text(json.dumps(written, indent=2) + "\n")
    path.with_suffix(".md").write_text(text + "\n")
    plot(times, path.with_suffix(".png"))
    plot_latency(times, path.with_suffix(".latency.png"))
    plot_timeline(times, path.with_suffix(".timeline.png"))
    names = [path.with_suffix(one).name for one in (".md", ".png", ".latency.png", ".timeline.png")]
    print(f"\nwritten: {', '.join([str(path), *names])}")
