"""Paged decode attention for TPU in Pallas Mosaic.

A grid step is a slot. Its pages come through a ring of VMEM buffers (`tpu_ring`), one DMA a page
for the keys and values of all KV heads. A block of keys of all heads is ONE matrix: the scores of
all query heads are one product [H, D] x [tokens * KVH, D]^T, in which a head keeps only the columns
of its own KV head, and so is the product with the values. Each key passes the matrix unit once,
as in a product a head, and no key has to be moved to its head first; the columns of other heads
cost only softmax arithmetic, which is free beside the memory. Online softmax in base 2 and float32:
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import coverage
from pallas_kernels.compat import hbm_operand, result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.tpu_ring import (
    SCALARS,
    STATE_SIZE,
    Ring,
    block_shape,
    job_scalars,
)
from pallas_kernels.pages import compute_dtype
from pallas_kernels.tpu_pages import LANES, TILE_ROWS, PageView
from pallas_kernels.tuning import DecodeTuning, tpu_tuning

MASKED = -1e30  # finite: exp2(MASKED - MASKED) is 1, not NaN
NEVER = np.iinfo(np.int32).max  # the token of a column that no row may see


def _kernel(
    *operands: Any,
    view: PageView,
    columns: int,
    steps: int,
    scale: float,
    soft_cap: float | None,
    dtype: Any,
    by_page: bool,
) -> None:
    scalars = operands[:SCALARS]
    q, token_of, sinks, whole_scale, pool, *refs = operands[SCALARS:]
    scales = refs.pop(0) if by_page else None
    out, held = refs[:2]
    held_scales: Any = refs[2] if by_page else None
    arrived, state = refs[-2:]
    cores: Any = pl.num_programs(0)
    step = pl.program_id(1)
    ring = Ring(
        scalars, pool, scales, held, held_scales, arrived, state, view, columns,
        core=pl.program_id(0), cores=cores, steps=steps,
    )  # fmt: skip
    low, high = ring.keys(step)

    @pl.when(step == 0)
    def _() -> None:
        ring.begin()

    query = q[0].astype(dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def attend(block: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, acc = carry
        ring.fetch()
        stage = ring.arrive(step, block)
        pages = held.at[stage]
        keys = view.rows_of(pages, 0).astype(dtype)
        scores = lax.dot_general(
            query,
            keys,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )  # [H, rows]
        if by_page:
            scores = _times_columns(scores, held_scales[stage, 0])
        # factors that turn exp into exp2
        if soft_cap is None:
            scores = scores * (whole_scale[0] * (scale * math.log2(math.e)))
        else:
            scores = jnp.tanh(scores * (whole_scale[0] * (scale / soft_cap)))
            scores = scores * (soft_cap * math.log2(math.e))
        start = block * ring.tokens
        token = token_of[...]
        scores = jnp.where((token >= low - start) & (token < high - start), scores, MASKED)
        rising = jnp.maximum(highest, scores.max(axis=1, keepdims=True))
        decay = jnp.exp2(highest - rising)
        weights = jnp.exp2(scores - rising)
        total = total * decay + weights.sum(axis=1, keepdims=True)
        if not view.separate:
            # from the columns of the keys to those of their values
            weights = pltpu.roll(weights, view.shift, 1)
        if by_page:
            weights = _times_columns(weights, held_scales[stage, 1])
        values = keys if not view.separate else view.rows_of(pages, 1).astype(dtype)
        added = jnp.dot(
            weights.astype(dtype), values, preferred_element_type=jnp.float32, precision=precision
        )
        return rising, total, acc * decay + added

    sink = sinks[:, :1]
    carry = (sink, jnp.where(sink > MASKED, 1.0, 0.0), jnp.zeros(query.shape, jnp.float32))
    _, total, acc = lax.fori_loop(*ring.blocks(step), attend, carry)
    # a slot of length 0 has nothing in acc, sink or not
    mean = acc * whole_scale[1] / jnp.where(total > 0.0, total, 1.0)
    out[0] = mean.astype(out.dtype)


def _times_columns(matrix: jax.Array, factors: jax.Array) -> jax.Array:
    """A matrix [H, rows] times factors [f, 128]; each 128 of them serve equally many columns."""
    chunks = matrix.shape[1] // LANES
    repeats = chunks // factors.shape[0]
    parts = [
        matrix[:, LANES * chunk : LANES * (chunk + 1)] * factors[chunk // repeats][None]
        for chunk in range(chunks)
    ]
    return jnp.concatenate(parts, axis=1)


def column_tokens(view: PageView, pages: int, heads: int, rows: int) -> np.ndarray:
    """int32[rows, columns]: the token of the block that a query head sees there, or NEVER."""
    token, head, part = view.row_facts()
    token = (np.arange(pages)[:, None] * view.page_size + token).reshape(-1)
    head, part = np.tile(head, pages), np.tile(part, pages)
    # rows that pad the heads repeat the last head: their results are dropped
    own = np.minimum(np.arange(rows), heads - 1) // (heads // view.kv_heads)
    seen = (own[:, None] == head) & (part == 0)
    return np.where(seen, token, NEVER).astype(np.int32)


def block_scales(
    k_scale: jax.Array,  # float32[NP, KVH]
    v_scale: jax.Array,
    page_table: jax.Array,  # int32[rows, P]
    first_page: jax.Array,  # int32[]
    live: jax.Array,  # bool[rows, P]
    view: PageView,
    pages: int,
) -> jax.Array:  # float32[rows, blocks, 2, f, 128]
    """The scales of each row's pages as factors of the columns of a block.

    Where 128 columns hold the same heads as the next 128, a page has only one such set.
    """
    _, head, _ = view.row_facts()
    periodic = head.size % LANES == 0 and (head.reshape(-1, LANES) == head[:LANES]).all()
    head = head[:LANES] if periodic else head
    blocks = -(-page_table.shape[1] // pages)
    padding = ((0, 0), (0, blocks * pages - page_table.shape[1]))
    ids = jnp.pad(page_table, padding) + first_page
    live = jnp.pad(live, padding)[..., None]
    parts = []
    for scale in (k_scale, v_scale):
        # a scale that belongs to nobody's page may be NaN, and 0 * NaN is NaN
        of_page = jnp.where(live, scale.at[ids].get(mode="clip"), 0.0)
        parts.append(of_page[..., head].reshape(ids.shape[0], blocks, -1, LANES))
    return jnp.stack(parts, axis=2)


def decode(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,  # float32[H]
    k_scale: jax.Array | None,  # float32[] or float32[NP, KVH]
    v_scale: jax.Array | None,
    splits: int | None,
    first_page: jax.Array,  # int32[]
    tuning: DecodeTuning | None,
    interpret: Any,
) -> jax.Array:  # [B, H, D]
    """Attention of one query row a slot on a TPU.

    Softmax weights are rounded to the type in which attention multiplies (`compute_dtype`); scores,
    maxima, sums and outputs are float32.

    Args:
        splits: None or 1: the DMAs of the next slots hide the ends of a slot, and a TPU has one or
            two cores, which divide the slots.
        tuning: `multiprocessors` is the number of TensorCores, which share the slots.
        interpret: True or `pltpu.InterpretParams` for JAX's TPU interpreters; None compiles.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    shape = coverage.AttentionShape.of(q, kv_pages)
    coverage.require(coverage.mosaic_tpu(shape), "mosaic_tpu", q, kv_pages)
    coverage.require(coverage.mosaic_tpu_table(page_table.shape), "mosaic_tpu", q, kv_pages)
    if splits not in (None, 1):
        raise KernelError("splits", splits, "None or 1 on a TPU")
    tuning = tuning or tpu_tuning(cores=1).decode
    assert tuning is not None
    if tuning.block_tokens % LANES:
        raise KernelError("tuning.block_tokens", tuning.block_tokens, f"a multiple of {LANES}")
    return _attend(
        q,
        kv_pages,
        page_table,
        kv_lens,
        sinks,
        k_scale,
        v_scale,
        first_page,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        tuning=tuning,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "window", "tuning", "interpret"))
def _attend(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    sinks: jax.Array | None,  # float32[H]
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    first_page: jax.Array,  # int32[]
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    tuning: DecodeTuning,
    interpret: Any,
) -> jax.Array:  # [B, H, D]
    slots, heads, head_dim = q.shape
    view = PageView.of(kv_pages)
    dtype = compute_dtype(kv_pages.dtype, q.dtype)
    pages, stages = block_shape(view, kv_pages.dtype.itemsize, tuning.block_tokens, tuning.stages)
    cores = tuning.multiprocessors
    steps = -(-slots // cores)
    rows = -(-heads // TILE_ROWS) * TILE_ROWS
    block_rows = pages * view.page_rows

    low = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    scalars = job_scalars(
        jnp.arange(slots, dtype=jnp.int32), low, kv_lens, page_table, first_page, cores
    )
    padded = jnp.pad(q, ((0, steps * cores - slots), (0, rows - heads), (0, 0)))
    if sinks is None:
        sinks = jnp.full((heads,), MASKED, jnp.float32)
    sinks = jnp.maximum(sinks * math.log2(math.e), MASKED)
    sinks = jnp.broadcast_to(jnp.pad(sinks, (0, rows - heads))[:, None], (rows, LANES))
    scaled = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    by_page = scaled is not None and scaled[0].ndim == 2
    pool, in_hbm = hbm_operand(view.seen(kv_pages), interpret)
    operands = [
        padded,
        jnp.asarray(column_tokens(view, pages, heads, rows)),
        sinks,
        jnp.ones(2, jnp.float32) if by_page or scaled is None else jnp.stack(scaled),
        pool,
    ]
    in_specs = [
        pl.BlockSpec((1, rows, head_dim), lambda core, step, *_: (step * cores + core, 0, 0)),
        pl.BlockSpec((rows, block_rows), lambda *_: (0, 0)),
        pl.BlockSpec((rows, LANES), lambda *_: (0, 0)),
        pl.BlockSpec(memory_space=pltpu.SMEM),
        in_hbm,
    ]
    scratch = [pltpu.VMEM((stages, pages, *view.page_shape), kv_pages.dtype)]
    if scaled is not None and by_page:
        page = jnp.arange(page_table.shape[1])
        size = view.page_size
        live = (page * size < kv_lens[:, None]) & ((page + 1) * size > low[:, None])
        factors = block_scales(*scaled, page_table, first_page, live, view, pages)
        factors, factors_in_hbm = hbm_operand(factors, interpret)
        operands.append(factors)
        in_specs.append(factors_in_hbm)
        scratch.append(pltpu.VMEM((stages, *factors.shape[2:]), jnp.float32))
    scratch += [pltpu.SemaphoreType.DMA((stages,)), pltpu.SMEM((STATE_SIZE,), jnp.int32)]

    held = page_table.size * view.page_size  # tokens, if every slot were full
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            view=view,
            columns=page_table.shape[1],
            steps=steps,
            scale=scale,
            soft_cap=soft_cap,
            dtype=dtype,
            by_page=by_page,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=SCALARS,
            grid=(cores, steps),
            in_specs=in_specs,
            out_specs=in_specs[0],
            scratch_shapes=scratch,
        ),
        out_shape=result_like(q, padded.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * held * heads * head_dim,
            bytes_accessed=2 * held * view.kv_heads * head_dim * kv_pages.dtype.itemsize
            + 2 * q.size * q.dtype.itemsize,
            transcendentals=held * heads,
        ),
        interpret=False if interpret is None else interpret,
        name="paged_decode",
    )(*scalars, *operands)
    return out[:slots, :heads]
