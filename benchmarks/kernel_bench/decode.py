"""Decode attention: ours, cuDNN, FlashInfer and torch's SDPA; on a TPU JAX's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.isolated import describe
from benchmarks.kernel_bench.bench import Bench
from benchmarks.kernel_bench.cases import DecodeCase
from benchmarks.kernel_bench.contest import Entries, Program, Rotations
from benchmarks.kernel_bench.operands import INT8_SCALE, Pool, make_pool, page_tables, queries
from benchmarks.kernel_bench.rows import JAX_OP, OURS, UNIFORM, Row, missing
from pallas_kernels import paged_decode_attention

CUDNN = "cuDNN paged attention"
CUDNN_ROTATIONS = 4  # it takes an array a layer: more of them would be thousands of arguments
TPU_PAGES_A_BLOCK = 8


def quantized_options(case: DecodeCase) -> dict[str, jax.Array]:
    """Scales for pages that need them."""
    if case.dtype not in ("int8", "float8_e4m3fn"):
        return {}
    scale = jnp.float32(INT8_SCALE if case.dtype == "int8" else 1.0)
    return {"k_scale": scale, "v_scale": scale}


def ours(case: DecodeCase, pool: Pool, q: jax.Array) -> tuple[Callable[..., Any], Rotations]:
    """Our kernel through its public function, the layers of a step one after the other.

    The program takes the backend and its options by keyword.
    """
    scales = quantized_options(case)

    def program(
        q: jax.Array, kv_pages: jax.Array, table: jax.Array, lens: jax.Array, **kernel: Any
    ) -> jax.Array:
        attend = functools.partial(paged_decode_attention, scale=1.0, **kernel, **scales)
        for layer in range(pool.layers):
            q = attend(q, kv_pages, table, lens, first_page=pool.first_page(layer))
        return q

    lens = jnp.asarray(case.lengths, jnp.int32)
    return program, [(q, pool.kv_pages, table, lens) for table in pool.tables]


def jax_tpu_op(case: DecodeCase, pool: Pool, q: jax.Array) -> Program:
    """`jax.experimental.pallas.ops.tpu.paged_attention`, its head-major pages made beforehand."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    block = min(TPU_PAGES_A_BLOCK, case.pages)

    def program(
        q: jax.Array, k: jax.Array, v: jax.Array, lens: jax.Array, *tables: jax.Array
    ) -> jax.Array:
        for layer in range(pool.layers):
            table = tables[layer % pool.copies]
            q = paged_attention(q, k, v, lens, table, pages_per_compute_block=block)
        return q

    @functools.partial(jax.jit, static_argnums=1)
    def part_of(kv_pages: jax.Array, part: int) -> jax.Array:  # [KVH, NP, page_size, D]
        return kv_pages[:, :, part].transpose(2, 0, 1, 3)

    k, v = (part_of(pool.kv_pages, part) for part in (0, 1))
    lens = jnp.full((case.slots,), case.context, jnp.int32)
    rotations = [
        (q, k, v, lens, *(table + pool.first_page(layer) for layer in range(pool.copies)))
        for table in pool.tables
    ]
    return program, rotations, f"pages_per_compute_block={block}"


def cudnn(case: DecodeCase, pool: Pool, q: jax.Array) -> Program:
    """cuDNN's paged attention: JAX's private call, one array of exactly B * P pages a layer."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    def program(
        q: jax.Array, table: jax.Array, q_lens: jax.Array, lens: jax.Array, *arrays: jax.Array
    ) -> jax.Array:
        query = q[:, None]  # [B, 1, H, D]
        tables = table[:, None, :, None]  # [B, 1, P, 1]
        for layer in range(pool.layers):
            k, v = arrays[2 * (layer % pool.copies) :][:2]
            query = paged_attention(
                query, k, v, q_lens, lens, tables, tables, scale=1.0, mask_type=MaskType.PADDING
            )
        return query[:, 0]

    @functools.partial(jax.jit, static_argnums=(2,))
    def part_of(kv_pages: jax.Array, first: jax.Array, part: int) -> jax.Array:
        held = jax.lax.dynamic_slice_in_dim(kv_pages, first, pool.layer_pages)
        return held[:, :, part]  # [NP, page_size, KVH, D]

    def arrays(rotation: int) -> list[jax.Array]:
        first = 1 + rotation * pool.copies * pool.layer_pages
        return [
            part_of(pool.kv_pages, first + layer * pool.layer_pages, part)
            for layer in range(pool.copies)
            for part in (0, 1)
        ]

    ones = jnp.ones((case.slots,), jnp.int32)
    lens = jnp.full((case.slots,), case.context, jnp.int32)
    count = min(CUDNN_ROTATIONS, len(pool.tables))
    table = pool.tables[0] - 1
    rotations = [(q, table, ones, lens, *arrays(rotation)) for rotation in range(count)]
    distinct = count * pool.copies * case.layer_bytes
    note = "" if distinct > 2**28 else f"only {distinct / 2**20:.0f} MiB of pages: may sit in cache"
    return program, rotations, note


def peers(
    bench: Bench, case: DecodeCase, pool: Pool, q: jax.Array
) -> dict[str, Callable[[], Program]]:
    """The candidates on this platform, in the order in which they are built."""
    if case.dtype != "bfloat16" or case.ragged or not bench.peers:
        return {}
    if bench.platform == "tpu":
        return {JAX_OP: functools.partial(jax_tpu_op, case, pool, q)}
    if bench.platform != "gpu" and not bench.dry_run:
        return {}
    return {CUDNN: functools.partial(cudnn, case, pool, q)}


def entries(bench: Bench, case: DecodeCase) -> Entries:
    """Ours and what is compared with it, on the same pages."""
    try:
        pool = make_pool(case, bench.memory, bench.cold_bytes)
    except MemoryError as error:
        return Entries(missing=[missing(case, OURS, str(error))])
    q = queries(case.slots, case)
    rows: list[Row] = []
    program, rotations = ours(case, pool, q)
    chosen = functools.partial(program, **bench.backends.decode_options)
    programs: dict[str, Program] = {OURS: (chosen, rotations, bench.backends.decode)}
    tolerances = {}
    if case.ragged:
        even = replace(case, ragged=False)
        tables = page_tables(even, len(pool.tables), pool.copies * pool.layer_pages)
        uniform, turns = ours(even, pool._replace(tables=tables), q)
        run = functools.partial(uniform, **bench.backends.decode_options)
        programs[UNIFORM] = run, turns, "the same pages, as many for every request"
        tolerances[UNIFORM] = math.inf  # other requests, other results
    left = bench.memory - pool.kv_pages.nbytes
    for name, build in peers(bench, case, pool, q).items():
        left -= pool.kv_pages.nbytes  # each has the pages in a layout of its own
        try:
            if left < 0:
                raise MemoryError("a second layout of the pages does not fit beside ours")
            programs[name] = build()
        except Exception as error:  # not there, or it refuses the shape: a row
            rows.append(missing(case, name, describe(error)))
    return Entries(programs, pool.layers, rows, tolerances=tolerances)
