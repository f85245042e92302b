"""Rotary position embedding for TPUs in Pallas Mosaic: one kernel from a projection to its heads.

XLA takes a dozen operations of a few kilobytes where heads are normed: sums, roots, factors and
rotations of queries and of keys, and the orders of axes between. The heads of a projection come as
float32, of which single rows can be read; a grid step has some tokens with all of their heads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.linear.api import Norm

TILE_BYTES = 1 << 20  # of the heads of a grid step's tokens
Form = tuple[float, bool] | None  # eps and offset of a norm


def _kernel(
    heads_ref: Any,  # float32[T, KVH * (G + 2), D]
    cos_ref: Any,  # float32[T, 1, D]
    sin_ref: Any,  # float32[T, 1, D], of the first half with the other sign
    norm_refs: tuple[Any, Any],  # [1, D] of queries, of keys; or None
    *refs: Any,  # the results, and float32 of their shapes
    norms: tuple[Form, Form],
) -> None:
    results, held = refs[:3], refs[3:]
    kv_heads = held[1].shape[1]
    group = held[0].shape[1] // kv_heads
    for head in range(kv_heads):
        first = head * (group + 2)
        held[0][:, head * group : (head + 1) * group] = heads_ref[:, first : first + group]
        held[1][:, head : head + 1] = heads_ref[:, first + group : first + group + 1]
        held[2][:, head : head + 1] = heads_ref[:, first + group + 1 : first + group + 2]
    dtype, cos, sin = results[0].dtype, cos_ref[...], sin_ref[...]

    def cut(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    for kind in (0, 1):
        heads, norm = held[kind][...], norms[kind]
        if norm is not None:
            eps, offset = norm
            factor = norm_refs[kind][...].astype(jnp.float32)[None]
            squares = (heads * heads).mean(axis=2, keepdims=True)
            over = heads * lax.rsqrt(squares + eps)
            heads = cut(over * (1.0 + factor)) if offset else cut(cut(over) * factor)
        turned = pltpu.roll(heads, heads.shape[2] // 2, 2)
        results[kind][...] = (heads * cos + turned * sin).astype(dtype)
    results[2][...] = held[2][...].astype(dtype)


@functools.partial(jax.jit, static_argnames=("norms", "interpret"))
def _call(
    qkv: jax.Array,  # [T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,
    weights: tuple[jax.Array | None, jax.Array | None],
    *,
    norms: tuple[Form, Form],
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens, kv_heads, parts, head_dim = qkv.shape
    heads = kv_heads * parts
    padded = -(-heads // 8) * 8
    tile = min(max(TILE_BYTES // (4 * padded * head_dim), 1), tokens)

    def rows(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, count, head_dim), lambda step: (step, 0, 0))

    counts = kv_heads * (parts - 2), kv_heads, kv_heads
    factors = tuple(None if one is None else one[None] for one in weights)
    whole = tuple(
        None if one is None else pl.BlockSpec(one.shape, lambda step: (0, 0)) for one in factors
    )
    q, k, v = pl.pallas_call(
        functools.partial(_kernel, norms=norms),
        grid=(-(-tokens // tile),),
        in_specs=[rows(heads), rows(1), rows(1), whole],
        out_specs=[rows(count) for count in counts],
        out_shape=[result_like(qkv, (tokens, count, head_dim), qkv.dtype) for count in counts],
        scratch_shapes=[pltpu.VMEM((tile, count, head_dim), jnp.float32) for count in counts],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpreter.of_call(interpret),
        name="split_rotate",
    )(
        qkv.reshape(tokens, heads, head_dim).astype(jnp.float32),
        jnp.concatenate([cos, cos], axis=1)[:, None],
        jnp.concatenate([-sin, sin], axis=1)[:, None],
        factors,
    )
    return q, k, v


def split_rotate(
    qkv: jax.Array,  # [T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    *,
    q_norm: Norm | None,
    k_norm: Norm | None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, KVH * G, D], [T, KVH, D], [T, KVH, D]
    """As `pallas_kernels.rotary.split_rotate`."""
    return _call(
        qkv,
        cos,
        sin,
        (q_norm and q_norm.weight, k_norm and k_norm.weight),
        norms=(_form(q_norm), _form(k_norm)),
        interpret=interpret,
    )


def _form(norm: Norm | None) -> Form:
    return None if norm is None else (norm.eps, norm.offset)
