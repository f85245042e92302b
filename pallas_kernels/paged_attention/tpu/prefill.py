"""Paged prefill attention for TPU in Pallas Mosaic.

A grid step is a job: a tile of query tokens of one lane. Its pages come through the same ring of
VMEM buffers as in decode (`ring`). The query heads of a KV head are the rows of one matrix
[tokens * group, D], so that a block of keys of a head is loaded into the matrix unit once for all
of them. Blocks that every row of the tile sees entirely are attended without a mask. Which jobs
there are is computed outside and prefetched as scalars; their number is static, and a job without
rows moves nothing. Online softmax as in Dao, "FlashAttention-2" (2023), in base 2 and float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import interpreter
from pallas_kernels.backends.mosaic_tpu import TpuPrefillTuning
from pallas_kernels.compat import result_like
from pallas_kernels.paged_attention.lanes import PrefillLanes, divide, tile_counts
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
from pallas_kernels.paged_attention.softmax import LOG2E, MASKED, base2_scores
from pallas_kernels.paged_attention.tpu.columns import live_scales
from pallas_kernels.paged_attention.tpu.heads import head_rows, store_words, words_shape
from pallas_kernels.paged_attention.tpu.ring import (
    SCALARS,
    STATE_SIZE,
    Ring,
    block_shape,
    check,
    job_scalars,
)
from pallas_kernels.pages import compute_dtype
from pallas_kernels.tpu_pages import LANES, PageView

TILE_BYTES = 2048 * 128 * 2  # of a tile's queries: 10 bytes of VMEM for each at 16 bits, 7 at 32
PACKED_ROWS = 16  # rows of a full register of 16-bit elements


def _kernel(
    *operands: Any,
    view: PageView,
    columns: int,
    steps: int,
    options: Scores,
    dtype: Any,
    by_token: bool,
    with_sinks: bool,
    row_invariant: bool,
) -> None:
    window = options.window
    scalars, positions = operands[:SCALARS], operands[SCALARS]
    q, token_of, whole_scale, pool, *refs = operands[SCALARS + 1 :]
    sinks = refs.pop(0) if with_sinks else None
    scales = refs.pop(0) if by_token else None
    out, held = refs[:2]
    held_scales: Any = refs[2] if by_token else None
    words, highest, total, acc, arrived, state = refs[-6:]
    cores: Any = pl.num_programs(0)
    step = pl.program_id(1)
    ring = Ring(
        scalars, pool, scales, held, held_scales, arrived, state, view, columns,
        core=pl.program_id(0), cores=cores, steps=steps,
    )  # fmt: skip

    @pl.when(step == 0)
    def _() -> None:
        ring.begin()

    position = positions[step * cores + pl.program_id(0)]
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    # a sink is the first logit of the softmax, and has no value
    highest[...] = jnp.full_like(highest, MASKED) if sinks is None else sinks[...]
    total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0)
    acc[...] = jnp.zeros_like(acc)

    def attend(block: Any, _: None, *, masked: bool) -> None:
        ring.fetch()
        stage = ring.arrive(step, block)
        pages = held.at[stage]
        store_words(view, pages, words)
        if masked:
            shape = (token_of.shape[0], ring.tokens)
            key = block * ring.tokens + lax.broadcasted_iota(jnp.int32, shape, 1)
            behind = position + token_of[:, :1] - key  # tokens from the key to the query
            visible = behind >= 0
            if window is not None:
                visible &= behind < window
        for head in range(view.heads):
            scores = lax.dot_general(
                q[0, head].astype(dtype),
                head_rows(view, pages, words, 0, head, dtype),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
                precision=precision,
            )  # [rows, tokens]
            if by_token:
                scores = scores * held_scales[stage, 0, head][None]
            # factors that turn exp into exp2
            scores = base2_scores(scores, whole_scale[0], options)
            if masked:
                scores = jnp.where(visible, scores, MASKED)
            before = highest[head]
            rising = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            decay = jnp.exp2(before - rising)
            # a row before its first visible key has the maximum MASKED and weights of 1: what they
            # add is multiplied by exp2(MASKED - maximum) = 0 later
            weights = jnp.exp2(scores - rising[:, :1])
            highest[head] = rising
            total[head] = total[head] * decay + weights.sum(axis=1, keepdims=True)
            if by_token:
                weights = weights * held_scales[stage, 1, head][None]
            added = jnp.dot(
                weights.astype(dtype),
                head_rows(view, pages, words, 1, head, dtype),
                preferred_element_type=jnp.float32,
                precision=precision,
            )
            acc[head] = acc[head] * decay[:, :1] + added

    first, end = ring.blocks(step)
    # the blocks with no key behind the tile's first token; in one order all have masks, for
    # around a mask a compiler may round elsewhere
    unmasked = window is None and not row_invariant
    plain = lax.div(position + 1, ring.tokens) if unmasked else first
    plain = jnp.minimum(plain, end)
    lax.fori_loop(first, plain, functools.partial(attend, masked=False), None)
    lax.fori_loop(plain, end, functools.partial(attend, masked=True), None)
    for head in range(view.heads):
        sum_of_weights = total[head][:, :1]
        mean = acc[head] * whole_scale[1] / jnp.where(sum_of_weights > 0.0, sum_of_weights, 1.0)
        out[0, head] = mean.astype(out.dtype)


def computed_at(
    lanes: PrefillLanes, region: int, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row of a region its job, its token within the tile, and whether a lane owns it."""
    row = jnp.arange(region, dtype=jnp.int32)[:, None]
    mine = (row >= lanes.start) & (row < lanes.start + lanes.length)  # [C, N]
    lane = jnp.argmax(mine, axis=1)
    offset = row[:, 0] - lanes.start[lane]
    counts, ends = tile_counts(lanes, tile)
    return (ends - counts)[lane] + offset // tile, offset % tile, mine.any(axis=1)


def tile_tokens(view: PageView, itemsize: int, group: int, tile_rows: int) -> int:
    """Query tokens a tile: about `tile_rows` rows a KV head, fewer where heads fill the VMEM."""
    rows = min(tile_rows, TILE_BYTES // (view.kv_heads * view.head_dim * itemsize))
    # whole registers of rows whatever the group is
    return max(PACKED_ROWS, rows // group // PACKED_ROWS * PACKED_ROWS)


def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
    *,
    tuning: TpuPrefillTuning | None,
    interpret: Any,
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks over pages that already hold the chunks, on a TPU.

    Softmax weights are rounded to the type in which attention multiplies (`compute_dtype`); scores,
    maxima, sums and outputs are float32.

    Args:
        interpret: True or `pltpu.InterpretParams` for JAX's TPU interpreters; None compiles.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    tuning = tuning or TpuPrefillTuning()
    check(q, kv_pages, page_table, tuning.block_tokens)
    return _attend(q, kv_pages, page_table, lanes, options, tuning=tuning, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def _attend(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
    *,
    tuning: TpuPrefillTuning,
    interpret: Any,
) -> jax.Array:  # [C, H, D]
    window, sinks, first_page = options.scores.window, options.sinks, options.first_page
    region, heads, head_dim = q.shape
    view = PageView.of(kv_pages, head_dim)
    group = heads // view.heads
    dtype = compute_dtype(kv_pages.dtype, q.dtype)
    pages, stages = block_shape(view, kv_pages.dtype.itemsize, tuning.block_tokens, tuning.stages)
    tile = tile_tokens(view, q.dtype.itemsize, group, tuning.tile_rows)
    rows = tile * group
    cores = tuning.cores
    jobs = divide(lanes, region, tile)
    count = len(jobs.lane)
    steps = -(-count // cores)

    high = jnp.where(jobs.rows > 0, jobs.position + jobs.rows, 0)
    low = jnp.zeros_like(high)
    if window is not None:
        low = jnp.where(jobs.rows > 0, jnp.maximum(jobs.position + 1 - window, 0), 0)
    scalars = job_scalars(jobs.lane, low, high, page_table, first_page, cores)
    positions = jnp.pad(jobs.position, (0, scalars[0].shape[0] - count))

    # [jobs + cores, KVH, tile * group, D]: the last ones stand for all idle jobs of a core each
    wanted = jobs.first_row[:, None] + jnp.arange(tile)
    tiled = q.at[wanted].get(mode="clip").reshape(count, tile, view.heads, group, head_dim)
    tiled = tiled.transpose(0, 2, 1, 3, 4).reshape(count, view.heads, rows, head_dim)
    tiled = jnp.pad(tiled, ((0, cores), (0, 0), (0, 0), (0, 0)))
    token_of = np.broadcast_to((np.arange(rows) // group)[:, None], (rows, LANES))
    k_scale, v_scale = options.k_scale, options.v_scale
    scaled = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    by_token = scaled is not None and scaled[0].ndim == 3
    pool, in_hbm = interpreter.hbm_operand(view.seen(kv_pages), interpret)
    operands = [
        tiled,
        jnp.asarray(token_of, jnp.int32),
        jnp.ones(2, jnp.float32) if by_token or scaled is None else jnp.stack(scaled),
        pool,
    ]

    def tile_of_job(core: Any, step: Any, *prefetched: Any) -> tuple[Any, ...]:
        job = step * cores + core
        return (jnp.where(prefetched[2][job] > 0, job, count + core), 0, 0, 0)

    in_specs = [
        pl.BlockSpec((1, view.heads, rows, head_dim), tile_of_job),
        pl.BlockSpec((rows, LANES), lambda *_: (0, 0)),
        pl.BlockSpec(memory_space=pltpu.SMEM),
        in_hbm,
    ]
    if sinks is not None:
        by_row = sinks.reshape(view.heads, 1, group) * LOG2E
        by_row = jnp.broadcast_to(by_row, (view.heads, tile, group)).reshape(-1, rows, 1)
        operands.append(jnp.broadcast_to(by_row, (view.heads, rows, LANES)))
        in_specs.append(pl.BlockSpec((view.heads, rows, LANES), lambda *_: (0, 0, 0)))
    scratch = [pltpu.VMEM((stages, pages, *view.page_shape), kv_pages.dtype)]
    if scaled is not None and by_token:
        end = jnp.where(lanes.length > 0, lanes.context + lanes.length, 0)
        begin = jnp.zeros_like(end) if window is None else lanes.context + 1 - window
        factors = live_scales(*scaled, page_table, first_page, begin, end, view=view, pages=pages)
        # [N, blocks, pages, 2, KVH, page_size] to [N, blocks, 2, KVH, tokens]
        factors = factors.transpose(0, 1, 3, 4, 2, 5)
        factors = factors.reshape(*factors.shape[:4], -1)
        factors, factors_in_hbm = interpreter.hbm_operand(factors, interpret)
        operands.append(factors)
        in_specs.append(factors_in_hbm)
        scratch.append(pltpu.VMEM((stages, *factors.shape[2:]), jnp.float32))
    scratch += [
        pltpu.VMEM(words_shape(view, pages, kv_pages.dtype), jnp.int32),
        pltpu.VMEM((view.heads, rows, LANES), jnp.float32),
        pltpu.VMEM((view.heads, rows, LANES), jnp.float32),
        pltpu.VMEM((view.heads, rows, head_dim), jnp.float32),
        pltpu.SemaphoreType.DMA((stages,)),
        pltpu.SMEM((STATE_SIZE,), jnp.int32),
    ]

    held = page_table.size * view.page_size  # keys, if every lane's table were full
    passes = -(-region // tile) / page_table.shape[0]  # of a lane's keys, if lanes were equal
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            view=view,
            columns=page_table.shape[1],
            steps=steps,
            options=options.scores,
            dtype=dtype,
            by_token=by_token,
            with_sinks=sinks is not None,
            row_invariant=options.row_invariant,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=SCALARS + 1,
            grid=(cores, steps),
            in_specs=in_specs,
            out_specs=in_specs[0],
            scratch_shapes=scratch,
        ),
        out_shape=result_like(q, tiled.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=int(4 * held * passes * tile * heads * head_dim),
            bytes_accessed=int(
                2 * held * passes * view.heads * head_dim * kv_pages.dtype.itemsize
                + 2 * tiled.size * q.dtype.itemsize
            ),
            transcendentals=int(held * passes * tile * heads),
        ),
        interpret=interpreter.of_call(interpret),
        name="paged_prefill",
    )(*scalars, positions, *operands)

    out = out.reshape(count + cores, view.heads, tile, group, head_dim)
    job, place, owned = computed_at(lanes, region, tile)
    own = out[job, :, place].reshape(region, heads, head_dim)
    return jnp.where(owned[:, None, None], own, 0)
