"""A dense attention over a contiguous cache: the plainest `attend` that a model can be run with."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models import Model, ModelConfig
from jaxserve.models.protocol import Rotation, TokenRows


class DenseCache(NamedTuple):
    """Keys and values of ONE request, [layers, length, KVH, D] each."""

    keys: jax.Array
    values: jax.Array


def empty_cache(config: ModelConfig, length: int, dtype: str = "float32") -> DenseCache:
    shape = (config.num_layers, length, config.num_kv_heads, config.head_dim)
    return DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def run(
    model: Model,
    tokens: np.ndarray,
    cache: DenseCache,
    start: int,
    prompt_length: int | None = None,
) -> tuple[jax.Array, DenseCache]:
    """Feeds tokens at positions start.. and returns (float32 logits [T, V] or scores, cache)."""
    positions = jnp.arange(start, start + len(tokens), dtype=jnp.int32)
    lengths = None if prompt_length is None else jnp.maximum(positions + 1, prompt_length)
    graph, state = nnx.split(model)
    return _run(graph, state, jnp.asarray(tokens, jnp.int32), positions, lengths, cache)


@partial(jax.jit, static_argnums=0)
def _run(
    graph: Any,
    state: Any,
    tokens: jax.Array,
    positions: jax.Array,
    lengths: jax.Array | None,
    cache: DenseCache,
) -> tuple[jax.Array, DenseCache]:
    model = nnx.merge(graph, state)
    config = model.config

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
        scores = scores * config.attention_scale
        cap = config.attention_soft_cap
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        scores = jnp.where(visible[None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("hts,shd->thd", weights, all_v, precision=exact)
        return out.astype(q.dtype), DenseCache(keys, values)

    rows = TokenRows(positions[None], lengths)
    hidden, cache = model.layers(model.embed(tokens), rows, cache, attend)
    return (model.logits if config.head is None else model.scores)(hidden), cache
