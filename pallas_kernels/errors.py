"""The one error that the kernels raise on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np


class KernelError(ValueError):
    """An operand, option or device is outside what a kernel covers.

    Attributes:
        field: name of the offending operand or option.
        value: the shape, dtype or option that was refused.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: Any, allowed: str):
        super().__init__(f"{field}={value} is not supported: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


def check_array(name: str, array: Any, dtype: Any, *shapes: tuple[int, ...]) -> None:
    """Refuses an array that is not of a type and of one of some shapes.

    Raises:
        KernelError: says what it is, and what it may be.
    """
    if array.dtype != dtype or array.shape not in shapes:
        allowed = " or ".join(f"{np.dtype(dtype)}{list(shape)}" for shape in shapes)
        raise KernelError(name, f"{array.dtype}{array.shape}", allowed)
