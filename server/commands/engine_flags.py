"""Command-line flags of the engine: one for each field of `EngineConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from jaxserve.config import DTYPES, LOAD_FORMATS, PRESETS, QUANTIZATIONS, EngineConfig
from jaxserve.errors import ValidationError

# Defaults of commands that run one request after the other: two programs serve any step of one
# slot, and none is being compiled any more when the command wants to end.
ONE_AT_A_TIME = {"max_num_seqs": 1, "compile_ahead": 2, "compile_in_background": False}

_INTEGER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_FACTORS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def integer(text: str) -> int:
    """A number for people: 4096, 4k = 4000, 4K = 4096, 25.6k = 25600.

    Raises:
        argparse.ArgumentTypeError: not such a number.
    """
    match = _INTEGER.fullmatch(text)
    value = float(match[1]) * _FACTORS[match[2]] if match else 0.5
    if match is not None and not match[2] and "." not in text:
        return int(match[1])
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number such as 4096, 4k or 4K")
    return int(value)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """`MODEL` or `--model MODEL`; the bundled model when neither is given."""
    parser.add_argument(
        "model_path",
        nargs="?",
        metavar="MODEL",
        help="folder with a Hugging Face config.json, safetensors and tokenizer (default: the "
        "small model that comes with jaxserve)",
    )
    parser.add_argument("--model", metavar="MODEL", help="the same as a flag")
    # that of a --config file
    parser.add_argument("--default-model", metavar="MODEL", help=argparse.SUPPRESS)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the engine, in a group of their own."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--tokenizer", metavar="PATH", help="folder of the tokenizer (default: the model's)")
    add("--dtype", default="auto", choices=DTYPES, help="type of weights and activations")
    add("--load-format", default="auto", choices=LOAD_FORMATS, help="dummy makes random weights")
    add("--seed", type=int, default=0, help="of dummy weights and of requests without one")
    add("--max-model-len", type=integer, metavar="N", help="longest prompt plus output, in tokens")
    add("--max-num-seqs", type=integer, metavar="N", help="most requests that run at once")
    add("--max-num-batched-tokens", type=integer, metavar="N", help="token budget of one step")
    add("--prefill-chunk", type=integer, metavar="N", help="most prompt tokens of one step")
    add(
        "--preset",
        choices=PRESETS,
        default=_default("preset"),
        help="sizes left open are chosen for latency (chat), throughput (bulk) or between (ab, "
        "the default)",
    )
    add("--block-size", type=integer, metavar="N", help="tokens a KV page, a power of two")
    add("--num-pages", type=integer, metavar="N", help="KV pages (default: what memory holds)")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=_default("gpu_memory_utilization"),
        metavar="SHARE",
        help="share of device memory to use (default: %(default)s)",
    )
    add(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="devices that the model is sharded over (default: 1)",
    )
    add(
        "--max-logprobs",
        type=int,
        default=_default("max_logprobs"),
        metavar="N",
        help="most logprobs a request may ask for, -1 for all (default: %(default)s)",
    )
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prepare the next step while the device runs (default: on)",
    )
    add(
        "--kv-cache-memory-bytes",
        type=integer,
        metavar="N",
        help="size of the KV cache; takes the place of --gpu-memory-utilization",
    )
    add("--decode-backend", metavar="NAME", help="attention kernel (default: by device)")
    add("--prefill-backend", metavar="NAME", help="attention kernel (default: by device)")
    add("--linear-backend", metavar="NAME", help="linear layers (default: by device)")
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        help="keep the weights of linear layers in 8 bits (default: in --dtype)",
    )
    add(
        "--compile-ahead",
        type=int,
        default=_default("compile_ahead"),
        metavar="N",
        help="programs compiled before the engine is ready (default: by device, all on a GPU)",
    )
    add(
        "--compilation-cache",
        default=_default("compilation_cache"),
        metavar="FOLDER",
        help="keeps compiled programs for the next start: auto (the user's cache folder), off, or "
        "a folder (default: %(default)s)",
    )
    add(
        "--compile-in-background",
        action=argparse.BooleanOptionalAction,
        default=_default("compile_in_background"),
        help="compile the remaining programs while the server works (default: by device, not on a "
        "GPU)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags describe.

    Raises:
        ValidationError: a value that is not allowed, or a model that is no folder.
    """
    path = model_path(args)
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    given: dict[str, Any] = {k: v for k, v in vars(args).items() if k in names}
    given["model"] = path
    served = tuple(given.get("served_model_name") or ())
    if not served and not any((args.model_path, args.model, args.default_model)):
        # The bundled model is known by its name, not by where it was installed.
        served = (Path(path).name,)
    given["served_model_name"] = served
    return EngineConfig(**given)


def model_path(args: argparse.Namespace) -> str:
    """The model's folder.

    Raises:
        ValidationError: two different models, or a folder without config.json.
    """
    chosen = {path for path in (args.model_path, args.model) if path is not None}
    if len(chosen) > 1:
        raise ValidationError("--model", args.model, f"not together with MODEL={args.model_path}")
    chosen = chosen or {args.default_model} - {None}
    if not chosen:
        from checkpoints import bundled_model_path

        return str(bundled_model_path())
    path = str(chosen.pop())
    if not (Path(path) / "config.json").is_file():
        raise ValidationError("model", path, "a folder that holds a Hugging Face config.json")
    return path


def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(EngineConfig) if f.name == name)
