"""Building blocks of the Llama family: projection, RMS norm, attention and MLP as NNX modules.

Weights are stored [out, in] and contracted on their last axis: the only form in which XLA:CPU
reaches its fast bfloat16 matmul, and as good as any on GPU and TPU. Every parameter names its
logical axes, which `jaxserve.parallel.ShardingRules` maps to mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from pallas_kernels.linear import Norm, linear, stored_dtype
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.rotary import split_rotate

Cache = TypeVar("Cache")
# attend(cache, layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> (out [T, H, D], cache)
Attend = Callable[[Cache, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Cache]]

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


# activations that the linear layer itself applies
GATED_IN_PLACE = ("silu", "swish")


def parameter(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    """A zero parameter whose axes have logical names; loading replaces the value."""
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


@dataclass(frozen=True, slots=True)
class LinearForm:
    """How the weights of linear layers are stored and multiplied.

    Attributes:
        backend: of `pallas_kernels.linear`.
        quantization: None keeps the model's type; "int8" rounds each output's weights, and at
            every step each token's activations, to 8-bit integers.
    """

    backend: str = "xla"
    quantization: str | None = None


PLAIN = LinearForm()


class TokenRows(NamedTuple):
    """What every layer knows of the T rows of a batch.

    Attributes:
        cos, sin: float32[T, D / 2] of each token's rotary angles.
        live: int32[R, 2] ranges of the rows that hold tokens; None: all.
    """

    cos: jax.Array
    sin: jax.Array
    live: jax.Array | None


class RMSNorm(nnx.Module):
    """RMS norm with a learned weight [size] over the last axis."""

    def __init__(self, size: int, eps: float, dtype: Any):
        self.weight = parameter((size,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in x's dtype."""
        return rms_norm(x, self.as_operand())

    def as_operand(self) -> Norm:
        """What `pallas_kernels.linear` takes."""
        return Norm(self.weight[...], self.eps)


class Projection(nnx.Module):
    """Linear map from [T, in] to [T, *out_shape], with weight [*out_shape, in].

    The weight has 8 bits and a float32 scale an output when the form is quantised.
    """

    def __init__(
        self,
        in_size: int,
        out_shape: tuple[int, ...],
        *,
        axes: tuple[str | None, ...],
        bias: bool,
        dtype: Any,
        form: LinearForm,
    ):
        """`axes` are the logical names of the weight's axes, `in` last."""
        quantized = form.quantization == "int8"
        self.backend = form.backend
        stored = stored_dtype(form.backend) if quantized else dtype
        self.weight = parameter((*out_shape, in_size), stored, axes)
        self.scale = parameter(out_shape, jnp.float32, axes[:-1]) if quantized else None
        self.bias = parameter(out_shape, dtype, axes[:-1]) if bias else None

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
        gated: bool = False,
        out_dtype: Any = None,
        live: jax.Array | None = None,
    ) -> jax.Array:
        """[T, in] -> [T, *out_shape] in x's dtype, or in `out_dtype`.

        Args:
            x: input rows.
            norm: applied to x first.
            residual: [T, *out_shape], added to the result.
            gated: outputs come in pairs (gate, up); the result is silu(gate) * up, half as wide.
            live: int32[R, 2] ranges of the rows that count; None: all.
        """
        weight = self.weight[...]
        out = linear(
            x,
            # XLA:CPU is 10 times slower when the weight has more than two axes; merging is free
            weight.reshape(-1, weight.shape[-1]),
            scale=None if self.scale is None else self.scale[...].reshape(-1),
            bias=None if self.bias is None else self.bias[...].reshape(-1),
            norm=None if norm is None else norm.as_operand(),
            residual=residual,
            gated=gated,
            out_dtype=out_dtype,
            live=live,
            backend=self.backend,
        )
        return out if gated else out.reshape(x.shape[0], *weight.shape[:-1])


class Attention(nnx.Module):
    """Fused qkv projection, optional q/k norm, rope, the caller's attention, output projection.

    The fused weight is [KVH, G + 2, D, E]: for each KV head its G query heads, then its key, then
    its value, so that a contiguous part of the first axis is a complete set of heads.
    """

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm = PLAIN):
        groups = config.num_heads // config.num_kv_heads
        self.backend = form.backend
        self.qkv = Projection(
            config.hidden_size,
            (config.num_kv_heads, groups + 2, config.head_dim),
            axes=("kv_heads", None, None, "hidden"),
            bias=config.qkv_bias,
            dtype=dtype,
            form=form,
        )
        self.output = Projection(
            config.num_heads * config.head_dim,
            (config.hidden_size,),
            axes=("hidden", "heads"),
            bias=config.output_bias,
            dtype=dtype,
            form=form,
        )

        def head_norm() -> RMSNorm | None:
            return RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

        self.q_norm, self.k_norm = head_norm(), head_norm()

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        rows: TokenRows,
        layer: int,
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[jax.Array, Cache]:
        """x + attention(norm(x)): x [T, E] -> ([T, E], cache)."""
        qkv = self.qkv(x, norm=norm, live=rows.live)  # [T, KVH, G+2, D]
        q, k, v = split_rotate(
            qkv,
            rows.cos,
            rows.sin,
            q_norm=None if self.q_norm is None else self.q_norm.as_operand(),
            k_norm=None if self.k_norm is None else self.k_norm.as_operand(),
            backend=self.backend,
        )
        out, cache = attend(cache, layer, q, k, v)
        return self.output(out.reshape(x.shape[0], -1), residual=x, live=rows.live), cache


class MLP(nnx.Module):
    """Gated MLP. Rows 2 i and 2 i + 1 of the fused weight [2 I, E] are gate and up of the inner
    dimension i, so that a contiguous part of them is complete; a TPU would copy [I, 2, E] into
    another order at every step.
    """

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm = PLAIN):
        self.activation = config.hidden_act
        self.gate_up = Projection(
            config.hidden_size,
            (2 * config.intermediate_size,),
            axes=("intermediate", "hidden"),
            bias=config.mlp_bias,
            dtype=dtype,
            form=form,
        )
        self.down = Projection(
            config.intermediate_size,
            (config.hidden_size,),
            axes=("hidden", "intermediate"),
            bias=config.mlp_bias,
            dtype=dtype,
            form=form,
        )

    def __call__(self, x: jax.Array, norm: RMSNorm, live: jax.Array | None) -> jax.Array:
        """x + MLP(norm(x)): [T, E] -> [T, E]; `live` as in `TokenRows`."""
        if self.activation in GATED_IN_PLACE:
            inner = self.gate_up(x, norm=norm, gated=True, live=live)
        else:
            gate_up = self.gate_up(x, norm=norm, live=live)  # [T, 2 I]
            gate = _ACTIVATIONS[self.activation](gate_up[:, ::2].astype(jnp.float32))
            inner = gate.astype(x.dtype) * gate_up[:, 1::2]
        return self.down(inner, residual=x, live=live)
