"""OLMo-2 (OLMo Team, "2 OLMo 2 Furious", 2024): the residual stream itself is never normed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.attention_block import Attention
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm, parameter
from jaxserve.models.mlp import MLP
from jaxserve.models.norms import RMSNorm, normed
from jaxserve.models.protocol import AtLayer, Cache
from pallas_kernels.linear import Norm


class ProjectionNorms(nnx.Module):
    """RMS norms over all query heads together, and over all key heads."""

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm):
        kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        axes = ("kv_heads", None, None)
        self.q_norm = parameter((kv_heads, group, config.head_dim), dtype, axes, fill=1.0)
        self.k_norm = parameter((kv_heads, 1, config.head_dim), dtype, axes, fill=1.0)
        self.eps = config.rms_norm_eps
        self.form = form

    def __call__(self, qkv: jax.Array) -> jax.Array:
        """[T, KVH, G + 2, D] -> the same, with values as they were."""
        q, k, v = jnp.split(qkv, (qkv.shape[2] - 2, qkv.shape[2] - 1), axis=2)
        return jnp.concatenate([self._norm(q, self.q_norm), self._norm(k, self.k_norm), v], axis=2)

    def _norm(self, heads: jax.Array, weight: nnx.Param) -> jax.Array:
        flat = heads.reshape(heads.shape[0], -1)
        flat = normed(flat, Norm(weight[...].reshape(-1), self.eps), self.form)
        return flat.reshape(heads.shape)


class Olmo2Block(nnx.Module):
    """Attention and MLP, each with an RMS norm behind it."""

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm):
        self.attention = Attention(config, dtype, form, ProjectionNorms(config, dtype, form))
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, form)
        self.mlp = MLP(config, dtype, form)
        self.post_feedforward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, form)

    def __call__(self, x: jax.Array, cache: Cache, at: AtLayer[Cache]) -> tuple[jax.Array, Cache]:
        """x [T, E] -> (x [T, E], cache)."""
        out, cache = self.attention(x, cache, at)
        x = x + self.post_attention_norm(out)
        return x + self.post_feedforward_norm(self.mlp(x, at.rows, at.layer)), cache


class Olmo2(Decoder):
    """A decoder of post-norm blocks."""

    def __init__(self, config: ModelConfig, dtype: str, form: LinearForm = PLAIN_LINEAR):
        super().__init__(config, dtype, form, lambda layer: Olmo2Block(config, dtype, form))
