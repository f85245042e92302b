"""`jaxserve generate MODEL --prompt TEXT`: text in the terminal as it is made."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxserve.errors import ValidationError
from server.commands.engine_flags import (
    ONE_AT_A_TIME,
    add_engine_flags,
    add_model_argument,
    engine_config,
)
from server.commands.sampling_flags import add_sampling_flags, sampling_params


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("generate", help="complete a prompt in the terminal")
    add_model_argument(parser)
    parser.add_argument(
        "--prompt", default="-", metavar="TEXT", help="what to complete; - reads standard input"
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(func=run, **ONE_AT_A_TIME)


def run(args: argparse.Namespace) -> int:
    """Load the model, stream the completion to standard output; returns the exit code."""
    from server.commands.local import LocalEngine

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        if not prompt:
            raise ValidationError("--prompt", prompt, "at least one character")
        params = sampling_params(args)
        with LocalEngine(engine_config(args)) as local:
            for text in local.stream(prompt, params):
                print(text, end="", flush=True)
            print()
    except KeyboardInterrupt:
        print()
        return 130
    return 0
