"""Log-probabilities and top-k against NumPy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.features import Facts
from jaxserve.execution.features.logprobs import LogprobInputs, Logprobs
from jaxserve.sampling.logprobs import log_normalizer, score
from pallas_kernels import blocks
from tests.jaxserve.sampling.oracle import log_softmax


@pytest.mark.parametrize(("vocab", "k"), [(7, 0), (7, 7), (1000, 1), (5000, 5)])
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


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it():
    logits = np.random.default_rng(0).normal(0, 3, (32, 199)).astype(np.float32)
    norm = jax.jit(log_normalizer)
    (alone, few, many) = (
        np.concatenate([norm(logits[at : at + rows]) for at in range(0, 32, rows)])
        for rows in (1, 8, 32)
    )
    np.testing.assert_array_equal(alone, many)
    np.testing.assert_array_equal(few, many)
    wanted = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(many[:, 0], wanted, rtol=2e-7)
    odd = jnp.array([[0.0, jnp.nan], [jnp.inf, 0.0], [-jnp.inf, -jnp.inf], [-jnp.inf, 2.0]])
    np.testing.assert_array_equal(norm(odd)[:, 0], [np.nan, np.inf, -np.inf, 2.0])
    gradient = jax.grad(lambda row: log_normalizer(row)[0])(jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(gradient, jax.nn.softmax(jnp.array([1.0, 2.0, 3.0])), rtol=1e-5)


def test_the_most_likely_of_those_that_are_kept():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (4, 300)).astype(np.float32)
    kept = rng.random((4, 300)) < 0.3
    kept[3] = np.arange(300) < 2
    rows = score(jnp.asarray(logits), jnp.zeros(4, jnp.int32), 5, jnp.asarray(kept))
    expected = np.where(kept, log_softmax(logits), -np.inf)  # of the whole vocabulary's sum
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :5]
    np.testing.assert_array_equal(rows.top_ids[:3], order[:3])
    np.testing.assert_allclose(
        rows.top_logprobs, np.take_along_axis(expected, order, -1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(rows.sampled, log_softmax(logits)[:, 0], rtol=1e-5, atol=1e-5)


def test_a_beam_is_told_of_tokens_that_may_follow_alone():
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 2, (2, 40)).astype(np.float32))
    adjusted = jnp.where(jnp.arange(40) % 3 == 0, logits, -jnp.inf)
    inputs = LogprobInputs(named=jnp.zeros((2, 1), jnp.int32), of_kept=jnp.asarray([0, 1]))
    feature, rows = Logprobs(Facts(logits.shape[1], 4)), SimpleNamespace(adjusted=adjusted)
    told = feature.after(inputs, rows, logits, jnp.zeros(2, jnp.int32))
    assert told.top_ids[0].tolist() == np.argsort(-logits[0], kind="stable")[:4].tolist()
    assert told.top_ids[1].tolist() == np.argsort(-adjusted[1], kind="stable")[:4].tolist()
    expected = log_softmax(np.asarray(logits))[1, told.top_ids[1]]
    np.testing.assert_allclose(told.top_logprobs[1], expected, rtol=1e-5, atol=1e-5)


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
