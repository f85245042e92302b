"""Paged prefill attention for NVIDIA Hopper in Pallas Mosaic GPU.

The shape is FlashAttention-3's (Shah et al., "FlashAttention-3: Fast and Accurate Attention with
Asynchrony and Low-precision", 2024), against pages. A thread block holds a tile of query rows of
one lane for some query heads of one KV head, packed into the 2 x 64 rows of two warpgroups that
attend; a third warpgroup walks the lane's page table and brings keys and values into a ring in
shared memory, one strided TMA copy a page. The two attending warpgroups take turns at the tensor
core: while one multiplies, the other computes its softmax. Blocks of keys that no row may see are
not visited, and only those at the causal or window edge are masked. 8-bit keys and values are
converted to the type of the queries by the warpgroup that brings them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import interpreter
from pallas_kernels.backends.mosaic_gpu import HopperPrefillTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.hopper.registers import RegisterSplit
from pallas_kernels.hopper.tiles import TILE_ROWS, WGMMA_ROWS, row_tiles
from pallas_kernels.paged_attention.hopper import prefill_work
from pallas_kernels.paged_attention.hopper.prefill_attend import attend
from pallas_kernels.paged_attention.hopper.prefill_fetch import produce
from pallas_kernels.paged_attention.hopper.prefill_plan import (
    CONSUMERS,
    Options,
    Part,
    Refs,
    geometry,
    read_item,
    tile_of,
)
from pallas_kernels.paged_attention.hopper.prefill_store import store
from pallas_kernels.paged_attention.hopper.prefill_widen import produce_widened
from pallas_kernels.paged_attention.lanes import PrefillLanes
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.pages import compute_dtype, is_quantized

PRODUCER = CONSUMERS  # the warpgroup after the attending ones
BLOCK_TOKENS = (64, 128)
DEFAULT = HopperPrefillTuning()
# of the plain buffer through which ragged rows are stored: a copy begins at 128 bytes
PLAIN_COLUMNS = 64
RAW_STAGES = 2  # blocks of 8-bit keys and values on their way, where memory allows
SHARED_MEMORY = 232448  # bytes that a thread block of compute capability 9.0 may ask for
RESERVED = 2048  # of these, for barriers and scales


def shared_bytes(head_dim: int, block_tokens: int, stages: int, raw_stages: int) -> int:
    """Shared memory of the compiled kernel: 16-bit elements, and 8-bit ones as they are read."""
    rows = CONSUMERS * WGMMA_ROWS
    plain, raw = 2 * rows * PLAIN_COLUMNS, 2 * raw_stages * block_tokens * head_dim
    # the plain buffer begins to be used when the last 8-bit numbers have been converted
    return 2 * head_dim * (rows + 2 * stages * block_tokens) + max(plain, raw) + RESERVED


def fitted(
    tuning: HopperPrefillTuning, head_dim: int, pool_dtype: DTypeLike
) -> tuple[int, int, int]:
    """Keys a block, stages and 8-bit stages: those wanted, fewer where memory would not hold them.

    The last are 0 for 16-bit pages.
    """
    block_tokens, stages = tuning.block_tokens, tuning.stages
    least = 1 if is_quantized(pool_dtype) else 0
    while shared_bytes(head_dim, block_tokens, 2, least) > SHARED_MEMORY:
        block_tokens //= 2
    while shared_bytes(head_dim, block_tokens, stages, least) > SHARED_MEMORY:
        stages -= 1
    raw_stages = RAW_STAGES * least
    while shared_bytes(head_dim, block_tokens, stages, raw_stages) > SHARED_MEMORY:
        raw_stages -= 1
    return block_tokens, stages, raw_stages


def registers(head_dim: int) -> RegisterSplit:
    """Registers of a thread that attends and of one that brings.

    The output of a warpgroup takes head_dim / 2 of a thread's.
    """
    consumer, producer = (216, 72) if head_dim > 128 else (192, 120)
    return RegisterSplit(CONSUMERS, consumer, producer)


def _kernel(*gmem: Any, options: Options, kv_heads: int, **scratch: Any) -> None:
    q, kv, table, work, base, *others, out = gmem
    scales = tuple(others[:2]) if options.quantized else ()
    sinks = others[-1] if options.sinks else None
    if options.quantized:
        scratch["rows_smem"], scratch["raw_smem"] = scratch.pop("shared_smem")
    refs = Refs(q, kv, table, work, base, scales, sinks, out, scratch)
    block, index, warpgroup = (lax.axis_index(name) for name in ("heads", "item", "warpgroup"))
    packing = options.geometry
    item = read_item(refs.work, index)
    owns_rows = item.high > item.low
    split = registers(q.shape[2])
    first_head = block * packing.tile_heads

    @pl.when(owns_rows & (warpgroup < CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(split.consumer, action="increase")
        part = Part(
            warpgroup,
            first_head + (warpgroup * packing.heads if packing.split_heads else 0),
            jnp.int32(0) if packing.split_heads else warpgroup * packing.rows,
        )
        # the work is read again wherever it is needed: attending needs the registers
        attended = attend(tile_of(read_item(refs.work, index), options), part, options, refs)
        store(attended, read_item(refs.work, index), part, options, refs)

    @pl.when(owns_rows & (warpgroup == PRODUCER))
    def _() -> None:
        plgpu.set_max_registers(split.producer, action="decrease")
        kv_head = lax.div(first_head, jnp.int32(refs.q.shape[1] // kv_heads))
        bring = produce_widened if options.quantized else produce
        bring(tile_of(read_item(refs.work, index), options), kv_head, options, refs)


def _scratch(
    head_dim: int, page_size: int, dtype: Any, pool_dtype: Any, options: Options
) -> dict[str, Any]:
    """Shared memory and barriers of a thread block."""
    block_tokens, stages = options.block_tokens, options.stages
    tiles = row_tiles(head_dim, dtype)
    ring = (stages, block_tokens, head_dim)
    copies = block_tokens // min(page_size, block_tokens)
    arrivals = 1 if options.quantized else copies
    rows_smem = plgpu.SMEM((CONSUMERS, WGMMA_ROWS, PLAIN_COLUMNS), dtype)
    scratch = {
        # the queries, later the output
        "q_smem": plgpu.SMEM((CONSUMERS, WGMMA_ROWS, head_dim), dtype, transforms=tiles),
        "k_smem": plgpu.SMEM(ring, dtype, transforms=tiles),
        "v_smem": plgpu.SMEM(ring, dtype, transforms=tiles),
        "q_ready": plgpu.Barrier(num_arrivals=options.geometry.heads, num_barriers=CONSUMERS),
        "k_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    if options.quantized:
        depth = options.raw_stages
        raw = (depth, 2, block_tokens, head_dim)
        raw_smem = plgpu.SMEM(raw, pool_dtype, transforms=row_tiles(head_dim, pool_dtype))
        scratch["shared_smem"] = plgpu.RefUnion(rows_smem, raw_smem)
        scratch["raw_ready"] = plgpu.Barrier(num_arrivals=copies, num_barriers=2 * depth)
    else:
        scratch["rows_smem"] = rows_smem
        scratch["v_landed"] = plgpu.Barrier(num_arrivals=copies)
    if options.interpreted:
        scratch["p_smem"] = plgpu.SMEM((CONSUMERS, WGMMA_ROWS, block_tokens), dtype)
    return scratch


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
    *,
    tuning: HopperPrefillTuning | None,
    interpret: Any,
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks on an NVIDIA Hopper GPU.

    Softmax weights are rounded to the type of the pages (of the queries for 8-bit pages) before
    they are multiplied with the values; scores, maxima, sums and outputs before the last rounding
    are float32.

    Args:
        tuning: block_tokens and stages are upper bounds, as far as shared memory goes; None takes
            those that suit the head size.
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.

    Raises:
        KernelError: the kernel does not cover the shapes, types or tuning; names them.
    """
    region, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[3]
    packing = geometry(heads // kv_heads)
    block_tokens, stages, raw_stages = fitted(_checked(tuning), head_dim, kv_pages.dtype)
    sinks, k_scale, v_scale = options.sinks, options.k_scale, options.v_scale
    plan = Options(
        scores=options.scores,
        sinks=sinks is not None,
        geometry=packing,
        block_tokens=block_tokens,
        stages=stages,
        raw_stages=raw_stages,
        interpreted=interpreter.is_used(interpret),
    )
    # a copy of a tile's queries lies inside the region and begins at a multiple of 8 rows
    padded = max(-(-region // TILE_ROWS) * TILE_ROWS, packing.tile_rows)
    q = jnp.pad(q, ((0, padded - region), (0, 0), (0, 0)))
    work = prefill_work.divide(lanes, region=padded, tile_rows=packing.tile_rows)
    operands = [q, kv_pages, page_table, work, options.first_page.reshape(1)]
    if k_scale is not None and v_scale is not None:
        operands += [k_scale.reshape(1), v_scale.reshape(1)]
    if sinks is not None:
        operands.append(sinks)
    out = plgpu.kernel(
        functools.partial(_kernel, options=plan, kv_heads=kv_heads),
        out_type=[result_like(q, q.shape, q.dtype)],
        scratch_types=_scratch(
            head_dim,
            kv_pages.shape[1],
            compute_dtype(kv_pages.dtype, q.dtype),
            kv_pages.dtype,
            plan,
        ),
        grid=(heads // packing.tile_heads, work.shape[0]),
        grid_names=("heads", "item"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # the rows of a warpgroup's tile do not cross its warps
        ),
        interpret=interpret,
    )(*operands)[0]
    return out[:region]


def _checked(tuning: HopperPrefillTuning | None) -> HopperPrefillTuning:
    """The tuning of the kernel.

    Raises:
        KernelError: a field has a value that the kernel cannot take.
    """
    if tuning is None:
        return DEFAULT
    if tuning.block_tokens not in BLOCK_TOKENS:
        raise KernelError("tuning.block_tokens", tuning.block_tokens, "64 or 128")
    if tuning.stages < 2:
        raise KernelError("tuning.stages", tuning.stages, "at least 2")
    return tuning
