"""Ends a benchmark with one line where a package beside the base install is absent."""

from __future__ import annotations

import argparse
import importlib.util


def require(parser: argparse.ArgumentParser, extra: str, *modules: str) -> None:
    """End the program with status 1 where modules are absent.

    Args:
        parser: the program's parser, for its name and exit.
        extra: the extra that installs them.
        modules: names of modules.
    """
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        how = f"pip install '.[{extra}]' in a clone of jaxserve"
        parser.exit(1, f"{parser.prog}: error: {', '.join(absent)} not installed: {how}\n")
