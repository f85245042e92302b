"""The XLA backend: its tokens against sorted float64 oracles of logits, and its two searches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kept_threshold import xla
from tests.jaxserve.sampling.oracle import probabilities

SHAPES = {"peaked": 3.0, "flat": 0.02, "even": 0.0}


def slow(vocab):
    return pytest.param(vocab, marks=pytest.mark.slow)


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / np.float32(temperature))
    num_rows = len(logits)
    threshold = jax.jit(xla.kept_threshold)(
        jnp.asarray(weights),
        jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), num_rows),
        jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), num_rows),
        jnp.broadcast_to(jnp.asarray(min_p, jnp.float32), num_rows),
    )
    return (weights >= np.asarray(threshold)[:, None]) & (weights > 0)


def check(logits, mask, top_p=1.0, **options):
    """The kept tokens are the smallest upper set that holds top_p, as far as float32 can tell."""
    for row, row_kept in zip(logits, mask):
        left = probabilities(row, **options)
        last = left[row_kept].min()
        assert row_kept[left >= last].all() and not row_kept[left < last].any()
        assert left[row_kept].sum() > top_p - 1e-5, (top_p, options)
        # Weights that float32 cannot tell apart are ties.
        assert left[left > last * (1 + 2e-7)].sum() < top_p + 1e-5 or top_p == 1.0, (top_p, options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [5, slow(100), 128, slow(1000), 2049, slow(20011)])
def test_top_k_is_exact(shape, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, SHAPES[shape], (6, vocab)).astype(np.float32)
    top_k = np.array([0, 1, 2, min(vocab, 128), vocab // 2, vocab + 5])
    mask = kept(logits, top_k=top_k)
    for row, k, row_kept in zip(logits, top_k, mask):
        wanted = vocab if k == 0 or k >= vocab else k
        weights = np.exp(row - row.max())
        np.testing.assert_array_equal(row_kept, weights >= np.sort(weights)[-wanted])


def test_top_k_keeps_ties():
    logits = np.repeat(np.float32([[3, 2, 1]]), 700, axis=1)
    np.random.default_rng(0).shuffle(logits[0])
    for k, expected in ((1, 700), (700, 700), (701, 1400), (1401, 2100)):
        assert kept(logits, top_k=k).sum() == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [5, slow(128), slow(1000), 20011])
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_top_p(shape, vocab, temperature):
    rng = np.random.default_rng(vocab + 1)
    logits = rng.normal(0, SHAPES[shape], (5, vocab)).astype(np.float32)
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.9999):
        options = {"temperature": temperature, "top_p": top_p}
        check(logits, kept(logits, **options), **options)


def test_top_p_is_the_smallest_set():
    logits = np.log(np.float32([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))
    for top_p, expected in ((0.4, 1), (0.6, 2), (0.8, 3), (0.9, 5), (1.0, 5), (1e-9, 1)):
        assert kept(logits, top_p=top_p).sum() == expected, top_p


@pytest.mark.parametrize("min_p", [0.0, 1e-4, 0.1, 0.9, 1.0])
def test_min_p(min_p):
    logits = np.random.default_rng(3).normal(0, 2, (5, 1000)).astype(np.float32)
    check(logits, kept(logits, min_p=min_p), min_p=min_p)


@pytest.mark.slow
def test_all_filters_together():
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 1.5, (8, 5000)).astype(np.float32)
    for _ in range(12):
        options = {
            "temperature": float(rng.uniform(0.5, 2)),
            "top_k": int(rng.choice([0, 5, 100, 1000])),
            "top_p": float(rng.choice([0.2, 0.9, 1.0])),
            "min_p": float(rng.choice([0.0, 0.01])),
        }
        check(logits, kept(logits, **options), **options)


def test_masked_tokens_stay_masked():
    logits = np.full((3, 1000), -np.inf, np.float32)
    logits[:, [3, 500]] = 0.0
    for options in ({"top_k": 10}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.99}):
        for row in kept(logits, **options):
            assert np.flatnonzero(row).tolist() == [3, 500]


@pytest.mark.parametrize("by_mass", [False, True])
def test_both_searches_agree(by_mass):
    """The row-by-row search of CPUs and the static one of accelerators find the same bounds."""
    rng = np.random.default_rng(2)
    weights = np.sort(0.2 + 0.8 * rng.random((6, 3000), np.float32))[:, ::-1].copy()
    place = np.array([0, 4, 127, 128, 2998, 2999])
    rows = np.arange(6)
    target = np.float32(place + 1)
    if by_mass:
        target = weights.cumsum(-1, dtype=np.float64)[rows, place].astype(np.float32) * 0.9999
    known = np.float32([1, 2, 3, 4, 5, 6])
    is_open = np.array([True, True, False, True, True, True])
    arguments = tuple(map(jnp.asarray, (weights, target, known, is_open)))
    expected = np.where(is_open, weights[rows, place], known)
    for search in (xla._search_open_rows, xla._search_all_rows):
        found = jax.jit(search, static_argnames="by_mass")(*arguments, by_mass=by_mass)
        np.testing.assert_allclose(found, expected, rtol=2e-3 if by_mass else 0)


def test_the_vocabulary_is_never_sorted():
    options = (jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2))
    text = jax.jit(xla.kept_threshold).lower(jnp.zeros((2, 20000)), *options).as_text()
    assert "stablehlo.sort" in text
    assert not any("stablehlo.sort" in line and "20000" in line for line in text.splitlines())
