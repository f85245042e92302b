"""What a runner runs on the device, so that another one can run the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Command(NamedTuple):
    """One call of a compiled program, or one of `runner.HOST_COMMANDS`.

    Attributes:
        number: 0, 1, 2, ... in the order in which they run.
        program: its name.
        operand: int32, beside what is on the device.
    """

    number: int
    program: str
    operand: np.ndarray
