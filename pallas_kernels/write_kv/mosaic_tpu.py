"""Writing new keys and values into the pages of a TPU in Pallas Mosaic, in place.

The pool is an input that is also the output. The keys and values of one token are whole packed rows
of it, which one DMA writes; the DMAs of a chunk of tokens are all on their way at once. XLA's
scatter reads 16 rows, waits, writes them back and waits again, because it must be right for any
indices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import coverage, interpreter
from pallas_kernels.backends import mosaic_tpu
from pallas_kernels.compat import result_like
from pallas_kernels.tpu_pages import Order, memory_order

CHUNK = 128  # tokens a grid step


def _kernel(
    page_ids: Any,  # int32[T]
    offsets: Any,  # int32[T]
    rows: Any,  # VMEM [CHUNK, ..]
    _: Any,  # the pool as an input, which is the output
    pool: Any,  # HBM [NP, page_size, ..]
    written: Any,
) -> None:
    first = pl.program_id(0) * rows.shape[0]
    count = jnp.minimum(page_ids.shape[0] - first, rows.shape[0])

    def copy(row: Any) -> Any:
        token = first + row
        place = pool.at[page_ids[token], offsets[token]]
        return pltpu.make_async_copy(rows.at[row], place, written)

    lax.fori_loop(0, count, lambda row, _: copy(row).start(), None)
    lax.fori_loop(0, count, lambda row, _: copy(row).wait(), None)


@functools.partial(jax.jit, static_argnames=("interpret",))
def write(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    rows: jax.Array,  # [T, 2, KVH, D], in the pool's own element type
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    interpret: Any = None,
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Writes rows of 2 * KVH * D elements. Where tokens share a place, its content is undefined.

    Args:
        interpret: True or `pltpu.InterpretParams` for JAX's TPU interpreters; None compiles.

    Raises:
        KernelError: the pages are not written in place, or not of a type that the kernel takes.
    """
    _, page_size, _, kv_heads, head_dim = kv_pages.shape
    shape = coverage.AttentionShape(
        head_dim=head_dim,
        page_size=page_size,
        kv_heads=kv_heads,
        head_rows=1,
        pool_dtype=jnp.dtype(kv_pages.dtype),
    )
    coverage.refuse(mosaic_tpu.covers_write(shape), "mosaic_tpu", rows, kv_pages)
    # in the order of its memory a token is contiguous, and this transposition moves nothing
    pairs = memory_order(kv_heads, kv_pages.dtype) is Order.PAIRS
    pool = kv_pages.swapaxes(2, 3) if pairs else kv_pages
    rows = rows.swapaxes(1, 2) if pairs else rows
    chunk = min(CHUNK, rows.shape[0])
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(-(-rows.shape[0] // chunk),),
            in_specs=[
                pl.BlockSpec((chunk, *rows.shape[1:]), lambda step, *_: (step, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=result_like(kv_pages, pool.shape, pool.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=2 * rows.size * rows.dtype.itemsize, transcendentals=0
        ),
        interpret=interpreter.of_call(interpret),
        name="write_kv",
    )(page_ids, offsets, rows, pool)
    return written.swapaxes(2, 3) if pairs else written
