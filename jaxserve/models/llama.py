"""The Llama family of decoders over a flat batch of tokens; Mistral and Qwen are its options."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import (
    MLP,
    PLAIN,
    Attend,
    Attention,
    Cache,
    LinearForm,
    Projection,
    RMSNorm,
    TokenRows,
    parameter,
)
from jaxserve.models.rope import rope_tables
from pallas_kernels.linear import linear


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: Any, form: LinearForm = PLAIN):
        self.form = form
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, form)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, form)

    def __call__(
        self,
        x: jax.Array,
        rows: TokenRows,
        layer: int,
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[jax.Array, Cache]:
        """x [T, E] -> (x [T, E], cache)."""
        x, cache = self.attention(x, self.input_norm, rows, layer, cache, attend)
        return self.mlp(x, self.post_attention_norm, rows.live), cache

    def product(
        self,
        x: jax.Array,
        normed: jax.Array,
        rows: TokenRows,
        layer: int,
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """The layer where the residual stream is added and normed between the linear layers.

        x [T, E] and its norm -> (x with the attention added, parts [S, T, E] of the MLP, cache).
        """
        product, cache = self.attention.product(normed, rows, layer, cache, attend)
        normed, x = self.form.residual_normed(x, product, self.post_attention_norm)
        return x, self.mlp.product(normed), cache


class Llama(nnx.Module):
    """A decoder-only transformer. Tokens of all requests lie flat on one axis; the attention over
    the KV cache is the caller's.

    A new module holds zeros in `dtype`; `jaxserve.models.load_model` fills it.
    """

    def __init__(self, config: ModelConfig, dtype: str, form: LinearForm = PLAIN):
        self.config = config
        self.form = form
        self.embedding = parameter(
            (config.vocab_size, config.hidden_size), dtype, ("vocab", "hidden")
        )
        self.layers = nnx.List(
            [DecoderLayer(config, dtype, form) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        # a tied table is looked up in full precision and multiplied in the quantised form
        own_head = not config.tie_word_embeddings or form.quantization is not None
        self.lm_head = _lm_head(config, dtype, form) if own_head else None

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        attend: Attend[Cache],
        rope_lengths: jax.Array | None = None,
        live: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs all layers over one flat batch of tokens.

        Args:
            tokens: int32 [T], ids in [0, vocab_size).
            positions: int32 [T], position of each token in its own request, from 0.
            cache: whatever `attend` takes and returns, for example the KV pages.
            attend: attend(cache, layer, qkv [S, T, KVH, G + 2, D], rotation, dtype) ->
                (out [T, H, D], cache); nothing is rotated or scaled yet, see `layers.Attend`.
            rope_lengths: int32 [T], max(prompt length, position + 1) of each token's request;
                read by rope type `dynamic` only, see `rope_tables`. None means positions + 1.
            live: int32 [R, 2], ranges of the rows that hold tokens; linear layers may leave out the
                others. None: all.

        Returns:
            (hidden states after the last norm [T, E] in the model's dtype, cache).
        """
        config = self.config
        cos, sin = rope_tables(config.rope, config.head_dim, positions, rope_lengths)
        rows = TokenRows(cos, sin, live)
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip")
        if self.form.residual_norm is None:
            for index, layer in enumerate(self.layers):
                x, cache = layer(x, rows, index, cache, attend)
            return self.norm(x), cache
        normed = self.layers[0].input_norm(x)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, norm) in enumerate(zip(self.layers, following, strict=True)):
            x, product, cache = layer.product(x, normed, rows, index, cache, attend)
            normed, x = self.form.residual_normed(x, product, norm)
        return normed, cache

    def logits(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """Scores of every token of the vocabulary: hidden [R, E] -> float32 [R, V].

        `live` are ranges of the rows that count, as for a call of the model.
        """
        if self.lm_head is not None:
            return self.lm_head(hidden, out_dtype=jnp.float32, live=live)
        return linear(
            hidden,
            self.embedding[...],
            out_dtype=jnp.float32,
            live=live,
            backend=self.form.backend,
        )


def _lm_head(config: ModelConfig, dtype: str, form: LinearForm) -> Projection:
    return Projection(
        config.hidden_size,
        (config.vocab_size,),
        axes=("vocab", "hidden"),
        bias=False,
        dtype=dtype,
        form=form,
    )
