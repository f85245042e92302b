"""The encoder of LLaVA 1.5 and of LLaVA-NeXT: CLIP's tower and a projector of two layers.

Liu et al., "Improved Baselines with Visual Instruction Tuning", 2023, and "LLaVA-NeXT", 2024;
Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.linear import parameter
from jaxserve.models.llava.config import LlavaConfig, LlavaNextConfig
from jaxserve.models.mlp import ACTIVATIONS
from jaxserve.models.sources import Place, Source, whole
from jaxserve.models.vision import (
    Blocks,
    Dense,
    Filters,
    LayerNorm,
    PatchEmbedding,
    Table,
    VisionConfig,
)


class _Embeddings(nnx.Module):
    def __init__(self, config: VisionConfig, dtype: Any):
        self.class_embedding = parameter((config.hidden_size,), dtype, (None,), fill=0.0)
        self.patch_embedding = PatchEmbedding(config, dtype)
        self.position_embedding = Table(config.num_patches + 1, config.hidden_size, dtype)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, 3, H, W] -> [B, 1 + N, E], the class token first."""
        patches = self.patch_embedding(pixels)
        first = self.class_embedding[...]
        first = jnp.broadcast_to(first, (len(patches), 1, first.shape[-1]))
        x = jnp.concatenate([first, patches], axis=1)
        return x + self.position_embedding.weight[...]


class ClipTower(nnx.Module):
    """CLIP's vision transformer up to the last layer that is projected."""

    def __init__(self, config: LlavaConfig, dtype: Any):
        vision = config.vision
        self.wanted = config.feature_layers
        self.embeddings = _Embeddings(vision, dtype)
        # the checkpoints' spelling
        self.pre_layrnorm = LayerNorm(vision.hidden_size, vision.layer_norm_eps, dtype)
        self.encoder = Blocks(vision, dtype, max(self.wanted))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, 3, H, W] -> [B, 1 + N, layers * E]: the wanted layers' outputs, side by side."""
        states = [self.pre_layrnorm(self.embeddings(pixels))]
        for block in self.encoder.layers:
            states.append(block(states[-1]))
        return jnp.concatenate([states[layer] for layer in self.wanted], axis=-1)


class _Projector(nnx.Module):
    def __init__(self, config: LlavaConfig, dtype: Any):
        self.activation = config.projector_act
        inputs, size = len(config.feature_layers) * config.vision.hidden_size, config.hidden_size
        self.linear_1 = Dense(inputs, size, dtype, bias=config.projector_bias)
        self.linear_2 = Dense(size, size, dtype, bias=config.projector_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(ACTIVATIONS[self.activation](self.linear_1(x)))


class LlavaEncoder(nnx.Module):
    """Embeddings of images, for the places that they take in a prompt."""

    def __init__(self, config: LlavaConfig, dtype: Any):
        self.first = 0 if config.keeps_class else 1
        self.vision_tower = ClipTower(config, dtype)
        self.multi_modal_projector = _Projector(config, dtype)

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        """Pixels [B, 3, H, W] -> [B, places, hidden size of the language model]."""
        return self.multi_modal_projector(self.vision_tower(pixels)[:, self.first :])


class LlavaNextEncoder(LlavaEncoder):
    """Embeddings of tiles, each followed by the one that ends a line of an image."""

    def __init__(self, config: LlavaNextConfig, dtype: Any):
        super().__init__(config, dtype)
        self.image_newline = parameter((config.hidden_size,), dtype, (None,), fill=0.0)

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        """Pixels [B, 3, H, W] -> [B, places + 1, hidden size of the language model]."""
        x = super().__call__(pixels, places)
        end = jnp.broadcast_to(self.image_newline[...], (len(x), 1, x.shape[-1])).astype(x.dtype)
        return jnp.concatenate([x, end], axis=1)


def encoder_source(place: Place, config: LlavaConfig) -> Source | Filters:
    """The tensor of a parameter of the encoder, which its place names."""
    name = ".".join(map(str, place))
    if place[-2:] == ("patch_embedding", "weight"):
        return Filters(name, (3, *[config.vision.patch_size] * 2))
    return whole(name)
