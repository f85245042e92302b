"""The pre-norm decoder (Llama's): each half of a layer behind a norm, added to the stream."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve.models.attention_block import Attention
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.linear import LinearForm
from jaxserve.models.norms import RMSNorm
from jaxserve.models.protocol import AtLayer, Attend, Cache, TokenRows
from pallas_kernels.linear import Norm
from pallas_kernels.quantized_matmul import Rows


class PreNormBlock(nnx.Module):
    """Attention and MLP, each behind an RMS norm and added to the residual stream.

    `mlp` is called as `MLP` is, and has its `product` and `rounding`.
    """

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm, mlp: Any):
        self.form = form
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, form)
        self.attention = Attention(config, dtype, form)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, form)
        self.mlp = mlp

    @property
    def behind(self) -> Norm | None:
        """The norm of what `product` gives, before it is added to the stream."""
        return None

    def __call__(self, x: jax.Array, cache: Cache, at: AtLayer[Cache]) -> tuple[jax.Array, Cache]:
        """x [T, E] -> (x [T, E], cache)."""
        x, cache = self.attention(x, cache, at, norm=self.input_norm, residual=x)
        norm = self.post_attention_norm
        return self.mlp(x, at.rows, at.layer, norm=norm, residual=x), cache

    def product(
        self, x: jax.Array, normed: Rows, cache: Cache, at: AtLayer[Cache]
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """The layer where the residual stream is added and normed between the linear layers.

        x [T, E] and its norm -> (x with the attention added, parts [S, T, E] of the MLP, cache).
        """
        product, cache = self.attention.product(normed, cache, at)
        norm = self.post_attention_norm.as_operand()
        normed, x = self.form.residual_normed(x, product, norm, self.mlp.rounding(x.dtype))
        return x, self.mlp.product(normed, at.rows, at.layer), cache


class PreNormDecoder(Decoder):
    """A decoder of blocks with a norm before each half, which a kernel may fuse with the residual
    stream; so too one behind it. Blocks have `PreNormBlock`'s `product` and `behind`."""

    def layers(
        self,
        x: jax.Array,
        rows: TokenRows,
        cache: Cache,
        attend: Attend[Cache],
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs the layers [start, stop); see `protocol.Model`."""
        whole = self.config.num_layers if stop is None else stop
        end = min(whole, len(self.blocks))
        hooks = rows.hooks
        if (
            self.form.residual_norm is None
            or hooks.linear is not None
            or hooks.layer is not None
            or hooks.operand is not None
            or end == start
        ):
            return super().layers(x, rows, cache, attend, start, stop)
        angles = self.angles(rows)
        norms = [block.input_norm for block in self.blocks] + [self.norm]
        readers = [block.attention.qkv for block in self.blocks]
        normed: Any = norms[start](x)
        for layer in range(start, end):
            at = AtLayer(layer, rows, angles[layer], attend)
            x, product, cache = self.blocks[layer].product(x, normed, cache, at)
            norm = norms[layer + 1].as_operand()
            rounding = None if layer + 1 == end else readers[layer + 1].rounding(x.dtype)
            behind = self.blocks[layer].behind
            normed, x = self.form.residual_normed(x, product, norm, rounding, behind)
        if self.streamed is not None:
            x, cache = self.through_streamed(x, rows, cache, attend, start, whole)
            return self.norm(x), cache
        return (normed if end == self.config.num_layers else x), cache
