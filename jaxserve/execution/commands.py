"""What an engine's process tells the device, as plain data that another process can replay."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.messages import Header


class Command(NamedTuple):
    """A program and its operand.

    Attributes:
        header: its number, the name of the program (see `Runner.run`) and the operand's words.
        operand: int32[header.size].
    """

    header: Header
    operand: np.ndarray
