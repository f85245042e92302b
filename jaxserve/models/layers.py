"""Building blocks of the Llama family: projection, RMS norm, attention and MLP as NNX modules.

Weights are stored [out, in] and contracted on their last axis: the only form in which XLA:CPU
reaches its fast bfloat16 matmul, and as good as any on GPU and TPU. Every parameter names its
logical axes, which `jaxserve.parallel.ShardingRules` maps to mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import apply_rope

Cache = TypeVar("Cache")
# attend(cache, layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> (out [T, H, D], cache)
Attend = Callable[[Cache, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Cache]]

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def parameter(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    """A zero parameter whose axes have logical names; loading replaces the value."""
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Contracts the last axes of x [T, in] and weight [..., out, in] into float32 [T, ..., out].

    float32 weights are multiplied at full precision on every backend.
    """
    # XLA:CPU is 10 times slower when the weight has more than two axes; merging them is free.
    matrix = weight.reshape(-1, weight.shape[-1])
    product = jax.lax.dot_general(
        x,
        matrix,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.reshape(x.shape[0], *weight.shape[:-1])


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Zhang and Sennrich 2019: x [..., E] over its root mean square, in float32, times weight [E].

    The normalised value is rounded to x's dtype before the weight is applied.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


class Projection(nnx.Module):
    """Linear map from [T, in] to [T, *out_shape], with weight [*out_shape, in]."""

    def __init__(
        self,
        in_size: int,
        out_shape: tuple[int, ...],
        *,
        axes: tuple[str | None, ...],
        bias: bool,
        dtype: Any,
    ):
        """`axes` are the logical names of the weight's axes, `in` last."""
        self.weight = parameter((*out_shape, in_size), dtype, axes)
        self.bias = parameter(out_shape, dtype, axes[:-1]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [T, *out_shape] in x's dtype; the bias is added before rounding."""
        product = project(x, self.weight[...])
        if self.bias is not None:
            product = product + self.bias[...].astype(jnp.float32)
        return product.astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS norm with a learned weight [size] over the last axis."""

    def __init__(self, size: int, eps: float, dtype: Any):
        self.weight = parameter((size,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in x's dtype."""
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Fused qkv projection, optional q/k norm, rope, the caller's attention, output projection.

    The fused weight is [KVH, G + 2, D, E]: for each KV head its G query heads, then its key, then
    its value, so that a contiguous part of the first axis is a complete set of heads.
    """

    def __init__(self, config: ModelConfig, dtype: Any):
        self.groups = config.num_heads // config.num_kv_heads
        self.qkv = Projection(
            config.hidden_size,
            (config.num_kv_heads, self.groups + 2, config.head_dim),
            axes=("kv_heads", None, None, "hidden"),
            bias=config.qkv_bias,
            dtype=dtype,
        )
        self.output = Projection(
            config.num_heads * config.head_dim,
            (config.hidden_size,),
            axes=("hidden", "heads"),
            bias=config.output_bias,
            dtype=dtype,
        )

        def head_norm() -> RMSNorm | None:
            return RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

        self.q_norm, self.k_norm = head_norm(), head_norm()

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer: int,
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[jax.Array, Cache]:
        """x [T, E], rope = (cos, sin) float32 [T, D/2] -> (out [T, E], cache)."""
        qkv = self.qkv(x)  # [T, KVH, G+2, D]
        tokens, kv_heads, _, head_dim = qkv.shape
        q = qkv[:, :, : self.groups].reshape(tokens, kv_heads * self.groups, head_dim)
        k, v = qkv[:, :, self.groups], qkv[:, :, self.groups + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(cache, layer, apply_rope(q, *rope), apply_rope(k, *rope), v)
        return self.output(out.reshape(tokens, -1)), cache


class MLP(nnx.Module):
    """Gated MLP. The fused weight is [I, 2, E]: gate and up row of each inner dimension."""

    def __init__(self, config: ModelConfig, dtype: Any):
        self.activation = config.hidden_act
        self.gate_up = Projection(
            config.hidden_size,
            (config.intermediate_size, 2),
            axes=("intermediate", None, "hidden"),
            bias=config.mlp_bias,
            dtype=dtype,
        )
        self.down = Projection(
            config.intermediate_size,
            (config.hidden_size,),
            axes=("hidden", "intermediate"),
            bias=config.mlp_bias,
            dtype=dtype,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, E] -> [T, E]."""
        gate_up = self.gate_up(x)  # [T, I, 2]
        gate = _ACTIVATIONS[self.activation](gate_up[..., 0].astype(jnp.float32))
        return self.down(gate.astype(x.dtype) * gate_up[..., 1])
