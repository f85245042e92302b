"""What commands that write a model folder have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import JaxServeError


def add_folders(parser: argparse.ArgumentParser) -> None:
    """The model that is read and the folder that is written."""
    parser.add_argument("model_path", metavar="MODEL", help="folder, or the id of a hub's model")
    parser.add_argument("out", metavar="OUT", help="folder that is written, whole or not at all")


def written(write: Callable[[], Path]) -> int:
    """Run what writes a folder, and say which, or why not; returns the exit code."""
    from checkpoints.errors import CheckpointError

    try:
        out = write()
    except (JaxServeError, CheckpointError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out}")
    return 0
