"""Rotation of queries and keys and the write into the pages, by Pallas' Triton backend, in place.

A program has one KV head of one token: its query heads are the rows of a small tile, in two halves,
since dimension i is turned with i + D / 2. Queries leave as they were, one
contiguous row a head; the key and the value go to their rows of the pool, which is an input that is
also the output. XLA does this in two kernels, and each computes the rotation and adds the parts of
the projection for itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.linear.api import Norm
from pallas_kernels.paged_attention.triton.block import padded, pool_rows, require_addressable
from pallas_kernels.pages import as_stored, value_dtype

NUM_WARPS = 2  # a tile is a few heads: 4 x 64 numbers twice in Llama-3

Halves = tuple[jax.Array, jax.Array]  # dimensions 0 .. D / 2 and the others, float32[rows, D / 2]


class Operands(NamedTuple):
    """References of the kernel's operands; None for what a call does without."""

    qkv: Any  # [S, T, KVH, G + 2, D]
    cos: Any  # float32[T, D / 2]
    sin: Any  # float32[T, D / 2]
    pages: Any  # int32[T]
    offsets: Any  # int32[T]
    first_page: Any  # int32[1]
    q_weight: Any  # [D]
    k_weight: Any  # [D]
    pool: Any  # the pool as rows, which is the second result


def _kernel(
    given: Operands,
    q: Any,  # [T, H, D]
    pool: Any,  # [NP * page_size * 2 * KVH, D]
    *,
    page_size: int,
    q_norm: tuple[float, bool],
    k_norm: tuple[float, bool],
) -> None:
    parts, _, kv_heads, rows, head_dim = given.qkv.shape
    token, kv_head = pl.program_id(0), pl.program_id(1)
    group, half = rows - 2, head_dim // 2
    column = jnp.arange(padded(half))
    inside = column < half
    halves = (column, half + column)
    cos, sin = (
        plt.load(table.at[token, column], mask=inside, other=0)[None, :]
        for table in (given.cos, given.sin)
    )

    def rounded(values: jax.Array) -> jax.Array:
        return values.astype(q.dtype).astype(jnp.float32)

    def heads(row: jax.Array, held: jax.Array) -> Halves:
        """The named rows of the projection: the sum of their parts."""

        def part(columns: jax.Array) -> jax.Array:
            total = jnp.zeros(held.shape, jnp.float32)
            for split in range(parts):
                place = given.qkv.at[split, token, kv_head, row[:, None], columns[None, :]]
                total += plt.load(place, mask=held, other=0).astype(jnp.float32)
            return rounded(total)

        return part(halves[0]), part(halves[1])

    def normed(values: Halves, weight: Any, eps: float, offset: bool) -> Halves:
        if weight is None:
            return values
        squares = sum((part * part).sum(axis=1) for part in values)
        over = lax.rsqrt(squares / head_dim + eps)[:, None]

        def weighted(part: jax.Array, columns: jax.Array) -> jax.Array:
            factor = plt.load(weight.at[columns], mask=inside, other=0).astype(jnp.float32)[None, :]
            plain = part * over
            return rounded(plain * (1.0 + factor) if offset else rounded(plain) * factor)

        return weighted(values[0], halves[0]), weighted(values[1], halves[1])

    def turned(values: Halves) -> Halves:
        first, second = values
        return first * cos - second * sin, second * cos + first * sin

    row, one = jnp.arange(padded(group)), jnp.arange(1)
    of_queries = (row < group)[:, None] & inside[None, :]
    queries = turned(normed(heads(row, of_queries), given.q_weight, *q_norm))
    for values, columns in zip(queries, halves, strict=True):
        place = q.at[token, (kv_head * group + row)[:, None], columns[None, :]]
        plt.store(place, values.astype(q.dtype), mask=of_queries)
    key = turned(normed(heads(group + one, inside[None, :]), given.k_weight, *k_norm))
    value = heads(group + 1 + one, inside[None, :])
    page = given.first_page[0] + given.pages[token]
    token_row = (page * page_size + given.offsets[token]) * (2 * kv_heads)
    for row_of_it, stored in ((kv_head, key), (kv_heads + kv_head, value)):
        for values, columns in zip(stored, halves, strict=True):
            kept = values.astype(q.dtype).astype(value_dtype(pool.dtype))
            place = pool.at[(token_row + row_of_it + one)[:, None], columns[None, :]]
            plt.store(place, as_stored(kept, pool.dtype), mask=inside[None, :])


def rotate_and_write(
    qkv: jax.Array,  # [S, T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    first_page: jax.Array,  # int32[]
    *,
    dtype: jnp.dtype,
    q_norm: Norm | None,
    k_norm: Norm | None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:  # [T, KVH * G, D], [NP, page_size, 2, KVH, D]
    """As `pallas_kernels.rotate_and_write.rotate_and_write`; the shapes are those that
    its record takes.

    Raises:
        KernelError: the pool has more rows than the kernel can count.
    """
    require_addressable(kv_pages)
    operands = Operands(
        qkv=qkv,
        cos=cos,
        sin=sin,
        pages=page_ids,
        offsets=offsets,
        first_page=first_page.reshape(1),
        q_weight=None if q_norm is None else q_norm.weight,
        k_weight=None if k_norm is None else k_norm.weight,
        pool=pool_rows(kv_pages),
    )
    q, pool = _call(
        operands,
        dtype=dtype,
        page_size=kv_pages.shape[1],
        q_norm=(0.0, False) if q_norm is None else (q_norm.eps, q_norm.offset),
        k_norm=(0.0, False) if k_norm is None else (k_norm.eps, k_norm.offset),
        interpret=interpreter.is_used_by_triton(interpret),
    )
    return q, pool.reshape(kv_pages.shape)


@functools.partial(
    jax.jit, static_argnames=("dtype", "page_size", "q_norm", "k_norm", "interpret")
)  # the layers share one trace
def _call(
    operands: Operands,
    *,
    dtype: jnp.dtype,
    page_size: int,
    q_norm: tuple[float, bool],
    k_norm: tuple[float, bool],
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    _, tokens, kv_heads, rows, head_dim = operands.qkv.shape
    pool = operands.pool
    kernel = functools.partial(_kernel, page_size=page_size, q_norm=q_norm, k_norm=k_norm)
    q, pool = pl.pallas_call(
        kernel,
        out_shape=(
            result_like(operands.qkv, (tokens, kv_heads * (rows - 2), head_dim), dtype),
            result_like(pool, pool.shape, pool.dtype),
        ),
        grid=(tokens, kv_heads),  # the first axis alone takes more than 65,535
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(operands)
    return q, pool
