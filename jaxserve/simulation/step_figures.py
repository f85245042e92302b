"""Figures of compiled steps, made once by compilers for devices that need not be there.

`python -m benchmarks.verify.step_figures` makes the table again.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "step_figures.json"


class StepFigures(NamedTuple):
    """One compiled program on one device.

    Attributes:
        device: a name of `benchmarks.verify.prove`.
        shape, layers: the model shape and how many of its layers were compiled.
        rows, prefill: decode rows, and tokens of the prefill region.
        pool_tokens: tokens of the KV pool, all of which `bytes` counts as read.
        weights: bytes of parameters.
        flops, bytes: work of the program.
        kernels_a_layer, kernels_once: launches of each layer, and of the rest.
        temporaries: bytes.
    """

    device: str
    shape: str
    layers: int
    rows: int
    prefill: int
    pool_tokens: int
    weights: int
    flops: int
    bytes: int
    kernels_a_layer: int
    kernels_once: int
    temporaries: int


@functools.cache
def table() -> tuple[StepFigures, ...]:
    """All programs of the shipped table."""
    return tuple(StepFigures(**line) for line in json.loads(FILE.read_text())["programs"])


def launches(device: str | None, layers: int, prefill: bool) -> int:
    """Kernels that a step of so many layers launches; 0 where no program is known.

    Where the table has no program with a prefill region, one without stands for it.
    """
    of_device = [one for one in table() if one.device == device]
    found = [one for one in of_device if bool(one.prefill) == prefill] or of_device
    return max((one.kernels_once + layers * one.kernels_a_layer for one in found), default=0)
