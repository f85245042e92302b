"""Prefill attention: ours against pages, cuDNN on contiguous keys, FlashInfer and torch's SDPA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_bench.bench import Bench
from benchmarks.kernel_bench.cases import PrefillCase
from benchmarks.kernel_bench.contest import Entries, Program, Rotations
from benchmarks.kernel_bench.operands import Pool, make_pool, queries
from benchmarks.kernel_bench.rows import OURS, Row, missing
from pallas_kernels import PrefillLanes, paged_prefill_attention

CUDNN = "cuDNN, contiguous"
LAYERS = 4  # operations in one program: each takes long enough to hide its launch


def ours(
    case: PrefillCase, pool: Pool, q: jax.Array, layers: int
) -> tuple[Callable[..., Any], Rotations]:
    """Our kernel: packed chunks against pages that hold them already.

    The program takes the backend and its options by keyword.
    """

    def program(
        q: jax.Array, kv_pages: jax.Array, table: jax.Array, lanes: PrefillLanes, **kernel: Any
    ) -> jax.Array:
        attend = functools.partial(paged_prefill_attention, scale=1.0, **kernel)
        for layer in range(layers):
            q = attend(q, kv_pages, table, lanes, first_page=pool.first_page(layer))
        return q

    lanes = PrefillLanes(
        jnp.arange(case.lanes, dtype=jnp.int32) * case.chunk,
        jnp.full((case.lanes,), case.chunk, jnp.int32),
        jnp.full((case.lanes,), case.prior, jnp.int32),
    )
    return program, [(q, pool.kv_pages, table, lanes) for table in pool.tables]


def cudnn(case: PrefillCase, pool: Pool, q: jax.Array, implementation: str, layers: int) -> Program:
    """`jax.nn.dot_product_attention` on keys and values that were gathered beforehand."""
    tokens = case.chunk  # its causal mask starts at the first key, so there is no prior context

    def program(q: jax.Array, *arrays: jax.Array) -> jax.Array:
        query = q.reshape(case.lanes, tokens, case.heads, case.head_dim)
        for layer in range(layers):
            k, v = arrays[2 * (layer % pool.copies) :][:2]
            query = jax.nn.dot_product_attention(
                query, k, v, scale=1.0, is_causal=True, implementation=implementation
            )
        return query.reshape(q.shape)

    @jax.jit
    def gathered(kv_pages: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        held = kv_pages[table]  # [lanes, P, page_size, 2, KVH, D]
        held = held.reshape(case.lanes, -1, *held.shape[3:])[:, :tokens]
        return held[:, :, 0], held[:, :, 1]

    arrays: list[jax.Array] = []
    for layer in range(pool.copies):
        arrays += gathered(pool.kv_pages, pool.tables[0] + pool.first_page(layer))
    return program, [(q, *arrays)], "keys and values contiguous, no pages"


def entries(bench: Bench, case: PrefillCase) -> Entries:
    """Ours and what is compared with it, on the same pages."""
    try:
        pool = make_pool(case.as_decode, bench.memory, min(bench.cold_bytes, 2**28))
    except MemoryError as error:
        return Entries(missing=[missing(case, OURS, str(error))])
    layers = min(LAYERS, pool.layers)
    q = queries(case.lanes * case.chunk, case.as_decode)
    program, rotations = ours(case, pool, q, layers)
    chosen = functools.partial(program, **bench.backends.prefill_options())
    programs: dict[str, Program] = {OURS: (chosen, rotations, bench.backends.prefill)}
    rows: list[Row] = []
    if not bench.peers:
        return Entries(programs, layers, rows)
    if case.prior:
        reason = "its causal mask has no place for tokens before the chunk"
        rows.append(missing(case, CUDNN, reason))
    elif bench.platform == "gpu" or bench.dry_run:
        implementation = "xla" if bench.dry_run else "cudnn"
        programs[CUDNN] = cudnn(case, pool, q, implementation, layers)
    return Entries(programs, layers, rows)
