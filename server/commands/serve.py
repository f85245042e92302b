"""`jaxserve serve MODEL`: the HTTP server."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxserve.errors import ValidationError
from server.commands.engine_flags import add_engine_flags, add_model_argument, engine_config
from server.process import ended_by_ctrl_c


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP (OpenAI's API)")
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--config", metavar="FILE", help="YAML file of flags; those on the command line win")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; the default lets in this machine only (vLLM's lets in "
        "everybody), 0.0.0.0 opens all interfaces",
    )
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use; the first one is answered with (default: MODEL)",
    )
    add("--api-key", action="append", metavar="KEY", help="require this key (repeatable)")
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web origins that browsers may call from (default: none)",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=32 * 2**20,
        metavar="N",
        help="largest request body (default: 32 MiB)",
    )
    add(
        "--uvicorn-log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="log level of the HTTP server (default: info)",
    )
    add(
        "--disable-uvicorn-access-log",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no line a request",
    )
    add_engine_flags(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    try:
        config = engine_config(args)
        if not 0 <= args.port <= 65535:
            raise ValidationError("--port", args.port, "0 to 65535")
    except ValidationError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    with ended_by_ctrl_c():
        from server.supervisor import serve

        return serve(config, args)
