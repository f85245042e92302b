"""A dense attention over a contiguous cache: the plainest `attend` that a model can be run with."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models import Llama, ModelConfig
from jaxserve.models.layers import Rotation


class DenseCache(NamedTuple):
    """Keys and values of ONE request, [layers, length, KVH, D] each."""

    keys: jax.Array
    values: jax.Array


def empty_cache(config: ModelConfig, length: int, dtype: str = "float32") -> DenseCache:
    shape = (config.num_layers, length, config.num_kv_heads, config.head_dim)
    return DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def run(
    model: Llama,
    tokens: np.ndarray,
    cache: DenseCache,
    start: int,
    prompt_length: int | None = None,
) -> tuple[jax.Array, DenseCache]:
    """Feeds tokens at positions start.. and returns (float32 logits [T, V], cache)."""
    config = model.config
    positions = jnp.arange(start, start + len(tokens), dtype=jnp.int32)
    lengths = None if prompt_length is None else jnp.maximum(positions + 1, prompt_length)

    def attend(
        cache: DenseCache, layer: int, qkv: jax.Array, rotation: Rotation, dtype: str
    ) -> tuple[jax.Array, DenseCache]:
        q, k, v = rotation.split(qkv)
        keys = cache.keys.at[layer, positions].set(k)
        values = cache.values.at[layer, positions].set(v)
        group = config.num_heads // config.num_kv_heads
        all_k = jnp.repeat(keys[layer], group, axis=1).astype(jnp.float32)  # [S, H, D]
        all_v = jnp.repeat(values[layer], group, axis=1).astype(jnp.float32)
        exact = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("thd,shd->hts", q.astype(jnp.float32), all_k, precision=exact)
        distance = positions[:, None] - jnp.arange(keys.shape[1])[None, :]  # [T, S]
        visible = distance >= 0
        window = config.layer_window(layer)
        if window is not None:
            visible &= distance < window
        scores = jnp.where(visible[None], scores * config.attention_scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("hts,shd->thd", weights, all_v, precision=exact)
        return out.astype(q.dtype), DenseCache(keys, values)

    hidden, cache = model(jnp.asarray(tokens, jnp.int32), positions, cache, attend, lengths)
    return model.logits(hidden), cache
