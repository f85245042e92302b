"""Rotary position embedding for TPUs in Pallas Mosaic: one kernel from a projection to its heads.

XLA takes a dozen operations of a few kilobytes where heads are normed: sums, roots, factors and
rotations of queries and of keys, and the orders of axes between. A grid step has some tokens of the
projection as the product left them, a head beside the other, and writes heads one below the other:
as float32, of which single rows can be written, before the whole is rounded.
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
TOKEN_MULTIPLE = 16  # tokens of a tile of 16 bits
Form = tuple[float, bool] | None  # eps and offset of a norm


def _kernel(
    qkv_ref: Any,  # [T, KVH * (G + 2) * D]
    cos_ref: Any,  # float32[T, D]
    sin_ref: Any,  # float32[T, D], of the first half with the other sign
    norm_refs: tuple[Any, Any],  # [1, D] of queries, of keys; or None
    *refs: Any,  # the results [T, heads, D], and float32 of their shapes
    norms: tuple[Form, Form],
) -> None:
    results, held = refs[:3], refs[3:]
    (_, kv_heads, head_dim), heads = held[1].shape, held[0].shape[1]
    group = heads // kv_heads
    dtype, cos, sin = results[0].dtype, cos_ref[...], sin_ref[...]

    def cut(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    def rotated(head: jax.Array, kind: int) -> jax.Array:
        norm = norms[kind]
        if norm is not None:
            eps, offset = norm
            factor = norm_refs[kind][...].astype(jnp.float32)
            over = head * lax.rsqrt((head * head).mean(axis=1, keepdims=True) + eps)
            head = cut(over * (1.0 + factor)) if offset else cut(cut(over) * factor)
        return head * cos + pltpu.roll(head, head_dim // 2, 1) * sin

    for place in range(kv_heads * (group + 2)):
        kv_head, part = divmod(place, group + 2)
        kind = max(part - group + 1, 0)  # a query, the key or the value
        head = qkv_ref[:, place * head_dim : (place + 1) * head_dim].astype(jnp.float32)
        index = kv_head * group + part if kind == 0 else kv_head
        held[kind][:, index, :] = head if kind == 2 else rotated(head, kind)
    for result, wide in zip(results, held, strict=True):
        result[...] = wide[...].astype(dtype)


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
    fitting = TILE_BYTES // (4 * heads * head_dim) // TOKEN_MULTIPLE * TOKEN_MULTIPLE
    tile = min(max(fitting, TOKEN_MULTIPLE), tokens)

    def rows(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, count, head_dim), lambda step: (step, 0, 0))

    def wide(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, columns), lambda step: (step, 0))

    counts = kv_heads * (parts - 2), kv_heads, kv_heads
    factors = tuple(None if one is None else one[None] for one in weights)
    whole = tuple(
        None if one is None else pl.BlockSpec(one.shape, lambda step: (0, 0)) for one in factors
    )
    q, k, v = pl.pallas_call(
        functools.partial(_kernel, norms=norms),
        grid=(-(-tokens // tile),),
        in_specs=[wide(heads * head_dim), wide(head_dim), wide(head_dim), whole],
        out_specs=[rows(count) for count in counts],
        out_shape=[result_like(qkv, (tokens, count, head_dim), qkv.dtype) for count in counts],
        scratch_shapes=[pltpu.VMEM((tile, count, head_dim), jnp.float32) for count in counts],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpreter.of_call(interpret),
        name="split_rotate",
    )(
        qkv.reshape(tokens, heads * head_dim),
        jnp.concatenate([cos, cos], axis=1),
        jnp.concatenate([-sin, sin], axis=1),
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
