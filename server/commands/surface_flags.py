"""Flags of `jaxserve serve` that say what answers tell and which routes there are."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from jaxserve.config.flags import json_object
from jaxserve.config.profiler_config import ProfilerConfig
from server.options import NO_OPTIONS, Options
from server.protocol.body_errors import renamed

# flag -> field of `Options`, and what it does
_SWITCHES = {
    "--enable-prompt-tokens-details": (
        "tells_cached_tokens",
        "tell in usage how many prompt tokens the prefix cache had, which tells one client what "
        "others have asked",
    ),
    "--enable-force-include-usage": ("includes_usage", "tell usage in every chunk of a stream"),
    "--return-tokens-as-token-ids": (
        "shows_token_ids",
        "name tokens in logprobs token_id:N, unless a request says otherwise",
    ),
    "--enable-request-id-headers": ("sends_request_ids", "answer with an X-Request-Id header"),
    "--enable-server-load-tracking": (
        "tracks_load",
        "count the requests that are being answered: GET /load",
    ),
    "--enable-tokenizer-info-endpoint": (
        "tells_tokenizer",
        "tell the tokenizer's configuration and chat template: GET /tokenizer_info",
    ),
    "--enable-per-request-metrics": (
        "tells_timings",
        "say in responses to one prompt with one choice how long they took",
    ),
    "--enable-control-routes": (
        "has_control_routes",
        "let clients empty caches and have the engine sleep: POST /reset_prefix_cache, "
        "/reset_mm_cache, /sleep, /wake_up",
    ),
    "--trust-request-chat-template": (
        "trusts_templates",
        "render a chat_template that a request brings, in the sandbox of the server's own",
    ),
    "--metrics-need-key": (
        "guards_metrics",
        "ask for a key at /metrics and /version too, as at other routes",
    ),
}


def add_surface_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of `Options`."""
    add = parser.add_argument_group("answers and routes").add_argument
    for flag, (name, text) in _SWITCHES.items():
        default = getattr(NO_OPTIONS, name)
        shown = "on" if default else "off"
        add(
            flag,
            dest=name,
            action=argparse.BooleanOptionalAction,
            default=default,
            help=f"{text} (default: {shown})",
        )
    add(
        "--default-chat-template-kwargs",
        dest="template_variables",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, unless a request says otherwise",
    )
    add(
        "--root-path",
        default="",
        metavar="PATH",
        help="what a proxy puts before every path, such as /api (default: nothing)",
    )
    add(
        "--profiler-config",
        dest="profiler_config",
        type=json_object,
        metavar="JSON",
        help='let clients record the work of the engine, as {"profiler": "torch", '
        '"torch_profiler_dir": "FOLDER"}: POST /start_profile, /stop_profile',
    )


def options(args: argparse.Namespace) -> Options:
    """What the flags say.

    Raises:
        ValidationError: names the flag whose value is not allowed.
    """
    given: dict[str, Any] = {item.name: getattr(args, item.name, None) for item in fields(Options)}
    with renamed(lambda name: "--profiler-config" + name.removeprefix("profiler_config")):
        asked = ProfilerConfig.of(args.profiler_config)
    given["profile_folder"] = "" if args.profiler_config is None else asked.torch_profiler_dir
    return Options(**given)
