"""RMS norms (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.linear import PLAIN_LINEAR, LinearForm, parameter
from pallas_kernels.linear import Norm
from pallas_kernels.linear.native import native_norm
from pallas_kernels.linear.xla import rms_norm


class RMSNorm(nnx.Module):
    """RMS norm with a learned weight [size] over the last axis."""

    def __init__(self, size: int, eps: float, dtype: Any, form: LinearForm = PLAIN_LINEAR):
        self.weight = parameter((size,), dtype, (None,), fill=1.0)
        self.eps = eps
        self.form = form

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in x's dtype."""
        return normed(x, self.as_operand(), self.form)

    def as_operand(self) -> Norm:
        """What `pallas_kernels.linear` takes."""
        return Norm(self.weight[...], self.eps)


class OffsetRMSNorm(nnx.Module):
    """RMS norm whose factor is 1 + weight (Gemma Team 2024), in float32 until it is rounded once.

    The kernels' norms round before they multiply, so this one stands beside the linear layers.
    """

    def __init__(self, size: int, eps: float, dtype: Any, form: LinearForm = PLAIN_LINEAR):
        self.weight = parameter((size,), dtype, (None,), fill=0.0)
        self.eps = eps
        self.form = form

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in x's dtype."""
        factor = 1.0 + self.weight[...].astype(jnp.float32)
        wide = x.astype(jnp.float32)
        return normed(wide, Norm(factor, self.eps), self.form).astype(x.dtype)


def normed(x: jax.Array, norm: Norm, form: LinearForm) -> jax.Array:
    """The norm of x [..., size] over its last axis, each row in one order where `form` has one."""
    return native_norm(x, norm) if form.row_invariant else rms_norm(x, norm)


class HeadNorms(nnx.Module):
    """Norms over head_dim of the queries and of the keys of a fused projection."""

    def __init__(self, q_norm: nnx.Module, k_norm: nnx.Module):
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(self, qkv: jax.Array) -> jax.Array:
        """[T, KVH, G + 2, D] -> the same, with values as they were."""
        q, k, v = jnp.split(qkv, (qkv.shape[2] - 2, qkv.shape[2] - 1), axis=2)
        return jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2)
