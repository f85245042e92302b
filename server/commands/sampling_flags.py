"""Command-line flags of sampling, for the commands that generate text in a terminal."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.config.flags import add_flag
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams

# parameters that have a flag; each is left out of the parameters when it was not given
_FLAGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "ignore_eos",
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """All sampling flags, in a group of their own."""
    group = parser.add_argument_group("sampling")
    for name in _FLAGS:
        add_flag(group, SamplingParams, name, unset=True)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, under the names that requests and SamplingParams use."""
    return {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Parameters whose outputs hold what is new since the last one.

    Without `--max-tokens` the text may fill the context.

    Raises:
        ValidationError: a value out of its range.
    """
    fields = {"max_tokens": None, **sampling_fields(args)}
    return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
