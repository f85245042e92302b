"""`jaxserve calibrate-kv MODEL --text FILE --output FILE`: scales of an fp8 KV cache."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxserve.config.flags import integer
from server.commands.engine_flags import (
    ONE_AT_A_TIME,
    add_engine_flags,
    add_model_argument,
    engine_config,
)
from server.commands.eval import read_text

MOST_SLOTS = 4


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("calibrate-kv", help="make the scales of an fp8 KV cache")
    add_model_argument(parser)
    parser.add_argument("--text", required=True, help="a text like what will be served")
    parser.add_argument(
        "--output", type=Path, required=True, help="safetensors file for --kv-cache-scales"
    )
    parser.add_argument(
        "--tokens", type=integer, default=65536, metavar="N", help="of the text (default: 65536)"
    )
    add_engine_flags(parser)
    parser.set_defaults(func=run, loads_model=True, **ONE_AT_A_TIME)


def run(args: argparse.Namespace) -> int:
    """Run the model over the text and write the file; returns the exit code."""
    from jaxserve import LLM
    from jaxserve.jobs.kv_calibration import calibrate, save

    text = read_text(args.text)
    # what a window has passed is calibrated too
    config = replace(engine_config(args), max_num_seqs=MOST_SLOTS, keep_window_only=False)
    with LLM(**asdict(config)) as llm:
        ids = llm.get_tokenizer().encode(text)[: args.tokens]
        window = min(llm.config.scheduler.max_model_len - 1, 2048)
        scales = calibrate(llm, ids, window)
    save(scales, args.output)
    print(f"{len(ids)} tokens: keys {_span(scales.k)}, values {_span(scales.v)}: {args.output}")
    return 0


def _span(scales: tuple[float, ...]) -> str:
    return f"{min(scales):.3g} to {max(scales):.3g}"
