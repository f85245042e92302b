"""Paged decode attention for TPU in Pallas Mosaic.

A grid step is a slot. Its pages come through a ring of VMEM buffers (`tpu_ring`), one DMA a page
for the keys and values of all KV heads. A block of keys of all heads is ONE matrix: the scores of
all query heads are one product [H, D] x [tokens * KVH, D]^T, in which a head keeps only the columns
of its own KV head, and so is the product with the values. Each key passes the matrix unit once,
as in a product a head, and no key has to be moved to its head first; the columns of other heads
cost only softmax arithmetic, which is free beside the memory. Online softmax in base 2 and float32:
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

`decode_and_write` is the same kernel with the step's own tokens as a further operand: a slot's
softmax begins with its new token, and its row goes into the pages (`tpu_new_tokens`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import coverage
from pallas_kernels.compat import hbm_operand, result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
from pallas_kernels.paged_attention.tpu_columns import block_scales, column_tokens, times_columns
from pallas_kernels.paged_attention.tpu_new_tokens import NewTokens
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


def _kernel(
    *operands: Any,
    view: PageView,
    columns: int,
    steps: int,
    options: Scores,
    dtype: Any,
    by_page: bool,
    group: int | None,
) -> None:
    scale, soft_cap, _window = options
    scalars, refs = operands[:SCALARS], list(operands[SCALARS:])
    lengths = refs.pop(0) if group else None
    q, token_of, sinks, whole_scale, pool, *refs = refs
    scales = refs.pop(0) if by_page else None
    rows, source = (refs.pop(0), refs.pop(0)) if group else (None, None)
    out = refs.pop(0)
    # the pool as an output, which is the input too
    pool = refs.pop(0) if group else pool
    held: Any = refs.pop(0)
    held_scales: Any = refs.pop(0) if by_page else None
    arrived, state, *written = refs
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

    def scaled(scores: jax.Array) -> jax.Array:
        """Scores with the factors that turn exp into exp2."""
        if soft_cap is None:
            return scores * (whole_scale[0] * (scale * math.log2(math.e)))
        scores = jnp.tanh(scores * (whole_scale[0] * (scale / soft_cap)))
        return scores * (soft_cap * math.log2(math.e))

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
            scores = times_columns(scores, held_scales[stage, 0])
        scores = scaled(scores)
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
            weights = times_columns(weights, held_scales[stage, 1])
        values = keys if not view.separate else view.rows_of(pages, 1).astype(dtype)
        added = jnp.dot(
            weights.astype(dtype), values, preferred_element_type=jnp.float32, precision=precision
        )
        return rising, total, acc * decay + added

    highest = sinks[:, :1]
    total = jnp.where(highest > MASKED, 1.0, 0.0)
    acc = jnp.zeros(query.shape, jnp.float32)
    if group:
        new = NewTokens(ring, lengths, rows, source, written[0], group)
        live = new.live(step)
        key, value = (new.by_head(part, query, precision) for part in (0, 1))
        score = scaled((query.astype(jnp.float32) * key).sum(axis=1, keepdims=True))
        score = jnp.where(live, score, MASKED)
        rising = jnp.maximum(highest, score)
        weight = jnp.where(live, jnp.exp2(score - rising), 0.0)
        total = total * jnp.exp2(highest - rising) + weight
        # the row of an idle slot may be NaN
        acc, highest = jnp.where(live, weight * value, 0.0), rising
    carry = (highest, total, acc)
    _, total, acc = lax.fori_loop(*ring.blocks(step), attend, carry)
    # a slot of length 0 has nothing in acc, sink or not
    mean = acc * whole_scale[1] / jnp.where(total > 0.0, total, 1.0)
    out[0] = mean.astype(out.dtype)
    if group:
        # after the last block: no DMA reads the page any more
        new.write(step)


def decode(
    q: jax.Array,  # [B, 1, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    splits: int | None,
    tuning: DecodeTuning | None,
    interpret: Any,
) -> jax.Array:  # [B, 1, H, D]
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
    if splits not in (None, 1):
        raise KernelError("splits", splits, "None or 1 on a TPU")
    tuning = _checked_tuning(q, kv_pages, page_table, coverage.mosaic_tpu, tuning)
    q = q[:, 0]
    return _attend(
        q, kv_pages, page_table, kv_lens, None, options, tuning=tuning, interpret=interpret
    )[0][:, None]


def decode_and_write(
    q: jax.Array,  # [B, H, D]
    new: jax.Array,  # [B, 2, KVH, D], in the pool's own element type
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    tuning: DecodeTuning | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # [B, H, D], [NP, page_size, 2, KVH, D]
    """As `decode`, where token kv_lens - 1 of each slot is `new` and not in the pages yet.

    Returns:
        The attention output, and the pool with the new tokens: in place when it is donated.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    tuning = _checked_tuning(q, kv_pages, page_table, coverage.mosaic_tpu_write, tuning)
    out, pool = _attend(
        q, kv_pages, page_table, kv_lens, new, options, tuning=tuning, interpret=interpret
    )
    assert pool is not None
    return out, pool


def _checked_tuning(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    covers: Callable[[coverage.AttentionShape], KernelError | None],
    tuning: DecodeTuning | None,
) -> DecodeTuning:
    shape = coverage.AttentionShape.of(q, kv_pages)
    coverage.require(covers(shape), "mosaic_tpu", q, kv_pages)
    coverage.require(coverage.mosaic_tpu_table(page_table.shape), "mosaic_tpu", q, kv_pages)
    tuning = tuning or tpu_tuning(cores=1).decode
    assert tuning is not None
    if tuning.block_tokens % LANES:
        raise KernelError("tuning.block_tokens", tuning.block_tokens, f"a multiple of {LANES}")
    return tuning


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def _attend(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    new: jax.Array | None,  # [B, 2, KVH, D]; scales are by page only where it is None
    options: AttentionOptions,
    *,
    tuning: DecodeTuning,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:  # [B, H, D], [NP, page_size, 2, KVH, D]
    window, sinks, first_page = options.scores.window, options.sinks, options.first_page
    slots, heads, head_dim = q.shape
    view = PageView.of(kv_pages)
    dtype = compute_dtype(kv_pages.dtype, q.dtype)
    pages, stages = block_shape(view, kv_pages.dtype.itemsize, tuning.block_tokens, tuning.stages)
    cores = tuning.multiprocessors
    steps = -(-slots // cores)
    rows = -(-heads // TILE_ROWS) * TILE_ROWS
    block_rows = pages * view.page_rows

    low = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    high = kv_lens
    if new is not None:
        # what is read of the pages ends before the new token
        high = jnp.where(kv_lens - 1 > low, kv_lens - 1, 0)
        low = jnp.minimum(low, high)
    slot = jnp.arange(slots, dtype=jnp.int32)
    scalars = job_scalars(slot, low, high, page_table, first_page, cores)
    padded = jnp.pad(q, ((0, steps * cores - slots), (0, rows - heads), (0, 0)))
    if sinks is None:
        sinks = jnp.full((heads,), MASKED, jnp.float32)
    sinks = jnp.maximum(sinks * math.log2(math.e), MASKED)
    sinks = jnp.broadcast_to(jnp.pad(sinks, (0, rows - heads))[:, None], (rows, LANES))
    k_scale, v_scale = options.k_scale, options.v_scale
    scaled = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    by_page = scaled is not None and scaled[0].ndim == 2
    pool, whole = view.seen(kv_pages), pl.BlockSpec(memory_space=pl.ANY)
    if new is None:
        pool, whole = hbm_operand(pool, interpret)
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
        whole,
    ]
    scratch = [pltpu.VMEM((stages, pages, *view.page_shape), kv_pages.dtype)]
    if scaled is not None and by_page:
        page = jnp.arange(page_table.shape[1])
        size = view.page_size
        live = (page * size < high[:, None]) & ((page + 1) * size > low[:, None])
        factors = block_scales(*scaled, page_table, first_page, live, view, pages)
        factors, factors_in_hbm = hbm_operand(factors, interpret)
        operands.append(factors)
        in_specs.append(factors_in_hbm)
        scratch.append(pltpu.VMEM((stages, *factors.shape[2:]), jnp.float32))
    scratch += [pltpu.SemaphoreType.DMA((stages,)), pltpu.SMEM((STATE_SIZE,), jnp.int32)]
    out_specs, out_shapes = [in_specs[0]], [result_like(q, padded.shape, q.dtype)]
    aliases = {}
    if new is not None:
        jobs = steps * cores
        scalars += (jnp.pad(kv_lens, (0, jobs - slots)),)
        tokens = view.tokens(new)
        tokens = jnp.pad(tokens, ((0, 0), (0, jobs - slots), (0, 0), (0, 0)))
        parts, count = view.token_parts
        token_of_job = pl.BlockSpec(
            (parts, 1, count, head_dim), lambda core, step, *_: (0, step * cores + core, 0, 0)
        )
        operands += [tokens, tokens]
        in_specs += [token_of_job, whole]
        out_specs.append(whole)
        out_shapes.append(result_like(kv_pages, pool.shape, pool.dtype))
        aliases = {len(scalars) + 4: 1}  # the pool
        scratch.append(pltpu.SemaphoreType.DMA)

    held = page_table.size * view.page_size  # tokens, if every slot were full
    out, *written = pl.pallas_call(
        functools.partial(
            _kernel,
            view=view,
            columns=page_table.shape[1],
            steps=steps,
            options=options.scores,
            dtype=dtype,
            by_page=by_page,
            group=None if new is None else heads // view.kv_heads,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, steps),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shapes,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * held * heads * head_dim,
            bytes_accessed=2 * held * view.kv_heads * head_dim * kv_pages.dtype.itemsize
            + 2 * q.size * q.dtype.itemsize,
            transcendentals=held * heads,
        ),
        interpret=False if interpret is None else interpret,
        name="paged_decode" if new is None else "paged_decode_and_write",
    )(*scalars, *operands)
    return out[:slots, :heads], view.restored(written[0]) if written else None
