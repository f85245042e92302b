"""A backend of write_kv against NumPy, on tokens and places of one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import ScaledPages, write_kv, write_kv_scaled
from pallas_kernels.pages import LARGEST, value_dtype
from tests.pallas_kernels.cases import EIGHT_BITS, stored
from tests.pallas_kernels.oracle import to_float64
from tests.pallas_kernels.strategies import SEEDS

STATIC = ("backend", "interpret", "first_page")
write = jax.jit(write_kv, static_argnames=STATIC)
write_scaled = jax.jit(write_kv_scaled, static_argnames=STATIC)


@dataclass(frozen=True)
class Writing:
    """The static facts of a write: the pool, the type of new keys and values, tokens."""

    pool: str
    values: str
    kv_heads: int = 3
    head_dim: int = 16
    page_size: int = 8
    tokens: int = 20
    pages: int = 9

    def __str__(self) -> str:
        return f"{self.kv_heads}x{self.head_dim}-{self.pool}-of-{self.values}"


class Places(NamedTuple):
    """Where tokens go: the last `padding` ones to the first place of page 0."""

    padding: int
    in_order: bool  # neighbouring places, as prefill writes them
    seed: int


def places(writing: Writing) -> st.SearchStrategy[Places]:
    """Places for the tokens of a write, page 0 left out."""
    return st.builds(Places, st.integers(0, writing.tokens), st.booleans(), SEEDS)


class Drawn(NamedTuple):
    """Operands of a write, and what is known of them."""

    before: np.ndarray  # the pool
    k: jax.Array
    v: jax.Array
    page_ids: jax.Array
    offsets: jax.Array
    new: np.ndarray  # float32[T, 2, KVH, D], k and v as they are rounded
    free: np.ndarray  # the places behind page 0
    where: np.ndarray  # the place of each token
    live: int  # tokens that are no padding


def draw(writing: Writing, drawn: Places) -> Drawn:
    """The arrays of drawn places."""
    rng = np.random.default_rng(drawn.seed)
    row = (2, writing.kv_heads, writing.head_dim)
    shape = (writing.pages, writing.page_size, *row)
    before = stored(rng.standard_normal(shape, np.float32), writing.pool)
    new = rng.standard_normal((writing.tokens, *row), np.float32) * 2
    k, v = (jnp.asarray(new[:, part], writing.values) for part in range(2))
    new = np.stack([np.asarray(part, np.float32) for part in (k, v)], axis=1)
    free = np.arange(writing.page_size, writing.pages * writing.page_size)
    start = int(rng.integers(0, free.size - writing.tokens + 1))
    where = free[start:] if drawn.in_order else rng.permutation(free)
    where = where[: writing.tokens].copy()
    live = writing.tokens - drawn.padding
    where[live:] = 0
    page_ids, offsets = (jnp.asarray(x, jnp.int32) for x in np.divmod(where, writing.page_size))
    return Drawn(before, k, v, page_ids, offsets, new, free, where, live)


def check(writing: Writing, drawn: Places, **call: Any) -> None:
    """Rows land where they belong, rounded to the pool's type, and no other bit changes."""
    before, k, v, page_ids, offsets, new, free, where, live = draw(writing, drawn)
    row = new.shape[1:]
    # so that the largest values are cut off
    scales = np.array([2.0, 4.0], np.float32) / LARGEST.get(value_dtype(writing.pool).name, 1)
    quantized = writing.pool in EIGHT_BITS
    options = {"k_scale": scales[0], "v_scale": scales[1]} if quantized else {}
    got = np.asarray(write(jnp.asarray(before), k, v, page_ids, offsets, **options, **call))
    assert got.dtype == before.dtype
    rows = lambda pool: pool.reshape(-1, *row)  # noqa: E731
    kept = np.setdiff1d(free, where[:live])
    # compared as bits: equal content, not only equal numbers
    np.testing.assert_array_equal(bits(rows(got)[kept]), bits(rows(before)[kept]))
    np.testing.assert_array_equal(
        bits(rows(got)[1 : writing.page_size]), bits(rows(before)[1 : writing.page_size])
    )
    written, wanted = rows(got)[where[:live]], new[:live]
    if quantized:
        assert_nearest(to_float64(written), wanted / scales[:, None, None], writing.pool)
    else:
        np.testing.assert_array_equal(bits(written), bits(stored(wanted, writing.pool)))


def check_scaled(writing: Writing, drawn: Places, **call: Any) -> None:
    """Rows and their scales land where they belong, and nothing else changes."""
    before, k, v, page_ids, offsets, new, _, where, live = draw(writing, drawn)
    rng = np.random.default_rng(drawn.seed)
    scales = (writing.pages, writing.kv_heads, writing.page_size)
    junk = [rng.integers(0, 2**16, scales).astype(np.uint16) for _ in range(2)]
    first = 1  # a page before those of the layer, which no token is for
    where = where + first * writing.page_size
    kept = np.setdiff1d(np.arange(before.shape[0] * writing.page_size), where)
    fits = where < before.shape[0] * writing.page_size
    where, new = where[fits], new[fits]
    live = int(fits[:live].sum())
    operands = (jnp.asarray(x)[fits] for x in (k, v, page_ids, offsets))
    pages = ScaledPages(jnp.asarray(before), *map(jnp.asarray, junk))
    after = write_scaled(pages, *operands, first_page=first, **call)
    by_token = lambda pool: np.asarray(pool).reshape(-1, *before.shape[2:])  # noqa: E731
    np.testing.assert_array_equal(by_token(after.kv_pages)[kept], by_token(before)[kept])
    largest = LARGEST[value_dtype(writing.pool).name]
    for part, (scale, old) in enumerate(zip(after[1:], junk, strict=True)):
        scale, old = (
            np.asarray(x).swapaxes(1, 2).reshape(-1, writing.kv_heads) for x in (scale, old)
        )
        np.testing.assert_array_equal(scale[kept], old[kept])
        held, wanted = to_float64(scale[where[:live]]), new[:live, part]
        exact = np.abs(wanted).max(axis=-1) / largest
        assert (held >= exact * (1 - 1e-6)).all() and (held <= exact * (1 + 2**-7)).all()
        rows = to_float64(by_token(after.kv_pages)[where[:live], part])
        assert_nearest(rows, wanted / held[..., None], writing.pool)


def bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers).view(np.uint8)


def assert_nearest(held: np.ndarray, wanted: np.ndarray, pool: str) -> None:
    """Numbers of an 8-bit type are the nearest to what was wanted, cut off at its largest."""
    largest = LARGEST[value_dtype(pool).name]
    wanted = np.clip(wanted.astype(np.float64), -largest, largest)
    if pool == "int8":
        step = np.ones_like(wanted)
    else:  # 3 bits of mantissa; below 2^-6 the spacing is 2^-9
        step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(wanted), 2.0**-6))) / 8, 2**-9)
    assert (np.abs(held - wanted) <= step * (0.5 + 1e-5)).all()
