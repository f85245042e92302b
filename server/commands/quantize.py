"""`jaxserve quantize MODEL OUT`: a quantised checkpoint that others read too."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.errors import ValidationError
from server.commands.output_folder import add_folders

SCHEMES = ("int8", "int8-dynamic", "int8-static", "int4-awq", "int4-gptq", "int4-dynamic", "fp8")


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "quantize", help="make a quantised checkpoint (compressed-tensors, AWQ, GPTQ)"
    )
    add_folders(parser)
    parser.add_argument(
        "--scheme",
        choices=SCHEMES,
        help="of attention and MLP of every layer (default: int8, without --policy)",
    )
    parser.add_argument(
        "--policy", metavar="FILE", help="JSON: what becomes of attention, mlp and single layers"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="UTF-8 text that int8-static, int4-awq and int4-gptq look at; - reads standard input",
    )
    parser.add_argument(
        "--calibration-method",
        choices=("minmax", "percentile", "mse"),
        default="minmax",
        help="how --scheme int8-static chooses scales of activations (default: minmax)",
    )
    parser.add_argument(
        "--calibration-samples", type=int, default=64, metavar="N", help="windows (default: 64)"
    )
    parser.add_argument(
        "--calibration-window", type=int, default=512, metavar="TOKENS", help="(default: 512)"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=128,
        metavar="INPUTS",
        help="inputs that share a scale, of the schemes of 4 bits (default: 128)",
    )
    parser.set_defaults(func=run, loads_model=True)


def run(args: argparse.Namespace) -> int:
    """Quantise; returns the exit code."""
    from checkpoints.quantize.layer_schemes import read_policy, uniform_policy
    from server.commands.eval import read_text

    if args.policy is not None and args.scheme is not None:
        raise ValidationError("--scheme", args.scheme, "not together with --policy")
    if args.policy is not None:
        policy = read_policy(args.policy)
    else:
        policy = uniform_policy(args.scheme or "int8", args.calibration_method)
    from jaxserve.jobs.quantize import Calibration, quantize

    text = None
    if args.calibration is not None:
        text = Calibration(
            read_text(args.calibration), args.calibration_samples, args.calibration_window
        )
    out = quantize(args.model_path, args.out, policy, calibration=text, group=args.group_size)
    print(f"wrote {out}")
    return 0
