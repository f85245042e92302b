"""Log-probabilities and top-k against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.logprobs import score
from pallas_kernels import blocks
from tests.jaxserve.sampling.oracle import log_softmax


@pytest.mark.parametrize("vocab", [7, 1000, 5000])
@pytest.mark.parametrize("k", [0, 1, 5, 7])
def test_score(vocab, k):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 5, (9, vocab)).astype(np.float32)
    logits[:, 2] = -np.inf
    targets = rng.integers(0, vocab, 9)
    targets[0] = 2
    rows = jax.jit(score, static_argnums=2)(jnp.asarray(logits), jnp.asarray(targets), k)
    expected = log_softmax(logits)
    chosen = expected[np.arange(9), targets]
    np.testing.assert_allclose(rows.sampled, chosen, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows.rank, 1 + (expected > chosen[:, None]).sum(-1))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(rows.top_ids, order)
    wanted = np.take_along_axis(expected, order, -1)
    np.testing.assert_allclose(rows.top_logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert rows.top_ids.dtype == jnp.int32 and rows.rank.dtype == jnp.int32


@pytest.mark.parametrize("vocab", [3, 127, 128, 1000, 4099])
@pytest.mark.parametrize("k", [1, 3, 20, 128])
def test_top_k_with_ties_agrees_with_a_stable_sort(vocab, k):
    k = min(k, vocab)
    for spread in (2, 40, 300, 1000, 10**6):
        x = np.random.default_rng(spread).integers(-spread, spread, (5, vocab)).astype(np.float32)
        values, index = jax.jit(blocks.top_k, static_argnums=1)(jnp.asarray(x), k)
        expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
        np.testing.assert_array_equal(index, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))


def test_top_k_of_rows_with_masked_tokens():
    x = np.full((2, 1000), -np.inf, np.float32)
    x[0, 600] = 1.0
    values, index = blocks.top_k(jnp.asarray(x), 5)
    assert index[0, 0] == 600 and np.all((np.asarray(index) >= 0) & (np.asarray(index) < 1000))
    assert np.all(np.isneginf(np.asarray(values)[1]))
