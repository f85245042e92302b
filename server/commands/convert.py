"""`jaxserve convert MODEL OUT`: a model folder as a store of Orbax, and a store as safetensors."""

from __future__ import annotations

import argparse
from typing import Any

from server.commands.output_folder import add_folders

FORMATS = ("orbax", "safetensors")


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "convert", help="turn safetensors into a store that loads on any mesh, or back"
    )
    add_folders(parser)
    parser.add_argument(
        "--to", choices=FORMATS, help="(default: orbax, or safetensors where MODEL is a store)"
    )
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="(default: the model's)")
    parser.add_argument(
        "--quantization",
        metavar="NAME",
        help="rounds the weights that are written (default: as they are)",
    )
    parser.add_argument(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices that the parts of a store are cut for; it loads on any number, and a CPU "
        "cuts for any number (default: 1)",
    )
    parser.set_defaults(func=run, loads_model=True)


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    from jaxserve.jobs.convert import convert

    if args.tensor_parallel_size > 1:
        import jax

        # so many devices are made of a CPU; there are as many GPUs as there are
        jax.config.update("jax_num_cpu_devices", args.tensor_parallel_size)
    out = convert(
        args.model_path,
        args.out,
        to=args.to,
        dtype=args.dtype,
        quantization=args.quantization,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    print(f"wrote {out}")
    return 0
