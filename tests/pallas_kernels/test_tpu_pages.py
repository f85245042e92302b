"""The orders in which a TPU stores pages, and the rows that a kernel makes of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu_pages import Order, PageView, memory_order

# KV heads, element type, order
POOLS = [
    (8, "bfloat16", Order.WHOLE_TILES),
    (16, "int8", Order.WHOLE_TILES),
    (2, "bfloat16", Order.TOKENS),
    (4, "int8", Order.TOKENS),
    (1, "float32", Order.TOKENS),
    (1, "bfloat16", Order.PAIRS),
    (6, "bfloat16", Order.PAIRS),
    (3, "float32", Order.PAIRS),
    (2, "float8_e4m3fn", Order.HEADS),
]


@pytest.mark.parametrize(("kv_heads", "dtype", "order"), POOLS, ids=str)
def test_rows_are_the_keys_and_values_that_their_facts_name(kv_heads, dtype, order):
    assert memory_order(kv_heads, dtype) is order
    shape = (3, 4, 2, kv_heads, 2)
    pool = np.arange(np.prod(shape)).reshape(shape)
    view = PageView(order, page_size=4, kv_heads=kv_heads, head_dim=2)
    seen = view.seen(jnp.asarray(pool))
    assert seen.shape == (3, *view.page_shape)
    token, head, part = view.row_facts()
    assert token.shape == (view.page_rows,)
    for wanted in (0, 1):
        rows = np.asarray(view.rows_of(seen, wanted)).reshape(3, view.page_rows, 2)
        part_of_row = np.full_like(part, wanted) if view.separate else part
        np.testing.assert_array_equal(rows, pool[:, token, part_of_row, head])
    if not view.separate:
        # the value of a key is `shift` rows behind it
        keys = np.flatnonzero(part == 0)
        behind = keys + view.shift
        assert (part[behind] == 1).all()
        assert (token[behind] == token[keys]).all() and (head[behind] == head[keys]).all()
