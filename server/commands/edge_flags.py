"""Flags of who a server's clients are, and what it takes from them: each field of `Limits`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from jaxserve.config.engine_config import WITHOUT_PRIORITIES
from jaxserve.config.flags import integer
from jaxserve.errors import ValidationError
from server.client_limits import Limits
from server.keys import ApiKey, read_keys

KEY_VARIABLE = "JAXSERVE_API_KEY"


def add_edge_flags(parser: argparse.ArgumentParser) -> None:
    """Who may ask, and for how much."""
    add = parser.add_argument_group("clients").add_argument
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"require this key (repeatable); the environment's {KEY_VARIABLE} is one more, which "
        "others on this machine cannot see in the list of processes",
    )
    add(
        "--api-keys-file",
        metavar="FILE",
        help="YAML list of keys with their names, quotas and priorities (docs/security.md)",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names that clients may call the server by, * for any (default: localhost, "
        "127.0.0.1 and [::1] where --host lets in this machine only, else any)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web origins that browsers may call from (default: none)",
    )
    _number(add, "max_body_bytes", "largest request body (default: 4M)")
    _number(add, "max_pending_body_bytes", "of all bodies being read at a time (default: 64M)")
    _number(add, "max_choices", "most completions of a request, prompts x n")
    _number(
        add,
        "max_response_entries",
        "most tokens and logprobs of prompts that one response may show (default: 128k)",
    )
    _number(
        add,
        "max_unread_answer_bytes",
        "of all answers that clients have not read; beyond it the slowest of the client with the "
        "most is cut off (default: 256M)",
    )
    _number(add, "max_connections", "open at a time; others may ask for /health alone")
    _seconds(add, "idle_timeout", "a connection may stay open without a request")
    _seconds(add, "write_timeout", "a client may read nothing of its answer")
    _seconds(add, "keep_alive_interval", "a stream has no news before it sends a comment")
    _number(add, "max_stored_responses", "responses kept for previous_response_id, 0 for none")
    _number(add, "max_stored_bytes", "of responses that are kept (default: 64M)")
    add(
        "--share-prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=Limits.share_prefix_cache,
        help="requests find in the prefix cache what was computed for those of other API keys, "
        "which their speed then tells of (default: off, each key has its own)",
    )
    add(
        "--allow-control-tokens",
        action=argparse.BooleanOptionalAction,
        default=Limits.allow_control_tokens,
        help="control tokens in messages' text are tokens, with which a message can pretend to be "
        "another one (default: off, they are text)",
    )


def edge_limits(args: argparse.Namespace) -> Limits:
    """The limits that the flags describe.

    Raises:
        ValidationError: one is out of its range.
    """
    return Limits(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Limits)})


def api_keys(args: argparse.Namespace) -> list[ApiKey]:
    """The keys of flags and file; none: everybody may ask.

    Raises:
        ValidationError: one is empty or comes twice, the file is not as it should be, or a key has
            a priority that the scheduling policy does not heed.
    """
    if any(not key.strip() for key in args.api_key or ()):
        raise ValidationError("--api-key", "", "a key that is not empty")
    keys = [ApiKey(key, f"key {number}") for number, key in enumerate(args.api_key or (), start=1)]
    of_environment = os.environ.get(KEY_VARIABLE)
    if of_environment is not None:
        if not of_environment.strip():
            raise ValidationError(KEY_VARIABLE, "", "a key that is not empty, or unset")
        keys.append(ApiKey(of_environment, KEY_VARIABLE))
    if args.api_keys_file is not None:
        keys += read_keys(args.api_keys_file)
    for what in ("key", "name"):
        if len({getattr(one, what) for one in keys}) < len(keys):
            raise ValidationError("--api-key", "...", f"keys of which no {what} comes twice")
    if args.scheduling_policy in WITHOUT_PRIORITIES:
        for one in keys:
            if one.priority != 0:
                allowed = "0 unless --scheduling-policy is priority"
                raise ValidationError(
                    f"--api-keys-file: priority of {one.name}", one.priority, allowed
                )
    return keys


def allowed_hosts(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of the server in a request's Host header; none: any."""
    if args.allowed_hosts is not None:
        return () if "*" in args.allowed_hosts else tuple(args.allowed_hosts)
    if args.uds is not None:  # whoever may open the socket; no browser can
        return ()
    loopback = ("localhost", "127.0.0.1", "::1")
    return loopback if args.host in loopback or args.host.startswith("127.") else ()


def _number(add: Any, name: str, text: str) -> None:
    _flag(add, name, "N", text, type=integer)


def _seconds(add: Any, name: str, text: str) -> None:
    _flag(add, name, "SECONDS", f"seconds that {text}", type=float)


def _flag(add: Any, name: str, metavar: str, text: str, **options: Any) -> None:
    default = getattr(Limits, name)
    told = text if "default" in text else f"{text} (default: {default:g})"
    flag = "--" + name.replace("_", "-")
    add(flag, default=default, metavar=metavar, help=told, **options)
