"""write_kv: the rows land where they belong, and the pool is updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, storage_dtype, write_kv
from tests.pallas_kernels.cases import stored

POOLS = ("float32", "float16", "bfloat16", "uint16")


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("pool", POOLS)
def test_rows_land_in_place_and_nothing_else_changes(pool, backend, values):
    rng = np.random.default_rng(0)
    before = stored(rng.standard_normal((9, 8, 2, 3, 16), np.float32), pool)
    k, v = (jnp.asarray(rng.standard_normal((20, 3, 16), np.float32), values) for _ in range(2))
    places = rng.permutation(np.arange(8, 72))[:20]
    places[-4:] = 0  # padding tokens, all in one place of page 0
    page_ids, offsets = (jnp.asarray(part, jnp.int32) for part in np.divmod(places, 8))
    got = np.asarray(
        jax.jit(write_kv, static_argnames="backend")(
            jnp.asarray(before), k, v, page_ids, offsets, backend=backend
        )
    )
    want = before.copy().reshape(72, 2, 3, 16)
    rows = np.stack([np.asarray(k, np.float32), np.asarray(v, np.float32)], axis=1)
    want[places[:16]] = stored(rows, pool)[:16]
    assert got.dtype == before.dtype
    # compared as bits: equal content, not only equal numbers
    np.testing.assert_array_equal(
        got.reshape(72, 2, 3, 16)[8:].view(np.uint8), want[8:].view(np.uint8)
    )
    assert (got.reshape(72, -1)[1:8] == before.reshape(72, -1)[1:8]).all()


@pytest.mark.parametrize("pool", sorted({str(storage_dtype(p, "cpu")) for p in POOLS[:3]}))
def test_the_donated_pool_is_updated_in_place(pool):
    """In every form in which a CPU stores pages; three layers, as an engine step writes them."""
    shape = jax.ShapeDtypeStruct((4096, 16, 2, 4, 64), jnp.dtype(pool))
    row = jax.ShapeDtypeStruct((64, 4, 64), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((64,), jnp.int32)

    def layers(kv_pages, k, v, page_ids, offsets):
        for layer in range(3):
            kv_pages = write_kv(kv_pages, k, v, page_ids + layer * 1024, offsets, backend="xla")
        return kv_pages

    compiled = jax.jit(layers, donate_argnums=0).lower(shape, row, row, index, index).compile()
    memory = compiled.memory_analysis()
    size = np.prod(shape.shape) * shape.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 50


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_pages": jnp.zeros((4, 8, 3, 2, 16))}, "kv_pages.shape"),
        ({"kv_pages": jnp.zeros((4, 8, 2, 2, 16), jnp.int32)}, "kv_pages.dtype"),
        ({"k": jnp.zeros((5, 2, 8))}, "k.shape"),
        ({"v": jnp.zeros((4, 2, 16))}, "v.shape"),
        ({"v": jnp.zeros((5, 2, 16), jnp.bfloat16)}, "k.dtype, v.dtype"),
        ({"page_ids": jnp.zeros(4, jnp.int32)}, "page_ids"),
        ({"offsets": jnp.zeros(5, jnp.float32)}, "offsets"),
        ({"backend": "triton"}, "backend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_operands_are_named(change, field):
    operands = {
        "kv_pages": jnp.zeros((4, 8, 2, 2, 16)),
        "k": jnp.zeros((5, 2, 16)),
        "v": jnp.zeros((5, 2, 16)),
        "page_ids": jnp.zeros(5, jnp.int32),
        "offsets": jnp.zeros(5, jnp.int32),
        "backend": "xla",
    }
    with pytest.raises(KernelError) as caught:
        write_kv(**{**operands, **change})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}=")
