"""Flags of `jaxserve serve` that say how the model marks its calls and its thoughts."""

from __future__ import annotations

import argparse

from server.commands.engine_flags import reads_bundled_calls
from server.reasoning.registry import REASONING_PARSERS
from server.tools.choice import Parsers
from server.tools.registry import TOOL_PARSERS

BUNDLED_TOOLS = "hermes"  # how the bundled model writes calls


def add_parser_flags(parser: argparse.ArgumentParser) -> None:
    """`--tool-call-parser`, `--enable-auto-tool-choice` and `--reasoning-parser`."""
    add = parser.add_argument_group("tools and reasoning").add_argument
    add(
        "--tool-call-parser",
        choices=sorted(TOOL_PARSERS),
        help="how the model writes calls of tools, for tool_choice auto (default for the bundled "
        f"model: {BUNDLED_TOOLS})",
    )
    add(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        help="let the model decide whether it calls a tool; needs --tool-call-parser "
        "(default: on for the bundled model, else off)",
    )
    add(
        "--reasoning-parser",
        choices=sorted(REASONING_PARSERS),
        help="how the model marks its thoughts, which become the field `reasoning`",
    )


def parsers(args: argparse.Namespace) -> Parsers:
    """What the flags say; the bundled model has tools unless they are refused.

    Raises:
        ValidationError: a flag that needs another, or no model.
    """
    tools, is_auto = args.tool_call_parser, args.enable_auto_tool_choice
    if reads_bundled_calls(args):
        tools = tools or BUNDLED_TOOLS
        is_auto = True if is_auto is None else is_auto
    return Parsers(tools, bool(is_auto), args.reasoning_parser)
