"""Flags of a server's clients: their keys, and each field of `Limits`."""

from __future__ import annotations

import argparse
import os

from jaxserve.config.engine_config import WITHOUT_PRIORITIES
from jaxserve.config.flags import add_flag
from jaxserve.config.settings import settings_of
from jaxserve.errors import ValidationError
from server.client_limits import Limits
from server.keys import ApiKey, read_keys

KEY_VARIABLE = "JAXSERVE_API_KEY"


def add_edge_flags(parser: argparse.ArgumentParser) -> None:
    """Who may ask, and for how much."""
    group = parser.add_argument_group("clients")
    add = group.add_argument
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
    for name in settings_of(Limits):
        add_flag(group, Limits, name)


def edge_limits(args: argparse.Namespace) -> Limits:
    """The limits that the flags describe.

    Raises:
        ValidationError: one is out of its range.
    """
    return Limits(**{name: getattr(args, name) for name in settings_of(Limits)})


def api_keys(args: argparse.Namespace) -> list[ApiKey]:
    """The keys of flags and file; none: requests need no key.

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
    if args.uds is not None:  # processes that may open the socket; no browser can
        return ()
    loopback = ("localhost", "127.0.0.1", "::1")
    return loopback if args.host in loopback or args.host.startswith("127.") else ()
