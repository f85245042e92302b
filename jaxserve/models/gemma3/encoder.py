"""Gemma 3's encoder of images: SigLIP's tower, means of squares of patches, and a projection.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023; Gemma Team, "Gemma 3 Technical
Report", 2025.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.models.gemma3.config import Gemma3ImageConfig
from jaxserve.models.linear import parameter
from jaxserve.models.norms import OffsetRMSNorm
from jaxserve.models.sources import Place, Source, whole
from jaxserve.models.vision import Blocks, Filters, LayerNorm, PatchEmbedding, Table, VisionConfig


class _Embeddings(nnx.Module):
    def __init__(self, config: VisionConfig, dtype: Any):
        self.patch_embedding = PatchEmbedding(config, dtype, bias=True)
        self.position_embedding = Table(config.num_patches, config.hidden_size, dtype)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, 3, H, W] -> [B, N, E]."""
        return self.patch_embedding(pixels) + self.position_embedding.weight[...]


class SiglipTower(nnx.Module):
    """SigLIP's vision transformer, without its pooling head."""

    def __init__(self, config: VisionConfig, dtype: Any):
        self.embeddings = _Embeddings(config, dtype)
        self.encoder = Blocks(config, dtype, config.num_layers)
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, 3, H, W] -> [B, N, E]."""
        x = self.embeddings(pixels)
        for block in self.encoder.layers:
            x = block(x)
        return self.post_layernorm(x)


class _Projector(nnx.Module):
    def __init__(self, config: Gemma3ImageConfig, dtype: Any):
        size = config.vision.hidden_size
        self.side = config.side
        # the checkpoints' name; a product's inputs come first here
        self.mm_input_projection_weight = parameter((size, config.hidden_size), dtype, (None, None))
        self.mm_soft_emb_norm = OffsetRMSNorm(size, config.vision.layer_norm_eps, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Patches [B, N, E] -> places [B, side * side, hidden size of the language model]."""
        batch, patches, size = x.shape
        square = patches // self.side**2
        width = round(square**0.5)
        split = x.reshape(batch, self.side, width, self.side, width, size)
        pooled = split.mean((2, 4), dtype=jnp.float32).astype(x.dtype)
        normed = self.mm_soft_emb_norm(pooled.reshape(batch, -1, size))
        over = (((2,), (0,)), ((), ()))
        weight = self.mm_input_projection_weight[...]
        return lax.dot_general(normed, weight, over, preferred_element_type=jnp.float32)


class GemmaEncoder(nnx.Module):
    """Embeddings of images, for the places that they take in a prompt."""

    def __init__(self, config: Gemma3ImageConfig, dtype: Any):
        self.vision_tower = SiglipTower(config.vision, dtype)
        self.multi_modal_projector = _Projector(config, dtype)

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        """Pixels [B, 3, H, W] -> [B, places, hidden size of the language model]."""
        return self.multi_modal_projector(self.vision_tower(pixels))


def encoder_source(place: Place, config: Gemma3ImageConfig) -> Source | Filters:
    """The tensor of a parameter of the encoder, which its place names."""
    name = ".".join(map(str, place))
    if place[-2:] == ("patch_embedding", "weight"):
        return Filters(name, (3, *[config.vision.patch_size] * 2))
    return whole(name)
