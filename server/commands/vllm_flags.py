"""Flags of `vllm serve` that `jaxserve serve` has not: passed over, or refused by name.

Those of its engine are in `jaxserve/config/vllm_arguments.json`, those of its server in
`vllm_flags.json`.
"""

from __future__ import annotations

import argparse
import contextlib

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.settings import settings_of
from jaxserve.config.vllm_arguments import (
    ARGUMENTS,
    RENAMED,
    add_vllm_flag,
    own_settings,
    read_arguments,
)
from server.protocol.body_errors import renamed

SERVER_ARGUMENTS = read_arguments("server.commands", "vllm_flags.json")
_ALL = ARGUMENTS | SERVER_ARGUMENTS


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each name that the parser has not."""
    for name, argument in sorted(_ALL.items()):
        if name.startswith("_"):
            continue  # vLLM's own processes say these to one another
        # one that the parser has is jaxserve's
        with contextlib.suppress(argparse.ArgumentError):
            add_vllm_flag(
                parser, name, argument, dest=f"vllm:{name}", default=None, help=argparse.SUPPRESS
            )


def check_vllm_flags(args: argparse.Namespace) -> None:
    """Pass over what asks for nothing, with one log line; set what a flag says by another setting.

    Raises:
        ValidationError: names the first flag that asks for what jaxserve does not do.
    """
    own = settings_of(EngineConfig).keys() | RENAMED.keys()
    given = {
        dest.removeprefix("vllm:"): value
        for dest, value in vars(args).items()
        if value is not None and (dest.startswith("vllm:") or dest in own)
    }
    if given.get("process_id") or given.get("node_rank"):
        given.pop("headless", None)  # another process than 0 has no HTTP
    with renamed(lambda name: "--" + name.replace("_", "-")):
        said = own_settings(given, _ALL)
    vars(args).update(said)
