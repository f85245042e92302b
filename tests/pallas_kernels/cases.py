"""Random paged attention problems in which everything that must not be read is NaN."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import PrefillLanes

EIGHT_BITS = ("int8", "float8_e4m3fn", "uint8")


class Case(NamedTuple):
    """Operands of one call."""

    q: jnp.ndarray
    kv_pages: jnp.ndarray
    page_table: jnp.ndarray
    lengths: jnp.ndarray  # tokens of each row of the page table
    first_page: int
    scales: dict[str, jnp.ndarray]  # k_scale and v_scale of 8-bit pages, else empty

    @property
    def options(self) -> dict:
        """The keyword arguments that belong to the pool."""
        return {"first_page": self.first_page, **self.scales}


def stored(values: np.ndarray, pool: str) -> np.ndarray:
    """Float32 values in the type of a pool; uint16 and uint8 mean bfloat16 and e4m3 bits."""
    if pool == "uint16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if pool == "uint8":
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if pool == "int8":
        # a token that nobody may see (NaN) is the largest number, which would be noticed
        return np.where(np.isnan(values), 127, np.round(values * 32)).astype(np.int8)
    return values.astype(jnp.dtype(pool))


def pool_scales(
    rng: np.random.Generator, content: np.ndarray, pool: str, per_token: bool
) -> dict[str, jnp.ndarray]:
    """Random scales of the pool, or of each token and KV head: NaN for tokens that nobody sees.

    As bits where the pool is stored as its bits.
    """
    seen = ~np.isnan(content).all(axis=(2, 4)).swapaxes(1, 2)  # [NP, KVH, page_size]
    scales = {}
    for name in ("k_scale", "v_scale"):
        by_token = rng.uniform(0.01, 0.04, seen.shape).astype(ml_dtypes.bfloat16)
        by_token[~seen] = np.nan
        if per_token:
            scales[name] = jnp.asarray(by_token.view(np.uint16) if pool == "uint8" else by_token)
        else:
            scales[name] = jnp.float32(rng.uniform(0.01, 0.04))
    return scales


def paged_case(
    rng: np.random.Generator,
    lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pool: str,
    rows: int | None = None,
    columns: int | None = None,
    first_page: int = 0,
    share: bool = True,
    shared: dict[int, int] | None = None,
    first_seen: list[int] | None = None,
    stale: bool = False,
    total: int | None = None,
    per_token: bool = True,
    query: str | None = None,
    queries: int | None = None,
) -> Case:
    """Pages in random order; what nobody may see is NaN, the rest of the pool too.

    Pools of int8, float8_e4m3fn and uint8 have scales by token and head, or one with
    per_token=False; the query is of the pool's type, bfloat16 for 8-bit pools, or as given.

    Args:
        share: rows 0 and 1 share their full pages; `shared` says it for any rows.
        shared: the row before it with which a row shares the full pages that both have.
        first_seen: the first token of each row that its window reaches; 0 when not given.
        stale: entries of the page table behind a row's pages name any page, not the trash page.
        queries: of each row, as a second axis of q.
        total: pages; a given number lets cases of many lengths share one compilation.
    """
    pages = [-(-length // page_size) for length in lengths]
    columns = max(1, *pages) if columns is None else columns
    total = 1 + sum(pages) + 3 if total is None else total
    shared = ({1: 0} if share else {}) if shared is None else shared
    free = list(rng.permutation(np.arange(1, total)))
    table = np.zeros((len(lengths), columns), np.int32)  # unused entries name the trash page
    if stale:
        table[:] = rng.integers(0, total, table.shape)
    visible = np.zeros((first_page + total, page_size), bool)
    for row, length in enumerate(lengths):
        other = shared.get(row)
        full = 0 if other is None else min(length, lengths[other]) // page_size
        for column in range(pages[row]):
            table[row, column] = table[other, column] if column < full else free.pop()
        seen = np.arange(0 if first_seen is None else first_seen[row], length)
        visible[first_page + table[row, seen // page_size], seen % page_size] = True
    content = np.full((*visible.shape, 2, kv_heads, head_dim), np.nan, np.float32)
    content[visible] = rng.standard_normal((visible.sum(), 2, kv_heads, head_dim), np.float32)
    rows = len(lengths) if rows is None else rows
    axis = () if queries is None else (queries,)
    q = rng.standard_normal((rows, *axis, heads, head_dim), np.float32)
    scales = {}
    if pool in EIGHT_BITS:
        scales = pool_scales(rng, content, pool, per_token)
    q_type = query or ("bfloat16" if pool in ("uint16", *EIGHT_BITS) else pool)
    return Case(
        jnp.asarray(q.astype(jnp.dtype(q_type))),
        jnp.asarray(stored(content, pool)),
        jnp.asarray(table),
        jnp.asarray(lengths, jnp.int32),
        first_page,
        scales,
    )


def packed_lanes(
    rng: np.random.Generator, chunks: list[int], contexts: list[int], gaps: bool
) -> tuple[PrefillLanes, int]:
    """Lanes in random order in the region, with rows of no lane between them; and its size."""
    starts, cursor = [0] * len(chunks), 0
    for lane in rng.permutation(len(chunks)):
        cursor += int(rng.integers(0, 4)) if gaps else 0
        starts[lane] = cursor
        cursor += chunks[lane]
    region = max(1, cursor + (int(rng.integers(0, 4)) if gaps else 0))
    as_int32 = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
    return PrefillLanes(as_int32(starts), as_int32(chunks), as_int32(contexts)), region
