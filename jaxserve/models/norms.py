"""RMS norms (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve.models.linear import PLAIN_LINEAR, LinearForm, parameter
from pallas_kernels.linear import Norm
from pallas_kernels.linear.native import native_norm
from pallas_kernels.linear.xla import rms_norm


class RMSNorm(nnx.Module):
    """RMS norm with a learned weight [size] over the last axis.

    Attributes:
        offset: as in `Norm`.
    """

    offset = False

    def __init__(self, size: int, eps: float, dtype: Any, form: LinearForm = PLAIN_LINEAR):
        self.weight = parameter((size,), dtype, (None,), fill=0.0 if self.offset else 1.0)
        self.eps = eps
        self.form = form

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in x's dtype."""
        return normed(x, self.as_operand(), self.form)

    def as_operand(self) -> Norm:
        """What the kernels take."""
        return Norm(self.weight[...], self.eps, self.offset)


class OffsetRMSNorm(RMSNorm):
    """RMS norm whose factor is 1 + weight (Gemma Team 2024), in float32 until it is rounded once.

    Native linear layers round before they multiply with the weight, so it stands beside them.
    """

    offset = True


def normed(x: jax.Array, norm: Norm, form: LinearForm) -> jax.Array:
    """The norm of x [..., size] over its last axis, each row in one order where `form` has one."""
    return native_norm(x, norm) if form.row_invariant else rms_norm(x, norm)
