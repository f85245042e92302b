"""The options of `jaxserve bench serve` and `bench sweep`, under vLLM's names, and their checks.

Those of a dataset are the ones of `bench throughput` too.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.bench import datasets
from jaxserve.bench.arrivals import RAMPS
from jaxserve.bench.serving_report import METRICS
from jaxserve.config.flags import add_flag, json_object
from jaxserve.errors import JaxServeError, ValidationError
from jaxserve.params.sampling_params import SamplingParams

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "prefix_repetition", "custom", "sharegpt", "trace")
OF_FILES = ("custom", "sharegpt", "trace")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logprobs",
)
LEAST = {
    "num_prompts": 1,
    "num_warmups": 0,
    "max_concurrency": 1,
    "random_input_len": 1,
    "random_output_len": 1,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 1,
    "prefix_repetition_suffix_len": 1,
    "prefix_repetition_num_prefixes": 1,
    "prefix_repetition_output_len": 1,
    "custom_output_len": 1,
    "sharegpt_output_len": 1,
    "ready_check_timeout_sec": 0,
}
SECRET = ("api_key", "header", "func")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm bench serve` that apply to a text model."""
    _add_server(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("dataset"))
    _add_load(parser.add_argument_group("load"))
    sampling = parser.add_argument_group("fields of each request (default: the server's)")
    sampling.add_argument("--ignore-eos", action="store_true", help="generate the whole length")
    for name in SAMPLING:
        add_flag(sampling, SamplingParams, name, unset=True)
    sampling.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields"
    )
    _add_results(parser.add_argument_group("results"))


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench serve`, with lists for the loads."""
    add_options(parser)
    parser.add_argument(
        "--request-rates", type=float, nargs="+", default=[], help="a run for each rate"
    )
    parser.add_argument(
        "--concurrencies", type=int, nargs="+", default=[], help="a run for each --max-concurrency"
    )


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--backend", choices=sorted(ENDPOINTS), default="openai", help="kind of API")
    add("--base-url", help="such as http://127.0.0.1:8000; takes the place of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="path, when it is not the API's usual one")
    add("--model", help="name that the server knows (default: the first that it lists)")
    add(
        "--tokenizer", help="folder or id; turns random token ids into text, counts a file's tokens"
    )
    add("--api-key", help="bearer token")
    add("--header", nargs="+", default=[], metavar="KEY=VALUE", help="further headers")
    add("--insecure", action="store_true", help="accept any certificate")
    add("--ready-check-timeout-sec", type=float, default=60.0, help="how long to wait for it")


def add_dataset_options(group: Any) -> None:
    """The options of the datasets but for the lengths of random prompts."""
    add = group.add_argument
    name = {"type": lambda text: text.replace("-", "_"), "choices": DATASETS, "default": "random"}
    add("--dataset-name", **name)
    add("--dataset-path", type=Path, help="file of the custom, sharegpt and trace datasets")
    add("--prefix-repetition-prefix-len", type=int, default=256)
    add("--prefix-repetition-suffix-len", type=int, default=256)
    add("--prefix-repetition-num-prefixes", type=int, default=10)
    add("--prefix-repetition-output-len", type=int, default=128)
    add("--custom-output-len", type=int, default=256, help="where a line does not say")
    add("--sharegpt-output-len", type=int, help="in place of the answers' lengths")


def _add_dataset(group: Any) -> None:
    add_dataset_options(group)
    add = group.add_argument
    add("--num-prompts", type=int, default=1000)
    add("--input-len", type=int, help="the same as --random-input-len")
    add("--output-len", type=int, help="output length of every dataset")
    add("--random-input-len", type=int, default=1024)
    add("--random-output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0, help="lengths are N * (1 - R .. 1 + R)")
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with")
    add("--seed", type=int, default=0)


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=float, default=math.inf, help="requests a second (default: inf)")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier")
    add("--ramp-up-strategy", choices=RAMPS, help="raise the rate over the requests")
    add("--ramp-up-start-rps", type=float, default=1.0)
    add("--ramp-up-end-rps", type=float, default=10.0)
    add("--max-concurrency", type=int, help="requests under way at once")
    add("--num-warmups", type=int, default=0, help="requests sent first and not counted")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_results(group: Any) -> None:
    add = group.add_argument
    add("--percentile-metrics", default=",".join(METRICS), help="metrics to report")
    add("--metric-percentiles", default="99", help="such as 50,90,99")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft:500 tpot:100")
    add("--save-result", action="store_true", help="write JSON, Markdown and a plot")
    add("--save-detailed", action="store_true", help="likewise, and the JSON holds every request")
    add("--result-dir", type=Path, default=Path("."))
    add("--result-filename", help="name of the JSON file")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="further fields of the JSON")


def check(options: argparse.Namespace) -> None:
    """Refuse what could not work before anything is sent, and settle the general lengths.

    Raises:
        ValidationError: a value out of its range, or options that contradict each other.
        JaxServeError: results are to be drawn and matplotlib is missing.
    """
    if options.input_len is not None:
        options.random_input_len = options.input_len
    check_dataset(options)
    if not 0 < options.port < 65536:
        raise ValidationError("port", options.port, "1 to 65535")
    if options.ramp_up_strategy and not math.isinf(options.request_rate):
        raise ValidationError("request_rate", options.request_rate, "not with --ramp-up-strategy")
    pairs("header", options.header)
    pairs("metadata", options.metadata)
    if options.save_result or options.save_detailed:
        require("matplotlib", "the plot")
        if Path(options.result_filename or "").suffix in (".md", ".png"):
            raise ValidationError("result_filename", options.result_filename, "a name for the JSON")
        options.result_dir.mkdir(parents=True, exist_ok=True)


def check_dataset(options: argparse.Namespace) -> None:
    """Refuse a dataset that could not be made, and settle the general output length.

    Raises:
        ValidationError: a value out of its range, a file that is missing or one too many.
    """
    if options.output_len is not None:
        for dataset in DATASETS:
            setattr(options, f"{dataset}_output_len", options.output_len)
    for name, least in LEAST.items():
        at_least(options, name, least=least)
    path, dataset = options.dataset_path, options.dataset_name
    if dataset in OF_FILES and path is None:
        raise ValidationError("dataset_path", None, f"the file of the {dataset} dataset")
    if dataset not in OF_FILES and path is not None:
        raise ValidationError("dataset_path", str(path), f"none with the {dataset} dataset")


def dataset_prompts(
    options: argparse.Namespace,
    vocab_size: int,
    encode: Callable[[str], list[int]] | None,
    longest: int | None = None,
) -> list[datasets.BenchPrompt]:
    """The requests of the dataset that the options name, one with shared prefixes or from a file.

    Args:
        options: checked by `check_dataset`.
        vocab_size: token ids of prefixes are below it.
        encode: text to token ids; None where there is no tokenizer.
        longest: leaves out conversations of more tokens, prompt and output together.

    Raises:
        ValidationError: a file that is none of the dataset, or sharegpt without a tokenizer.
    """
    if options.dataset_name == "prefix_repetition":
        return datasets.prefix_repetition(
            options.num_prompts,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_len=options.prefix_repetition_output_len,
            vocab_size=vocab_size,
            seed=options.seed,
        )
    path, count = options.dataset_path, options.num_prompts
    if options.dataset_name == "trace":
        return datasets.trace_file(path, count, vocab_size, options.seed)
    if options.dataset_name == "custom":
        return datasets.custom_file(path, count, options.custom_output_len)
    if encode is None:
        raise ValidationError("tokenizer", None, "a folder: sharegpt counts tokens with it")
    return datasets.sharegpt_file(
        path, count, options.sharegpt_output_len, encode, options.seed, longest
    )


def at_least(options: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Refuse numbers that are too small; those that a command has not, or that are open, are not.

    Raises:
        ValidationError: names the first one.
    """
    for name in names:
        value = getattr(options, name, None)
        if value is not None and not value >= least:
            raise ValidationError(name, value, f"{least} or more")


def require(module: str, purpose: str) -> None:
    """Say at the start that something is not installed which is needed later.

    Raises:
        JaxServeError: names what to install.
    """
    if importlib.util.find_spec(module) is None:
        raise JaxServeError(
            f"{purpose} needs {module}: pip install '.[bench]' in a clone of jaxserve"
        )


def pairs(field: str, items: list[str]) -> dict[str, str]:
    """`["KEY=VALUE", ...]` as a mapping.

    Raises:
        ValidationError: one of them has no `=`.
    """
    for item in items:
        if not item.partition("=")[0].strip() or "=" not in item:
            raise ValidationError(field, item, "KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in (i.partition("=") for i in items)}


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
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(METRICS):
        raise ValidationError("percentile_metrics", text, f"of {', '.join(METRICS)}")
    return names


def request_fields(options: argparse.Namespace) -> dict[str, Any]:
    """What each request carries besides its prompt."""
    body: dict[str, Any] = {"ignore_eos": True} if options.ignore_eos else {}
    given = {name: getattr(options, name) for name in SAMPLING}
    return body | {k: v for k, v in given.items() if v is not None} | options.extra_body


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as JSON and without what must not be written down."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path) or (isinstance(value, float) and math.isinf(value)):
            return str(value)
        return value

    return {name: plain(value) for name, value in vars(options).items() if name not in SECRET}
