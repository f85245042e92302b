"""Gemma 2 (Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.attention_block import Attention
from jaxserve.models.decoder import Decoder
from jaxserve.models.gemma2.config import GemmaConfig
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.mlp import MLP
from jaxserve.models.norms import OffsetRMSNorm
from jaxserve.models.protocol import AtLayer, Cache


class GemmaBlock(nnx.Module):
    """Attention and MLP, each between two norms."""

    def __init__(
        self,
        config: GemmaConfig,
        dtype: Any,
        form: LinearForm,
        head_norms: Callable[[jax.Array], jax.Array] | None = None,
    ):
        def norm() -> OffsetRMSNorm:
            return OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype, form)

        self.input_norm, self.post_attention_norm = norm(), norm()
        self.attention = Attention(config, dtype, form, head_norms)
        self.pre_feedforward_norm, self.post_feedforward_norm = norm(), norm()
        self.mlp = MLP(config, dtype, form)

    def __call__(self, x: jax.Array, cache: Cache, at: AtLayer[Cache]) -> tuple[jax.Array, Cache]:
        """x [T, E] -> (x [T, E], cache)."""
        out, cache = self.attention(x, cache, at, norm=self.input_norm)
        x = x + self.post_attention_norm(out)
        out = self.mlp(x, at.rows, at.layer, norm=self.pre_feedforward_norm)
        return x + self.post_feedforward_norm(out), cache


class GemmaDecoder(Decoder):
    """A decoder of such blocks, with scaled embeddings and bounded logits."""

    config: GemmaConfig

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

    def __init__(self, config: GemmaConfig, dtype: str, form: LinearForm = PLAIN_LINEAR):
        super().__init__(
            config, dtype, form, lambda layer: GemmaBlock(config, dtype, form), OffsetRMSNorm
        )
