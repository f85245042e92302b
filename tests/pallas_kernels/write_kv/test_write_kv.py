"""write_kv: the rows land where they belong, and the pool is updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, ScaledPages, storage_dtype, write_kv, write_kv_scaled
from pallas_kernels.write_kv import xla_pages
from tests.pallas_kernels.cases import stored
from tests.pallas_kernels.oracle import to_float64

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


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize(("pool", "largest", "step"), [("int8", 127, 0.5), ("uint8", 448, 16)])
def test_one_scale_rounds_to_nearest_and_cuts_off(pool, largest, step, backend):
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((20, 3, 16), np.float32)) for _ in range(2))
    k = k.at[3, 1, 5].set(1e6)
    where = jnp.arange(20, dtype=jnp.int32)
    scales = {"k_scale": jnp.float32(3.0 / largest), "v_scale": jnp.float32(5.0 / largest)}
    before = jnp.zeros((4, 8, 2, 3, 16), jnp.dtype(pool))
    got = write_kv(before, k, v, where // 8, where % 8, backend=backend, **scales)
    held = to_float64(np.asarray(got)).reshape(32, 2, 3, 16)[:20]
    assert held[3, 0, 1, 5] == largest
    for part, (values, scale) in enumerate(zip((k, v), scales.values())):
        want = np.clip(np.asarray(values, np.float64) / float(scale), -largest, largest)
        assert np.abs(held[:, part] - want).max() <= step * (1 + 1e-6)


@pytest.mark.parametrize("pool", ["int8", "uint8"])
def test_scales_by_page_follow_what_was_written(pool):
    """Growing tokens, a page a request and a call a chunk, as decode and prefill write them."""
    rng = np.random.default_rng(2)
    largest = {"int8": 127, "uint8": 448}[pool]
    write = jax.jit(write_kv_scaled, static_argnames="backend")
    # what an earlier owner left: any bits, any scale
    junk = jnp.asarray(rng.integers(-128, 127, (7, 8, 2, 3, 16)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0, 9, (7, 3)), jnp.float32)
    start = ScaledPages(junk if pool == "int8" else junk.view(jnp.uint8), scale, scale)
    pages = {"reference": start, "xla": start, "xla_pages": start}
    written = np.zeros((7, 8, 2, 3, 16), np.float32)
    # pages 1 and 2 token by token, 3 and 4 in chunks of 3 and 10 tokens that begin anywhere
    steps = [([1, 2], [n, n]) for n in range(8)]
    steps += [([3, 3, 3, 0], [0, 1, 2, 0]), ([3] * 5 + [4] * 5, [*range(3, 8), *range(5)])]
    for size, (ids, offsets) in enumerate(steps, start=1):
        k, v = (
            jnp.asarray(size * rng.standard_normal((len(ids), 3, 16), np.float32)) for _ in range(2)
        )
        where = (jnp.asarray(ids, jnp.int32), jnp.asarray(offsets, jnp.int32))
        pages = {name: write(before, k, v, *where, backend=name) for name, before in pages.items()}
        written[where[0], where[1], 0], written[where[0], where[1], 1] = k, v
    for name, after in pages.items():
        held = to_float64(np.asarray(after.kv_pages))
        for part, scales in enumerate((after.k_scale, after.v_scale)):
            scales = np.asarray(scales, np.float64)[1:5]
            want = written[1:5, :, part]
            np.testing.assert_allclose(scales, np.abs(want).max(axis=(1, 3)) / largest, rtol=1e-6)
            error = np.abs(held[1:5, :, part] * scales[:, None, :, None] - want)
            error[3, 5:] = 0  # never written
            # rounded once to its own scale, and again when the scale grew
            allowed = (0.5 if pool == "int8" else 16) * 3 * scales[:, None, :, None]
            assert (error <= allowed).all(), name
    for one, *others in zip(*pages.values()):  # the trash page 0 may differ
        for other in others:
            np.testing.assert_array_equal(
                np.asarray(one)[1:].view(np.uint8), np.asarray(other)[1:].view(np.uint8)
            )


def test_a_page_whose_scale_stays_keeps_its_bits():
    rng = np.random.default_rng(3)
    held = jnp.asarray(rng.integers(-127, 128, (3, 8, 2, 2, 16)), jnp.int8)
    scale = jnp.full((3, 2), 0.5)
    small = jnp.full((1, 2, 16), 0.25)
    where = (jnp.array([2], jnp.int32), jnp.array([7], jnp.int32))
    after = write_kv_scaled(ScaledPages(held, scale, scale), small, small, *where, backend="xla")
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
