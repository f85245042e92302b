"""Gemma 2 (Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.attention_block import Attention
from jaxserve.models.gemma2.config import GemmaConfig
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.mlp import MLP
from jaxserve.models.norms import OffsetRMSNorm
from jaxserve.models.prenorm import PreNormDecoder
from jaxserve.models.protocol import AtLayer, Cache
from pallas_kernels.linear import Norm
from pallas_kernels.quantized_matmul import Rows


class GemmaBlock(nnx.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: GemmaConfig, dtype: Any, form: LinearForm):
        def norm() -> OffsetRMSNorm:
            return OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype, form)

        self.form = form
        self.input_norm, self.post_attention_norm = norm(), norm()
        self.attention = Attention(config, dtype, form, norm=OffsetRMSNorm)
        self.pre_feedforward_norm, self.post_feedforward_norm = norm(), norm()
        self.mlp = MLP(config, dtype, form)

    @property
    def behind(self) -> Norm:
        """The norm of what `product` gives."""
        return self.post_feedforward_norm.as_operand()

    def __call__(self, x: jax.Array, cache: Cache, at: AtLayer[Cache]) -> tuple[jax.Array, Cache]:
        """x [T, E] -> (x [T, E], cache)."""
        out, cache = self.attention(x, cache, at, norm=self.input_norm)
        x = x + self.post_attention_norm(out)
        out = self.mlp(x, at.rows, at.layer, norm=self.pre_feedforward_norm)
        return x + self.post_feedforward_norm(out), cache

    def product(
        self, x: jax.Array, normed: Rows, cache: Cache, at: AtLayer[Cache]
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """As `PreNormBlock.product`."""
        product, cache = self.attention.product(normed, cache, at)
        norm, behind = self.pre_feedforward_norm, self.post_attention_norm
        given = norm.as_operand(), self.mlp.rounding(x.dtype), behind.as_operand()
        normed, x = self.form.residual_normed(x, product, *given)
        return x, self.mlp.product(normed, at.rows, at.layer), cache


class GemmaDecoder(PreNormDecoder):
    """A decoder of such blocks, with scaled embeddings and bounded logits."""

    config: GemmaConfig

    def __init__(self, config: GemmaConfig, dtype: str, form: LinearForm = PLAIN_LINEAR):
        super().__init__(
            config, dtype, form, lambda layer: GemmaBlock(config, dtype, form), OffsetRMSNorm
        )

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Ids int32[T] -> [T, E]."""
        x = super().embed(tokens)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def logits(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """Normed hidden states [R, E] -> float32 [R, V]."""
        logits, cap = super().logits(hidden, live), self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Gemma2(GemmaDecoder):
    """Gemma 2."""
