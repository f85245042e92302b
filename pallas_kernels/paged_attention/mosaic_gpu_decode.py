"""Paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU.

A thread block attends the query heads of one KV head of one slot over one split of its tokens
(`mosaic_gpu_decode_kernel`); the splits of a slot are merged by the logarithms of their softmax
sums (`mosaic_gpu_combine`; Dao et al., "Flash-Decoding for long-context inference", 2023). With one
split there is nothing to merge and the thread block writes the result itself.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import coverage
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.mosaic_gpu_combine import combine
from pallas_kernels.paged_attention.mosaic_gpu_decode_kernel import decode_kernel
from pallas_kernels.paged_attention.mosaic_gpu_decode_plan import (
    THREADS,
    TILE_ROWS,
    WGMMA_ROWS,
    DecodePlan,
)
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.pages import compute_dtype
from pallas_kernels.tuning import DecodeTuning

MAX_SPLITS = 64
MAX_STAGES = 4  # of a ring when nothing is given: more has nothing left to hide
# a thread has registers for 128 channels of 64 query heads, or 256 of 32
WIDE_CHANNELS, WIDE_COLUMNS = 128, 32
BLOCK_MEMORY = 231_424  # bytes of shared memory of a multiprocessor; half of it twice fits too


def stages_within(
    memory: int, block_tokens: int, head_dim: int, group: int, pool_dtype: DTypeLike
) -> int:
    """How many stages of keys and values fit into so many bytes of shared memory; 0 for none."""
    size = jnp.dtype(pool_dtype).itemsize
    channels = -(-head_dim // WGMMA_ROWS) * WGMMA_ROWS
    columns = -(-group // TILE_ROWS) * TILE_ROWS
    stage = block_tokens * (head_dim + (channels if size == 2 else head_dim)) * size
    widened = 0 if size == 2 else block_tokens * (head_dim + channels) * 2
    # queries, weights and result; barriers, scales and what crosses the warps
    others = 2 * columns * (head_dim + block_tokens + channels) + 4096
    return max(0, (memory - widened - others) // stage)


def default_tuning(head_dim: int, group: int, pool_dtype: DTypeLike) -> DecodeTuning:
    """What the kernel uses for a shape when nothing is given; by reasoning, not by measurement.

    Small keys are taken 128 at a time, so that more of them share the cost of a step. The ring is
    as deep, up to 4, as lets two thread blocks live on one multiprocessor: each attends while the
    other waits. Where not even two stages fit twice, one thread block has the multiprocessor.
    """
    small = jnp.dtype(pool_dtype).itemsize == 2 and head_dim <= WGMMA_ROWS
    block_tokens = 2 * WGMMA_ROWS if small else WGMMA_ROWS
    stages = stages_within(BLOCK_MEMORY // 2, block_tokens, head_dim, group, pool_dtype)
    if stages < 2:
        stages = stages_within(BLOCK_MEMORY, block_tokens, head_dim, group, pool_dtype)
    return DecodeTuning(block_tokens=block_tokens, stages=min(stages, MAX_STAGES))


def number_of_splits(slots: int, groups: int, max_blocks: int, tuning: DecodeTuning) -> int:
    """Into how many thread blocks a slot's tokens are divided; depends on static shapes only.

    As many as fit into the wanted waves of thread blocks, and one as soon as the slots themselves
    take more than half of that: reading from memory is what limits, and a merge costs more than
    the rest of a wave.
    """
    wanted = tuning.waves * tuning.multiprocessors // (slots * groups)
    return max(1, min(wanted, max_blocks, MAX_SPLITS))


def _check_tuning(tuning: DecodeTuning, head_dim: int, group: int, pool_dtype: DTypeLike) -> None:
    if tuning.block_tokens not in (WGMMA_ROWS, 2 * WGMMA_ROWS):
        raise KernelError("tuning.block_tokens", tuning.block_tokens, "64 or 128")
    most = stages_within(BLOCK_MEMORY, tuning.block_tokens, head_dim, group, pool_dtype)
    if not 2 <= tuning.stages <= most:
        raise KernelError(
            "tuning.stages", tuning.stages, f"2 to {most} of {tuning.block_tokens} tokens each"
        )
    if tuning.consumers != 1:
        raise KernelError("tuning.consumers", tuning.consumers, "1")


def decode(
    q: jax.Array,  # [B, 1, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    splits: int | None,
    tuning: DecodeTuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [B, 1, H, D]
    """Attention of one query row a slot on an NVIDIA Hopper GPU.

    Softmax weights are rounded to the type of the pages (of the queries for 8-bit pages) before
    they are multiplied with the values; scores, maxima, sums and partial outputs are float32.

    Args:
        tuning: None chooses by the shape; see default_tuning.
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.

    Raises:
        KernelError: the kernel does not cover the shapes, the types or the tuning; names them.
    """
    coverage.require(
        coverage.mosaic_gpu_decode(coverage.AttentionShape.of(q, kv_pages)),
        "mosaic_gpu",
        q,
        kv_pages,
    )
    q = q[:, 0]
    page_size, _, kv_heads, head_dim = kv_pages.shape[1:]
    group = q.shape[1] // kv_heads
    head_tiles = -(-group // WIDE_COLUMNS) if head_dim > WIDE_CHANNELS else 1
    group = -(-group // head_tiles)
    tuning = tuning or default_tuning(head_dim, group, kv_pages.dtype)
    _check_tuning(tuning, head_dim, group, kv_pages.dtype)
    if splits is None:
        max_blocks = -(-page_table.shape[1] * page_size // tuning.block_tokens)
        splits = number_of_splits(q.shape[0], kv_heads * head_tiles, max_blocks, tuning)
    if splits > MAX_SPLITS:
        raise KernelError("splits", splits, f"at most {MAX_SPLITS}")
    plan = DecodePlan(
        group=group,
        head_tiles=head_tiles,
        head_dim=head_dim,
        page_size=page_size,
        block_tokens=tuning.block_tokens,
        stages=tuning.stages,
        splits=splits,
        pool_dtype=jnp.dtype(kv_pages.dtype),
        dtype=compute_dtype(kv_pages.dtype, q.dtype),
        page_scales=options.k_scale is not None and options.k_scale.ndim == 2,
        scores=options.scores,
        sinks=options.sinks is not None,
        # JAX cannot yet map warps over references that vary over manual mesh axes
        fetch_by_warp=jax.typeof(q).manual_axis_type.empty,
    )
    out = _attend(q, kv_pages, page_table, kv_lens, options, plan=plan, interpret=interpret)
    return out[:, None]


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _attend(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    plan: DecodePlan,
    interpret: Any,
) -> jax.Array:  # [B, H, D]
    sinks, k_scale, v_scale = options.sinks, options.k_scale, options.v_scale
    slots, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[3]
    groups, tiled = kv_heads * plan.head_tiles, plan.head_tiles * plan.group

    def by_group(values: jax.Array, axis: int) -> jax.Array:
        """The axis of heads divided into groups, each filled up to the plan's columns."""

        def filled(values: jax.Array, axis: int, size: int) -> jax.Array:
            fill = [(0, 0)] * values.ndim
            fill[axis] = (0, size - values.shape[axis])
            return jnp.pad(values, fill) if size > values.shape[axis] else values

        before, after = values.shape[:axis], values.shape[axis + 1 :]
        values = filled(values.reshape(*before, kv_heads, -1, *after), axis + 1, tiled)
        values = values.reshape(*before, groups, plan.group, *after)
        return filled(values, axis + 1, plan.columns)

    operands = [by_group(q, 1), kv_pages, page_table, kv_lens, options.first_page.reshape(1)]
    if sinks is not None:
        operands.append(by_group(sinks, 0))
    if k_scale is not None and v_scale is not None:
        operands += [s if plan.page_scales else s.reshape(1) for s in (k_scale, v_scale)]

    part = (plan.splits, slots, groups)
    result: list[tuple[int, ...]] = [(*part, plan.channels, plan.columns), (*part, plan.columns)]
    if plan.splits == 1:
        result = [(slots, groups, plan.group, plan.head_dim)]
    dtype = plan.dtype if plan.splits == 1 else jnp.float32
    outputs = plgpu.kernel(
        functools.partial(decode_kernel, plan=plan),
        out_type=[result_like(q, shape, dtype) for shape in result],
        scratch_types=plan.scratch(),
        # the last axis varies fastest: KV heads of the same tokens are neighbours in memory
        grid=(slots, plan.splits, groups),
        grid_names=("slot", "split", "group"),
        num_threads=len(THREADS),
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands)
    if plan.splits > 1:
        outputs = [combine(outputs[0], outputs[1], kv_lens, plan=plan, interpret=interpret)]
    out = outputs[0].reshape(slots, kv_heads, tiled, head_dim)[:, :, : heads // kv_heads]
    return out.reshape(q.shape)
