"""The table of blocks: how many read a group's weight, by the routing of random tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_linear.blocks import block_size, blocks_of, most_blocks


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize(("groups", "choices"), [(8, 2), (128, 8)])
def test_hardly_a_weight_is_read_twice(tokens: int, groups: int, choices: int) -> None:
    """Experts are drawn evenly, as a trained router's load is nearly; each block reads a weight."""
    rng = np.random.default_rng(tokens)
    blocks, least = 0, 0
    table = jax.jit(blocks_of)
    for _ in range(20):
        experts = np.stack([rng.permutation(groups)[:choices] for _ in range(tokens)])
        sizes = np.bincount(experts.ravel(), minlength=groups)
        order = jnp.asarray(np.argsort(experts.ravel(), kind="stable"), jnp.int32)
        found = table(order, jnp.asarray(sizes, jnp.int32))
        blocks += int((found.counts > 0).sum())
        least += int((sizes > 0).sum())
        assert int(found.counts.sum()) == tokens * choices
    assert blocks <= 1.05 * least


def test_any_sizes_have_room() -> None:
    for rows in range(0, 200, 7):
        size = block_size(rows, 6)
        for lone in range(6):  # groups of one row, the rest in one group
            needed = lone + -(-(rows - lone) // size) if rows >= lone else 0
            assert needed <= most_blocks(rows, 6, size)
