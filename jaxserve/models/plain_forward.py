"""A model run over one sequence without pages: what evaluation and calibration look into."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.protocol import Attend, Rotation


def causal_attend(config: ModelConfig) -> Attend[None]:
    """Attention of the rows of one sequence to those before them; the cache is None."""

    def attend(
        cache: None, layer: int, qkv: jax.Array, rotation: Rotation, dtype: Any
    ) -> tuple[jax.Array, None]:
        whole = qkv if len(qkv) == 1 else jnp.sum(qkv.astype(jnp.float32), 0, keepdims=True)
        q, k, v = rotation.split(whole.astype(dtype))
        out = causal_attention(
            q,
            k,
            v,
            scale=config.attention_scale,
            window=config.layer_window(layer),
            soft_cap=config.attention_soft_cap,
        )
        return out.astype(dtype), cache

    return attend


def causal_attention(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:  # float32[T, H, D]
    """Softmax attention in float32; key j is seen by query i if i - window < j <= i."""
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], -1, head_dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision=highest)
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,skd->tkgd", weights, v.astype(jnp.float32), precision=highest)
    return out.reshape(tokens, heads, head_dim)
