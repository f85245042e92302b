"""Qwen2-VL's and Qwen2.5-VL's encoder of images: a tower over patches, four of which are merged.

Wang et al., "Qwen2-VL", 2024; Bai et al., "Qwen2.5-VL Technical Report", 2025. Patches of several
images lie on one axis; each attends to those of its image, in most layers of Qwen2.5-VL to those of
its window.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxserve.models.linear import parameter
from jaxserve.models.norms import RMSNorm
from jaxserve.models.qwen2_vl.config import CHANNELS, Qwen2VLConfig, TowerConfig
from jaxserve.models.sources import Place, Source, whole
from jaxserve.models.vision import VISION_ACTIVATIONS, Dense, Filters, LayerNorm

EPS = 1e-6  # of every norm
MERGER = {("mlp", "first"): "mlp.0", ("mlp", "last"): "mlp.2"}  # the checkpoints' names


def _norm(config: TowerConfig, dtype: Any) -> RMSNorm | LayerNorm:
    if config.is_gated:
        return RMSNorm(config.hidden_size, EPS, dtype)
    return LayerNorm(config.hidden_size, EPS, dtype)


class _Attention(nnx.Module):
    def __init__(self, config: TowerConfig, dtype: Any):
        self.num_heads, size = config.num_heads, config.hidden_size
        self.qkv = Dense(size, 3 * size, dtype)
        self.proj = Dense(size, size, dtype)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, group: jax.Array) -> jax.Array:
        """x [T, E], angles [T, D / 2]; tokens of one group int32[T, G] see one another: [T, E]."""
        q, k, v = self.qkv(x).reshape(len(x), 3, self.num_heads, -1).transpose(1, 2, 0, 3)
        visible = (group[:, None] == group).all(-1)  # [T, T]

        def of_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            scores = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=jnp.float32)
            scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
            shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            out = jnp.einsum("qk,kd->qd", shares, v, preferred_element_type=jnp.float32)
            return out.astype(v.dtype)

        # one head after the other: scores of all at once would be the largest array by far
        heads = lax.map(lambda one: of_head(*one), (q, k, v))  # [H, T, D]
        return self.proj(heads.swapaxes(0, 1).reshape(x.shape))


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """[T, D] rotated in pairs of i and i + D / 2, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(pair, axis=-1).astype(x.dtype)


class _MLP(nnx.Module):
    def __init__(self, config: TowerConfig, dtype: Any):
        self.activation = config.hidden_act
        size, inner = config.hidden_size, config.intermediate_size
        self.fc1, self.fc2 = Dense(size, inner, dtype), Dense(inner, size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(VISION_ACTIVATIONS[self.activation](self.fc1(x)))


class _GatedMLP(nnx.Module):
    def __init__(self, config: TowerConfig, dtype: Any):
        self.activation = config.hidden_act
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (Dense(size, inner, dtype) for _ in range(2))
        self.down_proj = Dense(inner, size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = VISION_ACTIVATIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class _Block(nnx.Module):
    def __init__(self, config: TowerConfig, dtype: Any):
        self.norm1, self.norm2 = _norm(config, dtype), _norm(config, dtype)
        self.attn = _Attention(config, dtype)
        self.mlp = _GatedMLP(config, dtype) if config.is_gated else _MLP(config, dtype)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, group: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x), cos, sin, group)
        return x + self.mlp(self.norm2(x))


class _PatchEmbedding(nnx.Module):
    def __init__(self, config: TowerConfig, dtype: Any):
        self.frames = config.frames
        shape = config.hidden_size, config.numbers * config.frames
        self.proj = parameter(shape, dtype, (None, None))

    def __call__(self, patches: jax.Array) -> jax.Array:
        """[T, channels * P * P] -> [T, E]."""
        weight = self.proj[...]
        frame = patches.astype(weight.dtype).reshape(len(patches), CHANNELS, 1, -1)
        every = jnp.repeat(frame, self.frames, axis=2).reshape(len(patches), -1)
        over = (((1,), (1,)), ((), ()))
        out = lax.dot_general(every, weight, over, preferred_element_type=jnp.float32)
        return out.astype(weight.dtype)


class _Merging(nnx.Module):
    def __init__(self, inner: int, out: int, dtype: Any):
        self.first, self.last = Dense(inner, inner, dtype), Dense(inner, out, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(VISION_ACTIVATIONS["gelu"](self.first(x)))


class _Merger(nnx.Module):
    def __init__(self, config: TowerConfig, out: int, dtype: Any):
        self.inner = config.hidden_size * config.merged**2
        self.ln_q = _norm(config, dtype)
        self.mlp = _Merging(self.inner, out, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, E] -> [T / M**2, hidden size of the language model]."""
        return self.mlp(self.ln_q(x).reshape(-1, self.inner))


class _Tower(nnx.Module):
    def __init__(self, config: TowerConfig, out: int, dtype: Any):
        self.config = config
        self.patch_embed = _PatchEmbedding(config, dtype)
        self.blocks = nnx.List([_Block(config, dtype) for _ in range(config.num_layers)])
        self.merger = _Merger(config, out, dtype)

    def __call__(self, patches: jax.Array, places: jax.Array) -> jax.Array:
        config = self.config
        image, merged_row, merged_column, inner = places.T
        row = merged_row * config.merged + inner // config.merged
        column = merged_column * config.merged + inner % config.merged
        cos, sin = self._angles(row, column)
        whole = window = image[:, None]
        if config.window is not None:
            window = jnp.stack([image, row // config.window, column // config.window], axis=-1)
        x = self.patch_embed(patches)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, whole if layer in config.whole_layers else window)
        return self.merger(x)

    def _angles(self, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines [T, D / 2]: the first half turns with rows, the rest with columns."""
        config = self.config
        half = config.hidden_size // config.num_heads // 2
        turns = config.theta ** -(np.arange(0, half, 2, dtype=np.float32) / half)
        both = [place.astype(jnp.float32)[:, None] * turns for place in (row, column)]
        angles = jnp.concatenate(both, axis=-1)
        return jnp.cos(angles), jnp.sin(angles)


class QwenEncoder(nnx.Module):
    """Embeddings of images, for the places that they take in a prompt."""

    def __init__(self, config: Qwen2VLConfig, dtype: Any):
        self.visual = _Tower(config.tower, config.hidden_size, dtype)

    def __call__(self, patches: jax.Array, places: jax.Array) -> jax.Array:
        """Patches [T, 3 * P * P] in squares of M x M -> [T / M**2, hidden size].

        `places` int32[T, 4]: of each its image, row and column of its square, its number there.
        """
        return self.visual(patches, places)


def encoder_source(place: Place, config: Qwen2VLConfig) -> Source | Filters:
    """The tensor of a parameter of the encoder, which its place names."""
    name = ".".join(map(str, place))
    if name == "visual.patch_embed.proj":
        tower = config.tower
        shape = CHANNELS, tower.frames, tower.patch_size, tower.patch_size
        return Filters(f"{name}.weight", shape)
    for (module, part), own in MERGER.items():
        name = name.replace(f"visual.merger.{module}.{part}.", f"visual.merger.{own}.")
    return whole(name)
