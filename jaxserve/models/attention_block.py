"""The attention of a layer: fused projection, rotation, the caller's attention, output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm, Projection
from jaxserve.models.norms import RMSNorm
from jaxserve.models.protocol import Angles, AtLayer, Cache, Rotation
from pallas_kernels.quantized_matmul import Rows


class Attention(nnx.Module):
    """Fused qkv projection, optional q/k norm, rope, the caller's attention, output projection.

    The fused weight is [KVH, G + 2, D, E]: for each KV head its G query heads, then its key, then
    its value, so that a contiguous part of the first axis is a complete set of heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: Any,
        form: LinearForm,
        head_norms: Callable[[jax.Array], jax.Array] | None = None,
        norm: type[RMSNorm] = RMSNorm,
    ):
        """`head_norms` is done to a projection [T, KVH, G + 2, D] that the kernels do not norm;
        `norm` is the kind of norm that they do, where the config has one of each head."""
        self.form = form
        self.head_norms = head_norms
        groups = config.num_heads // config.num_kv_heads
        self.rotary = ("native",) if form.backend == "native" else form.rotary
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
            return norm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

        self.q_norm, self.k_norm = head_norm(), head_norm()

    def __call__(
        self,
        x: jax.Array,
        cache: Cache,
        at: AtLayer[Cache],
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """residual + attention(norm(x)): x [T, E] -> ([T, E], cache)."""
        qkv = at.rows.apply("qkv", at.layer, self.qkv, x, norm=norm)  # [T, KVH, G + 2, D]
        if self.head_norms is not None:
            qkv = self.head_norms(qkv)
        out, cache = at.attend(cache, at.layer, qkv[None], self._rotation(at.angles), x.dtype)
        flat = out.reshape(x.shape[0], -1)
        return at.rows.apply("output", at.layer, self.output, flat, residual=residual), cache

    def product(self, normed: Rows, cache: Cache, at: AtLayer[Cache]) -> tuple[jax.Array, Cache]:
        """attention(normed): normed [T, E] -> (parts [S, T, E] of the output, cache)."""
        assert self.head_norms is None
        dtype = normed.dtype
        qkv = self.qkv.in_parts(normed) if self.in_parts else self.qkv(normed)[None]
        out, cache = at.attend(cache, at.layer, qkv, self._rotation(at.angles), dtype)
        flat = out.reshape(1, normed.shape[0], -1)
        return self.output.after(self.form, flat, dtype), cache

    def _rotation(self, angles: Angles) -> Rotation:
        return Rotation(
            *angles,
            None if self.q_norm is None else self.q_norm.as_operand(),
            None if self.k_norm is None else self.k_norm.as_operand(),
            self.rotary,
            self.form.interpret,
        )
