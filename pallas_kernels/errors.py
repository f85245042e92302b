"""The one error that the kernels raise on purpose."""

from __future__ import annotations

from typing import Any


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
