"""Flags of `jaxserve serve` that say how the model marks its calls and its thoughts."""

from __future__ import annotations

import argparse

from server.reasoning.registry import REASONING_PARSERS
from server.tools.choice import Parsers
from server.tools.registry import TOOL_PARSERS


def add_parser_flags(parser: argparse.ArgumentParser) -> None:
    """`--tool-call-parser`, `--enable-auto-tool-choice` and `--reasoning-parser`."""
    add = parser.add_argument_group("tools and reasoning").add_argument
    add(
        "--tool-call-parser",
        choices=sorted(TOOL_PARSERS),
        help="how the model writes calls of tools, for tool_choice auto",
    )
    add(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let the model decide whether it calls a tool; needs --tool-call-parser "
        "(default: off)",
    )
    add(
        "--reasoning-parser",
        choices=sorted(REASONING_PARSERS),
        help="how the model marks its thoughts, which become the field `reasoning`",
    )


def parsers(args: argparse.Namespace) -> Parsers:
    """What the flags say.

    Raises:
        ValidationError: one of them needs another.
    """
    return Parsers(args.tool_call_parser, args.enable_auto_tool_choice, args.reasoning_parser)
