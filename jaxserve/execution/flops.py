"""What a step computes, roughly: enough to compare two steps of one model."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.plan import ComputeRows


class StepFlops(NamedTuple):
    """Counts the floating-point operations of steps.

    Attributes:
        per_token: of the matrix products, for each token that a program has room for.
        per_pair: of attention, for each token and each token that it attends to.
        max_model_len: tokens that one may attend to, at most.
    """

    per_token: float
    per_pair: float
    max_model_len: int

    def idle(self, shape: StepShape) -> float:
        """Of a program that attends to nothing."""
        return (shape.num_decode_tokens + shape.num_prefill) * self.per_token

    def most(self, shape: StepShape) -> float:
        """Of a program whose tokens all attend to the longest context."""
        tokens = shape.num_decode_tokens + shape.num_prefill
        return tokens * (self.per_token + self.per_pair * self.max_model_len)

    def of(self, shape: StepShape, rows: ComputeRows) -> float:
        """Of a program that computes these rows."""
        pairs = sum(n * (start + n) for start, n in zip(rows.starts, rows.lengths, strict=True))
        return self.idle(shape) + self.per_pair * pairs
