"""Paged decode attention for TPU in Pallas Mosaic.

A grid step is a slot. Its pages come through a ring of VMEM buffers (`ring`), one DMA a page
for the keys and values of all KV heads. A block of keys of all heads is ONE matrix: the scores of
all query heads are one product [H, D] x [tokens * KVH, D]^T, in which a head keeps only the columns
of its own KV head, and so is the product with the values. Each key passes the matrix unit once,
as in a product a head, and no key has to be moved to its head first; the columns of other heads
cost only softmax arithmetic, which is free beside the memory. Several queries a slot are more rows
of that product, each query with a mask of its own (`queries`). Online softmax in base 2 and
float32: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

`decode_and_write` is the same kernel with the step's own tokens as a further operand: a slot's
softmax begins with its new tokens, and their rows go into the pages (`tpu_new_tokens`).
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
from pallas_kernels.backends.mosaic_tpu import TpuDecodeTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
from pallas_kernels.paged_attention.queries import key_range
from pallas_kernels.paged_attention.softmax import LOG2E, MASKED, base2_scores
from pallas_kernels.paged_attention.tpu.columns import (
    block_scales,
    column_tokens,
    head_scores,
    times_columns,
    weighted_values,
)
from pallas_kernels.paged_attention.tpu.new_tokens import NewTokens
from pallas_kernels.paged_attention.tpu.queries import Queries, query_block, stacked
from pallas_kernels.paged_attention.tpu.ring import (
    SCALARS,
    STATE_SIZE,
    Ring,
    block_shape,
    check,
    job_scalars,
)
from pallas_kernels.pages import compute_dtype
from pallas_kernels.tpu_pages import LANES, TILE_ROWS, PageView

# an online softmax of some rows: the highest score, the sum, and the sum of weighted values
Rows = tuple[jax.Array, jax.Array, jax.Array]  # float32 [rows, 1], [rows, 1], [rows, D]


def _kernel(
    *operands: Any,
    view: PageView,
    columns: int,
    steps: int,
    options: Scores,
    dtype: Any,
    by_token: bool,
    group: int | None,
    queries: int,
) -> None:
    window = options.window
    scalars, refs = operands[:SCALARS], list(operands[SCALARS:])
    lengths: Any = refs.pop(0) if group or queries > 1 else None
    counts: Any = refs.pop(0) if queries > 1 else None
    q, token_of, sinks, whole_scale, pool, *refs = refs
    scales = refs.pop(0) if by_token else None
    token_rows, source = (refs.pop(0), refs.pop(0)) if group else (None, None)
    out = refs.pop(0)
    # the pool as an output, which is the input too
    pool = refs.pop(0) if group else pool
    held: Any = refs.pop(0)
    held_scales: Any = refs.pop(0) if by_token else None
    arrived, state, *written = refs
    cores: Any = pl.num_programs(0)
    step = pl.program_id(1)
    ring = Ring(
        scalars, pool, scales, held, held_scales, arrived, state, view, columns,
        core=pl.program_id(0), cores=cores, steps=steps,
    )  # fmt: skip
    low, high = ring.keys(step)
    job = step * cores + ring.core
    of_slot = Queries(
        queries,
        rows=token_of.shape[0],
        columns=token_of.shape[1],
        length=high if counts is None else lengths[job],
        count=1 if counts is None else counts[job],
        window=window,
    )

    @pl.when(step == 0)
    def _() -> None:
        ring.begin()

    query = q[0].astype(dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def scaled(scores: jax.Array) -> jax.Array:
        """Scores with the factors that turn exp into exp2."""
        return base2_scores(scores, whole_scale[0], options)

    def attend(block: Any, carry: tuple[Rows, ...]) -> tuple[Rows, ...]:
        ring.fetch()
        stage = ring.arrive(step, block)
        return tuple(
            attend_chunk(block, stage, chunk, rows) for chunk, rows in zip(of_slot.chunks(), carry)
        )

    def attend_chunk(block: Any, stage: Any, chunk: range, carry: Rows) -> Rows:
        highest, total, acc = carry
        pages = held.at[stage]
        keys = view.rows_of(pages, 0).astype(dtype)
        scores = head_scores(of_slot.of(query, chunk), keys, view, precision)
        if by_token:
            scores = times_columns(scores, held_scales[stage, 0])
        scores = scaled(scores)
        start = block * ring.tokens
        token = token_of[...]

        def masked(query: int) -> jax.Array:
            first, end = of_slot.keys(query, low, high)
            begin = (query - chunk.start) * of_slot.rows
            own = scores if len(chunk) == 1 else scores[begin : begin + of_slot.rows]
            return jnp.where((token >= first - start) & (token < end - start), own, MASKED)

        scores = stacked(map(masked, chunk))
        rising = jnp.maximum(highest, scores.max(axis=1, keepdims=True))
        decay = jnp.exp2(highest - rising)
        weights = jnp.exp2(scores - rising)
        total = total * decay + weights.sum(axis=1, keepdims=True)
        if not view.separate:
            # from the columns of the keys to those of their values
            weights = pltpu.roll(weights, view.shift, 1)
        if by_token:
            weights = times_columns(weights, held_scales[stage, 1])
        values = keys if not view.separate else view.rows_of(pages, 1).astype(dtype)
        added = weighted_values(weights, values, view, dtype, precision)
        return rising, total, acc * decay + added

    highest = sinks[:, :1]
    total = jnp.where(highest > MASKED, 1.0, 0.0)
    acc = jnp.zeros((of_slot.rows, query.shape[1]), jnp.float32)
    softmaxes: list[Rows] = [(highest, total, acc)] * queries
    if group:
        new = NewTokens(ring, lengths, counts, token_rows, source, written[0], group)
        numbers = query.astype(jnp.float32)
        for token in range(queries):
            live = new.live(step, token)
            key, value = (
                new.by_head(part, token, of_slot.rows, dtype, precision) for part in (0, 1)
            )
            for i in range(token, queries if window is None else min(queries, token + window)):
                highest, total, acc = softmaxes[i]
                own = of_slot.of(numbers, range(i, i + 1))
                score = scaled((own * key).sum(axis=1, keepdims=True))
                score = jnp.where(live, score, MASKED)
                rising = jnp.maximum(highest, score)
                weight = jnp.where(live, jnp.exp2(score - rising), 0.0)
                decay = jnp.exp2(highest - rising)
                # the row of an idle slot may be NaN
                added = jnp.where(live, weight * value, 0.0)
                acc = added if token == 0 else acc * decay + added
                softmaxes[i] = rising, total * decay + weight, acc
    carry: Any = tuple(
        tuple(stacked(parts) for parts in zip(*(softmaxes[i] for i in chunk)))
        for chunk in of_slot.chunks()
    )
    carry = lax.fori_loop(*ring.blocks(step), attend, carry)
    total, acc = (stacked(chunk[i] for chunk in carry) for i in (1, 2))
    # a slot of length 0 has nothing in acc, sink or not
    mean = acc * whole_scale[1] / jnp.where(total > 0.0, total, 1.0)
    mean = stacked(of_slot.existing(i, of_slot.of(mean, range(i, i + 1))) for i in range(queries))
    out[0] = mean.astype(out.dtype)
    if group:
        # after the last block: no DMA reads the page any more
        new.write(step)


def decode(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    splits: int | None,
    tuning: TpuDecodeTuning | None,
    interpret: Any,
) -> jax.Array:  # [B, Q, H, D]
    """Attention of up to Q queries a slot on a TPU.

    Softmax weights are rounded to the type in which attention multiplies (`compute_dtype`); scores,
    maxima, sums and outputs are float32.

    Args:
        splits: None or 1: the DMAs of the next slots hide the ends of a slot, and a TPU has one or
            two cores, which divide the slots.
        tuning: None takes the defaults, for one TensorCore.
        interpret: True or `pltpu.InterpretParams` for JAX's TPU interpreters; None compiles.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    if splits not in (None, 1):
        raise KernelError("splits", splits, "None or 1 on a TPU")
    tuning = tuning or TpuDecodeTuning()
    check(q, kv_pages, page_table, tuning.block_tokens)
    return _attend(
        q, kv_pages, page_table, kv_lens, None, options, tuning=tuning, interpret=interpret
    )[0]


def decode_and_write(
    q: jax.Array,  # [B, Q, H, D]
    new: jax.Array,  # [B * Q, 2, KVH, D], in the pool's own element type
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    tuning: TpuDecodeTuning | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # [B, Q, H, D], [NP, page_size, 2, KVH, D]
    """As `decode`, where the tokens of each slot's queries are `new` and not in the pages yet.

    Returns:
        The attention output, and the pool with the new tokens: in place when it is donated.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    tuning = tuning or TpuDecodeTuning()
    check(q, kv_pages, page_table, tuning.block_tokens)
    out, pool = _attend(
        q, kv_pages, page_table, kv_lens, new, options, tuning=tuning, interpret=interpret
    )
    assert pool is not None
    return out, pool


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def _attend(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    new: jax.Array | None,  # [B * Q, 2, KVH, D]; scales are by token only where it is None
    options: AttentionOptions,
    *,
    tuning: TpuDecodeTuning,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:  # [B, Q, H, D], [NP, page_size, 2, KVH, D]
    window, sinks, first_page = options.scores.window, options.sinks, options.first_page
    slots, queries, heads, head_dim = q.shape
    view = PageView.of(kv_pages, head_dim)
    dtype = compute_dtype(kv_pages.dtype, q.dtype)
    itemsize = kv_pages.dtype.itemsize
    cores = tuning.cores
    steps = -(-slots // cores)
    jobs = steps * cores
    rows = -(-heads // TILE_ROWS) * TILE_ROWS
    pages, stages = block_shape(view, itemsize, tuning.block_tokens, tuning.stages)
    if queries > 1:
        pages, stages = query_block(view, itemsize, rows, tuning)
    block_rows = pages * view.page_rows

    low, high = key_range(kv_lens, options.query_lens, queries, window)
    counts = jnp.full_like(kv_lens, queries) if options.query_lens is None else options.query_lens
    if new is not None:
        # what is read of the pages ends before the new tokens
        before = high - (counts if queries > 1 else 1)
        high = jnp.where(before > low, before, 0)
        low = jnp.minimum(low, high)
    slot = jnp.arange(slots, dtype=jnp.int32)
    scalars = job_scalars(slot, low, high, page_table, first_page, cores)
    padded = jnp.pad(q, ((0, jobs - slots), (0, 0), (0, rows - heads), (0, 0)))
    padded = padded.reshape(jobs, queries * rows, head_dim)
    if sinks is None:
        sinks = jnp.full((heads,), MASKED, jnp.float32)
    sinks = jnp.maximum(sinks * LOG2E, MASKED)
    sinks = jnp.broadcast_to(jnp.pad(sinks, (0, rows - heads))[:, None], (rows, LANES))
    k_scale, v_scale = options.k_scale, options.v_scale
    scaled = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    by_token = scaled is not None and scaled[0].ndim == 3
    pool, whole = view.seen(kv_pages), pl.BlockSpec(memory_space=pl.ANY)
    if new is None:
        pool, whole = interpreter.hbm_operand(pool, interpret)
    operands = [
        padded,
        jnp.asarray(column_tokens(view, pages, heads, rows)),
        sinks,
        jnp.ones(2, jnp.float32) if by_token or scaled is None else jnp.stack(scaled),
        pool,
    ]
    in_specs = [
        pl.BlockSpec(
            (1, queries * rows, head_dim), lambda core, step, *_: (step * cores + core, 0, 0)
        ),
        pl.BlockSpec((rows, block_rows), lambda *_: (0, 0)),
        pl.BlockSpec((rows, LANES), lambda *_: (0, 0)),
        pl.BlockSpec(memory_space=pltpu.SMEM),
        whole,
    ]
    scratch = [pltpu.VMEM((stages, pages, *view.page_shape), kv_pages.dtype)]
    if scaled is not None and by_token:
        factors = block_scales(*scaled, page_table, first_page, low, high, view=view, pages=pages)
        factors, factors_in_hbm = interpreter.hbm_operand(factors, interpret)
        operands.append(factors)
        in_specs.append(factors_in_hbm)
        scratch.append(pltpu.VMEM((stages, *factors.shape[2:]), jnp.float32))
    scratch += [pltpu.SemaphoreType.DMA((stages,)), pltpu.SMEM((STATE_SIZE,), jnp.int32)]
    out_specs, out_shapes = [in_specs[0]], [result_like(q, padded.shape, q.dtype)]
    aliases = {}
    if new is not None or queries > 1:
        scalars += (jnp.pad(kv_lens, (0, jobs - slots)),)
    if queries > 1:
        scalars += (jnp.pad(counts, (0, jobs - slots)),)
    if new is not None:
        tokens = view.tokens(new)
        tokens = jnp.pad(tokens, ((0, 0), (0, (jobs - slots) * queries), (0, 0), (0, 0)))
        parts, count = view.token_parts
        token_of_job = pl.BlockSpec(
            (parts, queries, count, view.head_dim),
            lambda core, step, *_: (0, step * cores + core, 0, 0),
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
            by_token=by_token,
            group=None if new is None else heads // view.heads,
            queries=queries,
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
            flops=4 * held * queries * heads * head_dim,
            bytes_accessed=2 * held * view.heads * head_dim * kv_pages.dtype.itemsize
            + 2 * q.size * q.dtype.itemsize,
            transcendentals=held * queries * heads,
        ),
        interpret=interpreter.of_call(interpret),
        name="paged_decode" if new is None else "paged_decode_and_write",
    )(*scalars, *operands)
    out = out.reshape(jobs, queries, rows, head_dim)[:slots, :, :heads]
    return out, view.restored(written[0]) if written else None
