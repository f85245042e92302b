"""Grouped linear layers in plain XLA, on any device: blocks of rows of one group, one by one.

A block's shape is fixed, each weight is read where it lies, and no array is as large as all weights
that the rows use. A block may reach past its group's end: what it writes there is overwritten by
the blocks behind it. The number of blocks is counted on the device, so that work follows the groups
that have rows; but a GPU would bring it to the host at every block, and has a fixed number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.linear.xla import linear

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 128  # rows


def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    counted, fixed = (partial(in_blocks, is_counted=choice) for choice in (True, False))
    return jax.lax.platform_dependent(x, sizes, layer, cuda=fixed, default=counted)


def in_blocks(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
    *,
    is_counted: bool,
    product: Callable[..., jax.Array] = linear,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """The blocks that the sizes need, or as many as any sizes may need.

    `product` is a linear layer, which is told how many rows of a block are its group's.
    """
    rows, groups = x.shape[0], len(sizes)
    block = block_rows(rows, groups)
    blocks = -(-sizes // block)
    block_ends, row_ends = jnp.cumsum(blocks), jnp.cumsum(sizes)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.minimum(
            jnp.searchsorted(block_ends, index, side="right", method="compare_all"), groups - 1
        )
        within = index - (block_ends[group] - blocks[group])
        start = row_ends[group] - sizes[group] + within * block
        # blocks that are not needed fall on rows behind the last group
        start = jnp.where(index < block_ends[-1], start, row_ends[-1])
        own = jnp.clip(row_ends[group] - start, 0, block)
        result = layer.product(
            product,
            jax.lax.dynamic_slice_in_dim(padded, start, block),
            group,
            live=jnp.stack([jnp.zeros_like(own), own])[None],
        )
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    out = jnp.zeros((rows + block, layer.width), layer.out_dtype)
    stop = block_ends[-1] if is_counted else rows // block + min(rows, groups)
    out = jax.lax.fori_loop(0, stop, body, out)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < row_ends[-1], out, 0)


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: twice what a group has on average, as a power of two."""
    wanted = max(2 * rows // groups, 1)
    return min(max(1 << (wanted - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)
