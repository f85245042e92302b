"""A model run over one sequence without pages: what evaluation and calibration look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.protocol import AtLayer, Attend, Hooks, Layer, Rotation, TokenRows, alike


def causal_attend(
    config: ModelConfig, told: Callable[[int, jax.Array], None] | None = None
) -> Attend[None]:
    """Softmax attention, in float32, of the rows of one sequence to those before them; the cache
    is None.

    Args:
        config: of the model.
        told: called with each layer and its weights float32[H, T, T].
    """

    def attend(
        cache: None, layer: Layer, qkv: jax.Array, rotation: Rotation, dtype: Any
    ) -> tuple[jax.Array, None]:
        whole = qkv if len(qkv) == 1 else jnp.sum(qkv.astype(jnp.float32), 0, keepdims=True)
        q, k, v = (x.astype(jnp.float32) for x in rotation.split(whole.astype(dtype)))
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[2])
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("tkgd,skd->kgts", grouped, k, precision=highest)
        scores = scores * config.attention_scale
        window, soft_cap = config.layer_window(alike(layer)), config.attention_soft_cap
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        # key j is seen by query i if i - window < j <= i
        distance = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        if told is not None:
            assert isinstance(layer, int), "a loop's layer has weights in the loop alone"
            told(layer, weights.reshape(-1, *weights.shape[2:]))
        out = jnp.einsum("kgts,skd->tkgd", weights, v, precision=highest)
        return out.reshape(q.shape).astype(dtype), cache

    return attend


def attention_weights(model: Any, layer: int, qkv: jax.Array, prompt_len: int) -> jax.Array:
    """How much each token of a sequence looks at each: float32[T, H, T].

    Args:
        model: the Flax module, with its parameters.
        layer: its number.
        qkv: [T, KVH, G + 2, D], what the layer's projection gave, before norms and rotation.
        prompt_len: tokens of the prompt, see `TokenRows.rope_lengths`.
    """
    positions, found = jnp.arange(len(qkv)), list[jax.Array]()

    def given(name: str, layer: int, x: jax.Array, y: jax.Array) -> jax.Array:
        return qkv.astype(y.dtype) if name == "qkv" else y

    lengths = jnp.maximum(prompt_len, positions + 1)
    rows = TokenRows(positions[None], lengths, hooks=Hooks(linear=given))
    attend = causal_attend(model.config, lambda layer, weights: found.append(weights))
    at = AtLayer(layer, rows, model.angles(rows)[layer], attend)
    # what the layer itself makes of its input is not looked at
    nothing = jnp.zeros((len(qkv), model.config.hidden_size), model.embedding[...].dtype)
    model.blocks[layer].attention(nothing, None, at)
    (weights,) = found
    return jnp.swapaxes(weights, 0, 1)
