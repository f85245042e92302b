"""Flags of `vllm serve` that `jaxserve serve` has not: passed over, or refused by name.

Those of its engine are in `jaxserve/config/vllm_arguments.json`, those of its server in
`vllm_flags.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from jaxserve.config.vllm_arguments import ARGUMENTS, own_settings, read_arguments
from server.protocol.body_errors import renamed

SERVER_ARGUMENTS = read_arguments("server.commands", "vllm_flags.json")
_ALL = ARGUMENTS | SERVER_ARGUMENTS


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each name that the parser has not."""
    for name, argument in sorted(_ALL.items()):
        if name.startswith("_"):
            continue  # vLLM's own processes say these to one another
        how: dict[str, Any] = {"type": _value}
        if argument.switch or isinstance(argument.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(argument.default, list):
            how["nargs"] = "+"
        flag = "--" + name.replace("_", "-")
        # one that the parser has is jaxserve's
        with contextlib.suppress(argparse.ArgumentError):
            parser.add_argument(
                flag, dest=f"vllm:{name}", default=None, help=argparse.SUPPRESS, **how
            )


def check_vllm_flags(args: argparse.Namespace) -> None:
    """Pass over what asks for nothing, with one log line; set what a flag says by another setting.

    Raises:
        ValidationError: names the first flag that asks for what jaxserve does not do.
    """
    given = {
        dest.removeprefix("vllm:"): value
        for dest, value in vars(args).items()
        if dest.startswith("vllm:") and value is not None
    }
    with renamed(lambda name: "--" + name.replace("_", "-")):
        said = own_settings(given, _ALL)
    vars(args).update(said)


def _value(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
