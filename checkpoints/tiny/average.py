"""Average the weights of folders: `python -m checkpoints.tiny.average --output DIR FOLDER...`.

The mean of weights at the ends of several falls of the learning rate is nearer to the middle of
what they have in common than each of them (Izmailov et al. 2018, stochastic weight averaging).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from checkpoints.tiny.export import load_model, save_model


def average(folders: list[Path], output: Path) -> None:
    """Write a model whose parameters are the means of those in ``folders``, float32."""
    model, *others = (load_model(folder) for folder in folders)
    with torch.no_grad():
        for parameters in zip(*(one.parameters() for one in (model, *others))):
            parameters[0].copy_(torch.stack(parameters).mean(0))
    save_model(model, output)


def main() -> None:
    """Average and export."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    average(arguments.folders, arguments.output)


if __name__ == "__main__":
    main()
