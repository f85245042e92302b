"""What commands that write a model folder have in common."""

from __future__ import annotations

import argparse


def add_folders(parser: argparse.ArgumentParser) -> None:
    """The model that is read and the folder that is written."""
    parser.add_argument("model_path", metavar="MODEL", help="folder, or the id of a hub's model")
    parser.add_argument("out", metavar="OUT", help="folder that is written, whole or not at all")
