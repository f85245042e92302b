"""Blocks of vision transformers (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021).

Their modules have the names of the checkpoints, so that the place of a parameter is its tensor's
name. Every device has the whole of an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from checkpoints import aligned_empty
from checkpoints.quantized import TensorReader
from jaxserve.errors import UnsupportedModelError
from jaxserve.models.hf_fields import one_of, positive, positive_float
from jaxserve.models.linear import parameter
from jaxserve.models.mlp import ACTIVATIONS

MOST_SCORES = 1 << 26  # float32 numbers that a layer's attention makes at once
VISION_ACTIVATIONS = ACTIVATIONS | {"quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The shape of a vision transformer.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads: of the network.
        image_size, patch_size: sides in pixels of an image and of its patches.
        hidden_act: one of `VISION_ACTIVATIONS`.
        layer_norm_eps: of every norm.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    @property
    def num_patches(self) -> int:
        """Of an image."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> VisionConfig:
        """Reads a parsed `vision_config`; `defaults` are transformers' for keys that are absent.

        Raises:
            UnsupportedModelError: a value that is not implemented.
        """
        known = {**defaults, **{key: value for key, value in config.items() if value is not None}}
        made = cls(
            hidden_size=positive(known, "hidden_size"),
            intermediate_size=positive(known, "intermediate_size"),
            num_layers=positive(known, "num_hidden_layers"),
            num_heads=positive(known, "num_attention_heads"),
            image_size=positive(known, "image_size"),
            patch_size=positive(known, "patch_size"),
            hidden_act=one_of("hidden_act", known["hidden_act"], VISION_ACTIVATIONS),
            layer_norm_eps=positive_float(known, "layer_norm_eps", None),
        )
        if made.hidden_size % made.num_heads:
            allowed = f"a multiple of {made.num_heads} attention heads"
            raise UnsupportedModelError("vision_config.hidden_size", made.hidden_size, allowed)
        if positive(known, "num_channels", 3) != 3:
            raise UnsupportedModelError("vision_config.num_channels", known["num_channels"], "3")
        return made


class Dense(nnx.Module):
    """A linear layer with weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, dtype: Any, *, bias: bool = True):
        self.weight = parameter((outputs, inputs), dtype, (None, None))
        self.bias = parameter((outputs,), dtype, (None,), fill=0.0) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out] in x's dtype."""
        over = (((x.ndim - 1,), (1,)), ((), ()))
        out = lax.dot_general(x, self.weight[...], over, preferred_element_type=jnp.float32)
        return (out if self.bias is None else out + self.bias[...]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """A layer norm (Ba et al. 2016) over the last axis, in float32."""

    def __init__(self, size: int, eps: float, dtype: Any):
        self.weight = parameter((size,), dtype, (None,), fill=1.0)
        self.bias = parameter((size,), dtype, (None,), fill=0.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in x's dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return (centred * scale * self.weight[...] + self.bias[...]).astype(x.dtype)


def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention of [B, N, H, D] each, with scores in float32."""

    def by_head(
        x: jax.Array,
    ) -> jax.Array:  # [B * H, N, D], which XLA:CPU multiplies 3 times faster
        return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])

    scores = jnp.einsum("bqd,bkd->bqk", by_head(q), by_head(k), preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(q.dtype)
    out = jnp.einsum("bqk,bkd->bqd", weights, by_head(v), preferred_element_type=jnp.float32)
    return out.reshape(q.shape[0], q.shape[2], *out.shape[1:]).swapaxes(1, 2).astype(q.dtype)


class VisionAttention(nnx.Module):
    """Attention of every patch to every patch of its image."""

    def __init__(self, config: VisionConfig, dtype: Any):
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj = (Dense(size, size, dtype) for _ in range(3))
        self.out_proj = Dense(size, size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, E] -> [B, N, E]."""
        shape = (*x.shape[:2], self.num_heads, -1)
        q, k, v = (part(x).reshape(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
        if x.shape[0] * self.num_heads * x.shape[1] ** 2 <= MOST_SCORES:
            out = attended(q, k, v)
        else:  # of one head at a time
            heads = [jnp.moveaxis(part, 2, 0)[:, :, :, None] for part in (q, k, v)]
            out = lax.map(lambda one: attended(*one), tuple(heads))
            out = jnp.moveaxis(out[:, :, :, 0], 0, 2)
        return self.out_proj(out.reshape(x.shape))


class VisionMLP(nnx.Module):
    """Two linear layers."""

    def __init__(self, config: VisionConfig, dtype: Any):
        self.activation = config.hidden_act
        self.fc1 = Dense(config.hidden_size, config.intermediate_size, dtype)
        self.fc2 = Dense(config.intermediate_size, config.hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] -> [..., E]."""
        return self.fc2(VISION_ACTIVATIONS[self.activation](self.fc1(x)))


class VisionBlock(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: VisionConfig, dtype: Any):
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1, self.self_attn = (
            LayerNorm(size, eps, dtype),
            VisionAttention(config, dtype),
        )
        self.layer_norm2, self.mlp = LayerNorm(size, eps, dtype), VisionMLP(config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, E] -> [B, N, E]."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Table(nnx.Module):
    """Rows that are added or looked up."""

    def __init__(self, rows: int, size: int, dtype: Any):
        self.weight = parameter((rows, size), dtype, (None, None))


class Blocks(nnx.Module):
    """The layers of a tower, by the checkpoints' names."""

    def __init__(self, config: VisionConfig, dtype: Any, num_layers: int):
        self.layers = nnx.List([VisionBlock(config, dtype) for _ in range(num_layers)])


class PatchEmbedding(nnx.Module):
    """A convolution whose stride is its width: each patch is multiplied with one matrix."""

    def __init__(self, config: VisionConfig, dtype: Any, *, bias: bool = False):
        self.patch_size = config.patch_size
        inputs, size = 3 * config.patch_size**2, config.hidden_size
        self.weight = parameter((size, inputs), dtype, (None, None))
        self.bias = parameter((size,), dtype, (None,), fill=0.0) if bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, 3, H, W] -> [B, N, E], row by row; what fills no patch is left out."""
        side = self.patch_size
        batch, channels = pixels.shape[:2]
        high, wide = (size // side for size in pixels.shape[2:])
        cut = pixels[:, :, : high * side, : wide * side]
        cut = cut.reshape(batch, channels, high, side, wide, side)
        patches = cut.transpose(0, 2, 4, 1, 3, 5).reshape(batch, high * wide, -1)
        patches = patches.astype(self.weight.dtype)
        over = (((2,), (1,)), ((), ()))
        out = lax.dot_general(patches, self.weight[...], over, preferred_element_type=jnp.float32)
        return (out if self.bias is None else out + self.bias[...]).astype(patches.dtype)


@dataclass(frozen=True, slots=True)
class Filters:
    """A matrix [out, numbers of a filter] whose tensor is the filters of a convolution.

    Attributes:
        name: of the tensor.
        shape: of a filter.
    """

    name: str
    shape: tuple[int, ...]

    def tensors(self, shape: tuple[int, ...], is_matrix: bool) -> dict[str, tuple[int, ...]]:
        """As of a `Source`."""
        return {self.name: (shape[0], *self.shape)}

    def read(
        self,
        reader: TensorReader,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        dtype: np.dtype,
        is_matrix: bool,
    ) -> np.ndarray:
        """As of a `Source`."""
        out = aligned_empty((shape[0], *self.shape), dtype)
        reader.read_into(self.name, (slice(None),) * out.ndim, out)
        return out.reshape(shape)[index]
