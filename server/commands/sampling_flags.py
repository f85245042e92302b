"""Command-line flags of sampling, for the commands that generate text in a terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.sampling_params import SamplingParams

# flag's name -> what it means; each is left out of the parameters when it was not given
_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "temperature": (float, "0 takes the most likely token"),
    "top_p": (float, "sample from the smallest set of tokens with this probability"),
    "top_k": (int, "sample from the k most likely tokens"),
    "min_p": (float, "drop tokens less likely than this share of the most likely one"),
    "presence_penalty": (float, "against tokens that were generated before"),
    "frequency_penalty": (float, "the same for each occurrence"),
    "repetition_penalty": (float, "against tokens of prompt and output, 1 is off"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """All sampling flags, in a group of their own."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="N", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end here (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, under the names that requests and SamplingParams use."""
    fields = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    if args.stop:
        fields["stop"] = args.stop
    if args.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Parameters whose outputs hold what is new since the last one.

    Without `--max-tokens` the text may fill the context.

    Raises:
        ValidationError: a value out of its range.
    """
    from jaxserve.sampling_params import RequestOutputKind, SamplingParams

    fields = {"max_tokens": None, **sampling_fields(args)}
    return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
