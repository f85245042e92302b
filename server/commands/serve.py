"""`jaxserve serve MODEL`: the HTTP server."""

from __future__ import annotations

import argparse
import math
import socket
import sys
from logging.config import dictConfig
from typing import Any, NamedTuple

from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.config.flags import integer, number
from jaxserve.config.settings import Integer
from jaxserve.errors import ValidationError
from jaxserve.isolation.models import ModelPart, parts_of
from jaxserve.isolation.places import places
from jaxserve.liveness.silence import AUTO, HUNG_FACTOR, HUNG_S
from jaxserve.processes.launch import EarlyProcess
from server.commands.config_file import SHIPPED
from server.commands.edge_flags import add_edge_flags, api_keys, edge_limits
from server.commands.engine_flags import (
    SERVER_QUEUE,
    add_engine_flags,
    add_model_argument,
    engine_config,
)
from server.commands.log_flags import add_log_flags, unlogged_paths
from server.commands.parser_flags import add_parser_flags, parsers
from server.commands.process_place import OF_LAUNCHER, find_processes
from server.commands.socket_flags import add_socket_flags, check_socket_flags
from server.commands.surface_flags import add_surface_flags, options
from server.commands.vllm_flags import add_vllm_flags, check_vllm_flags
from server.protocol.body_errors import renamed

MOST_FRONTS = 64  # each takes 90 MB


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP (OpenAI's API)")
    add_model_argument(parser, "; given several times, so many models behind one address")
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--config",
        metavar="FILE",
        help="YAML or JSON file of flags, or one of those that come with jaxserve: "
        f"{', '.join(SHIPPED)}; flags on the command line win",
    )
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
    add(
        "--page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a page at / to chat with the model and to watch the engine (default: on)",
    )
    add_log_flags(parser)
    add_socket_flags(parser)
    add_parser_flags(parser)
    add_surface_flags(parser)
    _add_process_flags(parser)
    add_edge_flags(parser)
    add_engine_flags(parser)
    add_vllm_flags(parser)
    parser.set_defaults(func=run, loads_model=True, others=(), **SERVER_QUEUE, **OF_LAUNCHER)


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Where the engine runs, and how long things may take."""
    add = parser.add_argument_group("process").add_argument
    add(
        "--isolate-engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the engine in a process of its own, which is started again when it dies "
        "(default: on)",
    )
    add(
        "--spare-process",
        action=argparse.BooleanOptionalAction,
        default=Isolation().spare,
        help="keep a process that has imported what an engine needs, about 200 MB, so that the "
        "next engine is there sooner (default: off)",
    )
    add(
        "--step-timeout",
        type=lambda text: text if text == AUTO else number(text),
        default=AUTO,
        metavar="SECONDS",
        help="an engine with work that says nothing for so long is killed and started again; none: "
        f"never; auto: {HUNG_S:g} s or {HUNG_FACTOR:g} times what its step may take, longer while "
        "it compiles (default: %(default)s)",
    )
    add(
        "--load-timeout",
        type=number,
        default=Isolation().load_timeout,
        metavar="SECONDS",
        help="end where the engine has not loaded for the first time after so long, fetching and "
        "compiling included; none: it may take as long as it takes (default: none)",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM running requests get so long to finish (default: %(default)g)",
    )
    add(
        "--api-server-count",
        "-asc",
        type=integer,
        default=1,
        metavar="N",
        help="processes that answer HTTP on the one port, before all engines (default: 1, which is "
        "the server's own)",
    )
    add(
        "--num-workers",
        type=integer,
        metavar="N",
        help="threads that tokenise prompts and render conversations beside the event loop, at "
        "most the cores (default: Python's, 4 more than the cores)",
    )


class Asked(NamedTuple):
    """What the flags of `serve` ask for, checked.

    Attributes:
        config: the engine's configuration.
        told: what `create_app` is told beside the engine.
        isolation: of the engine's process.
    """

    config: EngineConfig
    told: dict[str, Any]
    isolation: Isolation


def asked_for(args: argparse.Namespace) -> Asked:
    """Check the flags of the engine and of its application.

    Raises:
        ValidationError: a value that is not allowed.
    """
    check_vllm_flags(args)
    config = engine_config(args)
    if ":" in config.scheduling_policy:  # a class, which every process imports
        from jaxserve.scheduling.policies import make_policy

        make_policy(config)
    told: dict[str, Any] = {
        "parsers": parsers(args),
        "limits": edge_limits(args),
        "options": options(args),
        "api_keys": api_keys(args),
    }
    with renamed(lambda name: "--" + name.replace("_", "-")):
        isolation = Isolation(
            step_timeout=args.step_timeout,
            load_timeout=args.load_timeout,
            spare=args.spare_process,
            log_format=args.log_format,
        )
    if not told["api_keys"] and told["options"].guards_metrics:
        allowed = "only with --api-key or --api-keys-file"
        raise ValidationError("--metrics-need-key", True, allowed)
    return Asked(config, told, isolation)


def _check_fronts(args: argparse.Namespace) -> None:
    """Raises ValidationError for a number of fronts that cannot be."""
    count, allowed = args.api_server_count, Integer(1, MOST_FRONTS)
    allowed.checked("--api-server-count", count)
    if count > 1 and not args.isolate_engine:
        where = "1 with --no-isolate-engine, where the engine is in the process that answers"
        raise ValidationError("--api-server-count", count, where)
    if count > 1 and not hasattr(socket, "AF_UNIX"):
        where = "1 here: the system lets no process hand its socket to others"
        raise ValidationError("--api-server-count", count, where)


def _parts_of_models(args: argparse.Namespace) -> list[ModelPart]:
    """What each of several models has of the machine.

    Raises:
        ValidationError: a flag that a server of one model alone can have, or shares that do not
            fit.
    """
    count = f"{1 + len(args.others)} models"
    for flag, value, allowed in (
        ("--isolate-engine", args.isolate_engine, True),
        ("--record-trace", args.record_trace, None),
    ):
        if value != allowed:
            raise ValidationError(flag, value, f"{allowed} in a server of {count}")
    every = [args, *args.others]
    for one in args.others:
        check_vllm_flags(one)
    return parts_of([*map(engine_config, every)], [one.stated_share for one in every])


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    _check_fronts(args)
    find_processes(args)
    config, told, isolation = asked_for(args)
    place, others = places(config)[0], []
    if args.others:
        first, *more = _parts_of_models(args)
        names = ", ".join(one.config.model_names[0] for one in (first, *more))
        first_name = first.config.model_names[0]
        text = f"jaxserve: models {names}; a request that names none is {first_name}'s"
        print(text, file=sys.stderr)
        config, place = first.config, first.place
        others = [(part, parsers(one)) for part, one in zip(more, args.others)]
    if args.num_workers is not None:
        Integer(1).checked("--num-workers", args.num_workers)
    if not 0 <= args.shutdown_timeout < math.inf:
        raise ValidationError("--shutdown-timeout", args.shutdown_timeout, "seconds, 0 or more")
    if config.num_processes > 1 and not args.isolate_engine:
        where = "1 with --no-isolate-engine: one that is lost would leave a step without end"
        raise ValidationError("--num-processes", config.num_processes, where)
    unlogged = unlogged_paths(args)
    check_socket_flags(args)
    if not 0 <= args.port <= 65535:
        raise ValidationError("--port", args.port, "0 to 65535")
    # most of a start are imports, which both processes do at once
    early = None
    if args.isolate_engine:
        early = EarlyProcess(isolation.module, place)
    try:
        if config.process_id:
            from jaxserve.isolation.following import follow
            from server.logs import log_config

            # where there is no HTTP server that does it
            dictConfig(log_config(args.uvicorn_log_level, args.log_format, unlogged))
            return follow(config, isolation, early)
        from server.server_process import serve

        own = isolation if args.isolate_engine else None
        return serve(config, args, told, own, early, place, others)
    finally:
        if early is not None:
            early.close()
