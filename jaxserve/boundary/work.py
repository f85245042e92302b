"""Operations and bytes of steps, counted from the shape of a model."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Estimates of the least that some steps need by arithmetic; no hardware counters.

    Attributes:
        flops: multiplications and additions of linear layers and attention.
        read_bytes: weights, once a step, and the keys and values that rows see.
        write_bytes: keys and values of new tokens.
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        return Work(*(a + b for a, b in zip(self, other)))
