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
from pallas_kernels import Backends
from pallas_kernels.linear import Norm, linear, linear_in_parts, stored_dtype
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.rotary import split_rotate


class Rotation(NamedTuple):
    """What is done to the heads of a fused projection before they attend.

    Attributes:
        cos, sin: float32[T, D / 2] of each token's rotary angles.
        q_norm, k_norm: RMS norms of a head before it is rotated.
        backend: of `pallas_kernels.rotary`.
    """

    cos: jax.Array
    sin: jax.Array
    q_norm: Norm | None
    k_norm: Norm | None
    backend: str

    def split(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """qkv [1, T, KVH, G + 2, D] -> q [T, H, D] and k [T, KVH, D], rotated, v [T, KVH, D]."""
        (whole,) = qkv
        return split_rotate(
            whole,
            self.cos,
            self.sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            backend=self.backend,
        )


Cache = TypeVar("Cache")
# attend(cache, layer, qkv [S, T, KVH, G + 2, D], rotation, dtype) -> (out [T, H, D], cache);
# with S > 1 the projection is in float32 parts whose sum is to be rounded to `dtype`
Attend = Callable[[Cache, int, jax.Array, Rotation, Any], tuple[jax.Array, Cache]]

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
        residual_norm: backend of `pallas_kernels.residual_norm`; None where the linear layers
            themselves add the residual stream and norm it.
        qkv_in_parts: whether `attend` takes the projection in parts, as `rotate_and_write` does.
        interpret: parameters of the interpreter of a kernel; None compiles it.
    """

    backend: str = "xla"
    quantization: str | None = None
    residual_norm: str | None = None
    qkv_in_parts: bool = False
    interpret: Any = None

    @staticmethod
    def of(backends: Backends, quantization: str | None) -> LinearForm:
        """The form that suits the backends of a device."""
        return LinearForm(
            backend=backends.linear,
            quantization=quantization,
            residual_norm=backends.residual_norm,
            qkv_in_parts=backends.rotate_and_write is not None,
            interpret=backends.interpret,
        )

    def residual_normed(
        self, x: jax.Array, product: jax.Array, norm: RMSNorm
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E] and parts of a product [S, T, E] -> the norm of their sum, and the sum."""
        assert self.residual_norm
        interpret = self.interpret if self.residual_norm == "triton" else None
        operand = norm.as_operand()
        return residual_norm(x, product, operand, backend=self.residual_norm, interpret=interpret)


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

    def in_parts(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [S, T, *out_shape], to be added up by what reads them: `linear_in_parts`."""
        weight = self.weight[...]
        out = linear_in_parts(
            x,
            weight.reshape(-1, weight.shape[-1]),
            scale=None if self.scale is None else self.scale[...].reshape(-1),
            bias=None if self.bias is None else self.bias[...].reshape(-1),
            backend=self.backend,
        )
        return out.reshape(*out.shape[:2], *weight.shape[:-1])


class Attention(nnx.Module):
    """Fused qkv projection, optional q/k norm, rope, the caller's attention, output projection.

    The fused weight is [KVH, G + 2, D, E]: for each KV head its G query heads, then its key, then
    its value, so that a contiguous part of the first axis is a complete set of heads.
    """

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm = PLAIN):
        groups = config.num_heads // config.num_kv_heads
        self.rotary_backend = "native" if form.backend == "native" else "xla"
        self.in_parts = form.qkv_in_parts
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
        qkv = self.qkv(x, norm=norm, live=rows.live)[None]  # [1, T, KVH, G + 2, D]
        out, cache = attend(cache, layer, qkv, self._rotation(rows), x.dtype)
        return self.output(out.reshape(x.shape[0], -1), residual=x, live=rows.live), cache

    def product(
        self,
        normed: jax.Array,
        rows: TokenRows,
        layer: int,
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[jax.Array, Cache]:
        """attention(normed): normed [T, E] -> (parts [S, T, E] of the output, cache)."""
        qkv = self.qkv.in_parts(normed) if self.in_parts else self.qkv(normed)[None]
        out, cache = attend(cache, layer, qkv, self._rotation(rows), normed.dtype)
        return self.output.in_parts(out.reshape(normed.shape[0], -1)), cache

    def _rotation(self, rows: TokenRows) -> Rotation:
        return Rotation(
            rows.cos,
            rows.sin,
            None if self.q_norm is None else self.q_norm.as_operand(),
            None if self.k_norm is None else self.k_norm.as_operand(),
            self.rotary_backend,
        )


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
        return self.down(self._inner(x, norm, live), residual=x, live=live)

    def product(self, normed: jax.Array) -> jax.Array:
        """MLP(normed): [T, E] -> parts [S, T, E]."""
        return self.down.in_parts(self._inner(normed, None, None))

    def _inner(self, x: jax.Array, norm: RMSNorm | None, live: jax.Array | None) -> jax.Array:
        if self.activation in GATED_IN_PLACE:
            return self.gate_up(x, norm=norm, gated=True, live=live)
        gate_up = self.gate_up(x, norm=norm, live=live)  # [T, 2 I]
        gate = _ACTIVATIONS[self.activation](gate_up[:, ::2].astype(jnp.float32))
        return gate.astype(x.dtype) * gate_up[:, 1::2]
