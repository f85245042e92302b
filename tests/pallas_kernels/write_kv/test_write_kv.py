"""write_kv: the rows land where they belong, and the pool is updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import (
    KernelError,
    ScaledPages,
    native,
    storage_dtype,
    write_kv,
    write_kv_scaled,
)
from pallas_kernels.write_kv import xla_pages
from tests.pallas_kernels.oracle import to_float64
from tests.pallas_kernels.strategies import examples
from tests.pallas_kernels.write_kv.checks import Writing, check, check_scaled, places

write_scaled = jax.jit(write_kv_scaled, static_argnames="backend")
NATIVE = ("native",) if native.availability().available else ()

WRITINGS = [
    *(Writing(pool, "float32") for pool in ("float32", "bfloat16", "int8", "uint8")),
    *(Writing(pool, "bfloat16") for pool in ("float16", "uint16", "float8_e4m3fn")),
]


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("writing", WRITINGS, ids=str)
@examples(4)
@given(data=st.data())
def test_rows_land_in_place_and_nothing_else_changes(writing, backend, data):
    check(writing, data.draw(places(writing)), backend=backend)


@pytest.mark.parametrize("pages_a_step", [3, 256])
def test_whole_pages_hold_the_written_tokens_beside_what_they_held(pages_a_step, monkeypatch):
    """Tokens of one page stand apart, and more pages are written than a step takes."""
    monkeypatch.setattr(xla_pages, "PAGES", pages_a_step)
    rng = np.random.default_rng(4)
    before = rng.integers(-128, 128, (9, 8, 2, 3, 16)).astype(np.int8)
    rows = rng.integers(-128, 128, (20, 2, 3, 16)).astype(np.int8)
    places = rng.permutation(np.arange(8, 72))[:20]
    places[-4:] = 5  # padding tokens, all in one place of page 0
    where = (jnp.asarray(part, jnp.int32) for part in np.divmod(places, 8))
    # a function of its own, so that each number of pages is traced
    write = jax.jit(lambda *given: xla_pages.write(*given))
    got = np.asarray(write(jnp.asarray(before), jnp.asarray(rows), *where))
    want = before.reshape(72, 2, 3, 16).copy()
    want[places[:16]] = rows[:16]
    shared = got.reshape(72, 2, 3, 16)[5]
    assert any((shared == row).all() for row in rows[16:])
    want[5] = shared
    np.testing.assert_array_equal(got.reshape(72, 2, 3, 16), want)


@pytest.mark.parametrize(
    "pool", sorted({str(storage_dtype(p, "cpu")) for p in ("float32", "float16", "bfloat16")})
)
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


SCALED = [
    Writing("int8", "float32"),
    Writing("uint8", "bfloat16"),
    Writing("int8", "float16", head_dim=80, kv_heads=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "xla", "xla_pages", *NATIVE])
@pytest.mark.parametrize("writing", SCALED, ids=str)
@examples(3)
@given(data=st.data())
def test_each_row_is_rounded_over_the_smallest_scale_that_holds_it(writing, backend, data):
    check_scaled(writing, data.draw(places(writing)), backend=backend)


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.slow), *NATIVE])
def test_what_a_token_is_stored_as_depends_on_nothing_else(backend):
    """All at once, one by one in any order, and after rows that were written for nothing."""
    rng = np.random.default_rng(6)
    tokens, page_size = 12, 8
    k, v = (jnp.asarray(rng.standard_normal((tokens, 2, 64)) * 4, jnp.bfloat16) for _ in range(2))
    places = np.arange(page_size, page_size + tokens)
    scales = jnp.zeros((3, 2, page_size), jnp.uint16)
    empty = ScaledPages(jnp.zeros((3, page_size, 2, 2, 64), jnp.int8), scales, scales)

    def put(pages, rows, k=k, v=v):
        ids, offsets = (jnp.asarray(part, jnp.int32) for part in np.divmod(places[rows], page_size))
        return write_scaled(pages, k[rows], v[rows], ids, offsets, backend=backend)

    want = put(empty, np.arange(tokens))
    for chunks in ([range(5), range(5, 12)], [[t] for t in rng.permutation(tokens)]):
        pages = empty
        for chunk in chunks:
            # a draft that is rejected leaves larger numbers behind
            pages = put(pages, np.array(chunk), k * 100, v * 100)
            pages = put(pages, np.array(chunk))
        for got, wanted in zip(pages, want, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("backend", ["xla", *NATIVE])
@pytest.mark.parametrize("pool", ["int8", "uint8"])
def test_rows_of_zeros_and_of_no_numbers(pool, backend):
    """Zeros stay zeros; what is not finite reaches whoever attends to it as NaN or infinity."""
    k = jnp.ones((4, 1, 32)).at[0].set(0.0).at[1, 0, 3].set(jnp.nan).at[2, 0, 4].set(-jnp.inf)
    scales = jnp.zeros((1, 1, 4), jnp.uint16)
    pages = ScaledPages(jnp.ones((1, 4, 2, 1, 32), pool), scales, scales)
    where = jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    after = write_scaled(pages, k, k, *where, backend=backend)
    scale = to_float64(np.asarray(after.k_scale))[0, 0]
    assert scale[0] == 0 and np.isnan(scale[1]) and np.isinf(scale[2]) and np.isfinite(scale[3])
    assert not np.asarray(after.kv_pages[0, 0]).any()


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
        ({"backend": "cuda"}, "backend"),
        ({"k_scale": jnp.ones(())}, "k_scale"),
        ({"kv_pages": jnp.zeros((4, 8, 2, 2, 16), jnp.int8)}, "k_scale"),
        ({"interpret": True}, "interpret"),
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
