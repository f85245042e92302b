"""The native write against NumPy, and that a step's pool is never copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError, ScaledPages, write_kv
from tests.pallas_kernels.native.requirements import require_native
from tests.pallas_kernels.strategies import examples
from tests.pallas_kernels.write_kv.checks import Writing, check, places, write_scaled

require_native()

WRITINGS = [
    Writing("uint16", "bfloat16"),
    Writing("float32", "bfloat16"),
    Writing("int8", "float32"),
]
# more than a thread's task of 128 KiB
LONG = Writing("uint16", "bfloat16", kv_heads=4, head_dim=64, tokens=300, pages=48)


@pytest.mark.parametrize("writing", [*WRITINGS, LONG], ids=str)
@examples(3)
@given(data=st.data())
def test_rows_land_in_place_and_nothing_else_changes(writing, data):
    check(writing, data.draw(places(writing)), backend="native")


def test_layers_of_one_donated_pool() -> None:
    """Each layer's pages get its own rows; the pool is neither copied nor compiled code's work."""
    shape = (12, 8, 2, 2, 16)

    def layers(kv_pages, k, v, page_ids, offsets):
        for layer in range(3):
            kv_pages = write_kv(
                kv_pages, k + layer, v, page_ids, offsets, first_page=4 * layer, backend="native"
            )
        return kv_pages

    k = jnp.arange(3 * 2 * 16, dtype=jnp.float32).reshape(3, 2, 16)
    where = (jnp.array([1, 3, 1], jnp.int32), jnp.array([0, 7, 4], jnp.int32))
    operands = (jnp.zeros(shape), k, -k, *where)
    compiled = jax.jit(layers, donate_argnums=0).lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == operands[0].nbytes
    assert memory.temp_size_in_bytes < operands[0].nbytes
    want = np.zeros(shape, np.float32)
    for layer in range(3):
        for token, (page, offset) in enumerate(zip(*where)):
            want[4 * layer + page, offset] = np.stack([k[token] + layer, -k[token]])
    np.testing.assert_array_equal(compiled(*operands), want)


@pytest.mark.parametrize(
    ("pool", "head_dim"),
    [
        ("int8", 64),
        ("uint8", 80),
        pytest.param("int8", 80, marks=pytest.mark.slow),
        pytest.param("uint8", 64, marks=pytest.mark.slow),
    ],
)
def test_scaled_rows_are_the_bits_of_xla(pool, head_dim) -> None:
    """So that a request can go on where another backend has written."""
    rng = np.random.default_rng(1)
    k, v = (
        jnp.asarray(rng.standard_normal((300, 3, head_dim)) * 10 ** rng.uniform(-6, 3, (300, 3, 1)))
        for _ in range(2)
    )
    where = jnp.arange(300, dtype=jnp.int32) // 16, jnp.arange(300, dtype=jnp.int32) % 16
    scales = jnp.zeros((20, 3, 16), jnp.uint16)
    pages = ScaledPages(jnp.zeros((20, 16, 2, 3, head_dim), pool), scales, scales)
    for dtype in ("float32", "bfloat16"):
        rows = k.astype(dtype), v.astype(dtype)
        got, want = (write_scaled(pages, *rows, *where, backend=b) for b in ("native", "xla"))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_refusals_name_the_operand() -> None:
    pages, rows, where = jnp.zeros((4, 8, 2, 2, 16)), jnp.zeros((1, 2, 16)), jnp.zeros(1, jnp.int32)
    for change, field in ({"first_page": 4}, "first_page"), ({"interpret": True}, "interpret"):
        with pytest.raises(KernelError) as caught:
            write_kv(pages, rows, rows, where, where, backend="native", **change)
        assert caught.value.field == field
