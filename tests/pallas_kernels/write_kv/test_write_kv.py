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
from tests.pallas_kernels.strategies import SEEDS, examples
from tests.pallas_kernels.write_kv.checks import Writing, bits, check, places

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


TOKENS, PAGE = 6, 8
# of each of the pages 1 .. 4, how many tokens a step appends, and how large they are
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(lambda n: sum(n) <= TOKENS),
        st.sampled_from((1.0, 0.1, 20.0)),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("pool", ["int8", "uint8"])
@examples(6)
@given(steps=STEPS, seed=SEEDS)
def test_scales_by_page_follow_what_was_written(pool, steps, seed):
    """A few tokens a page and step, as decode and prefill append them; the rest is padding."""
    rng = np.random.default_rng(seed)
    largest = {"int8": 127, "uint8": 448}[pool]
    # what an earlier owner left: any bits, any scale
    junk = jnp.asarray(rng.integers(-128, 127, (7, PAGE, 2, 3, 16)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0, 9, (7, 3)), jnp.float32)
    start = ScaledPages(junk if pool == "int8" else junk.view(jnp.uint8), scale, scale)
    pages = dict.fromkeys(("reference", "xla", "xla_pages", *NATIVE), start)
    written = np.zeros((7, PAGE, 2, 3, 16), np.float32)
    filled = np.zeros(7, int)
    grown = np.zeros((7, 2, 3))  # how often a scale followed
    for counts, size in steps:
        taken = [
            (page, filled[page] + offset)
            for page, count in enumerate(counts, start=1)
            for offset in range(min(count, PAGE - filled[page]))
        ]
        padded = taken + [(0, 0)] * (TOKENS - len(taken))
        ids, offsets = (jnp.asarray(part, jnp.int32) for part in zip(*padded))
        rows = size * rng.standard_normal((TOKENS, 2, 3, 16)).astype(np.float32)
        pages = {
            name: write_scaled(before, rows[:, 0], rows[:, 1], ids, offsets, backend=name)
            for name, before in pages.items()
        }
        before = np.abs(written).max(axis=(1, 4))
        for (page, offset), row in zip(taken, rows):
            written[page, offset] = row
            filled[page] = offset + 1
        grown += np.abs(written).max(axis=(1, 4)) > before
    for name, after in pages.items():
        held = to_float64(np.asarray(after.kv_pages))
        for part, scales in enumerate((after.k_scale, after.v_scale)):
            for page in np.flatnonzero(filled[:5]):
                scale = np.asarray(scales, np.float64)[page]
                want = written[page, : filled[page], part]  # [tokens, 3, 16]
                np.testing.assert_allclose(scale, np.abs(want).max((0, 2)) / largest, rtol=1e-6)
                error = np.abs(held[page, : filled[page], part] * scale[:, None] - want)
                # rounded once to its own scale, and again whenever the scale grew
                allowed = (0.5 if pool == "int8" else 16) * grown[page, part] * scale
                assert (error <= allowed[:, None] * (1 + 1e-5)).all(), name
    for one, *others in zip(*pages.values()):  # the trash page 0 may differ
        for other in others:
            np.testing.assert_array_equal(bits(np.asarray(one)[1:]), bits(np.asarray(other)[1:]))


def test_a_page_whose_scale_stays_keeps_its_bits():
    rng = np.random.default_rng(3)
    held = jnp.asarray(rng.integers(-127, 128, (3, 8, 2, 2, 16)), jnp.int8)
    scale = jnp.full((3, 2), 0.5)
    small = jnp.full((1, 2, 16), 0.25)
    where = (jnp.array([2], jnp.int32), jnp.array([7], jnp.int32))
    after = write_scaled(ScaledPages(held, scale, scale), small, small, *where, backend="xla")
    np.testing.assert_array_equal(after.kv_pages[2, :7], held[2, :7])
    np.testing.assert_array_equal(after.k_scale, scale)


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
