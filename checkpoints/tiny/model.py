"""A dense Llama in Flax NNX, written for training: no cache, whole rows at a time.

Everything is float32: at this size rounding to bfloat16 and back costs a CPU more time than its
faster matrix products save. Weights are stored ``[out, in]`` as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Shape of the bundled model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class Linear(nnx.Module):
    """A projection without bias, weight float32 ``[out, in]``."""

    def __init__(self, n_in: int, n_out: int, std: float, rngs: nnx.Rngs):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (n_out, n_in)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight[...].T


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weight[...]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of ``x [B, S, H, D]``, halves layout (Su et al. 2021)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nnx.Module):
    """One pre-norm transformer block: grouped-query attention, then a gated MLP."""

    def __init__(self, config: TinyConfig, rngs: nnx.Rngs):
        c, std = config, 0.02
        out_std = std / (2 * c.num_layers) ** 0.5
        self.config = c
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, std, rngs)
        self.k_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, std, rngs)
        self.v_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, std, rngs)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, out_std, rngs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, std, rngs)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, std, rngs)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, out_std, rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, mask: jax.Array) -> jax.Array:
        c = self.config
        batch, length, _ = x.shape
        h = self.input_layernorm(x)
        q = rotate(self.q_proj(h).reshape(batch, length, c.num_heads, c.head_dim), cos, sin)
        k = rotate(self.k_proj(h).reshape(batch, length, c.num_kv_heads, c.head_dim), cos, sin)
        v = self.v_proj(h).reshape(batch, length, c.num_kv_heads, c.head_dim)
        k = jnp.repeat(k, c.num_heads // c.num_kv_heads, axis=2)
        v = jnp.repeat(v, c.num_heads // c.num_kv_heads, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + self.o_proj(out.reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h))


class TinyLlama(nnx.Module):
    """``tokens int32[B, S]``, ``documents int32[B, S]`` -> logits float32 ``[B, S, V]``.

    ``documents`` numbers the packed documents of a row: a token sees earlier tokens of its own
    document only. Rotary positions are relative, so they need not restart at a document.
    """

    def __init__(self, config: TinyConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed_tokens = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, tokens: jax.Array, documents: jax.Array) -> jax.Array:
        c = self.config
        length = tokens.shape[1]
        frequency = c.rope_theta ** (-jnp.arange(0, c.head_dim, 2) / c.head_dim)
        angle = (jnp.arange(length)[:, None] * frequency)[None, :, None, :]  # [1, S, 1, D/2]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        causal = jnp.tril(jnp.ones((length, length), bool))
        mask = causal & (documents[:, :, None] == documents[:, None, :])  # [B, S, S]
        x = self.embed_tokens[...][tokens]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x) @ self.embed_tokens[...].T
