"""`--num-processes`, `--process-id` and `--coordinator` where a launcher knows them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from jaxserve.processes.launchers import ProcessPlace, launched
from jaxserve.processes.tpu_metadata import slice_variables

# flags of `serve` whose default is what a launcher says, and else that of the setting
OF_LAUNCHER = {"num_processes": None, "process_id": None}


def find_processes(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Set the flags that were not given to what the launcher of this process says.

    A launcher that has started several processes need not mean one engine. It does where so many
    are asked for, where JAX or the TPU slice leaves no choice, or where an engine of several
    devices divides among processes on several hosts.

    Args:
        args: the parsed flags of `jaxserve serve`.
        environ: of this process.
    """
    stated = args.num_processes
    if stated == 1 or getattr(args, "vllm:nnodes", None) is not None:
        return
    place = launched(environ) or launched({**environ, **slice_variables(environ)})
    if place is None or stated not in (None, place.num_processes):
        return
    if stated is None and not _is_meant(args, place):
        return
    said = {"num_processes": place.num_processes, "process_id": place.process_id}
    for name, value in (said | {"coordinator": place.coordinator}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    # by hand: the log is set up later, and an error of these flags may come first
    print(
        f"jaxserve: process {args.process_id} of {args.num_processes} of one engine, process 0 at "
        f"{args.coordinator}: so says {place.launcher}; --num-processes 1 makes an engine of this "
        "process alone",
        file=sys.stderr,
        flush=True,
    )


def _is_meant(args: argparse.Namespace, place: ProcessPlace) -> bool:
    """Whether the launcher's processes are one engine, where no flag says so."""
    if args.others or args.data_parallel_size != 1:
        return False
    devices = args.tensor_parallel_size
    divides = devices > 1 and devices % place.num_processes == 0
    divides = divides and args.pipeline_parallel_size == 1  # stages are of one process
    return place.is_certain or (place.spans_hosts and divides)
