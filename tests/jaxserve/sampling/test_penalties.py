"""Token counts and penalties against loops."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.penalties import TokenCounts, apply_penalties, token_counts
from tests.jaxserve.sampling.oracle import penalised


def test_counts_ignore_what_lies_outside_a_sequence_and_what_has_no_id():
    history = jnp.asarray([[1, -1, 2, 3, 3, -1], [0, 9, 4, 4, 4, 99], [5, 5, 5, 5, 5, 5]])
    counts = jax.jit(token_counts, static_argnums=3)(
        history, jnp.asarray([3, 1, 0]), jnp.asarray([5, 4, 0]), 10
    )
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(counts.prompt_seen)]
    assert seen == [[1, 2], [0], []]
    expected = np.zeros((3, 10), int)
    expected[0, 3], expected[1, 9], expected[1, 4] = 2, 1, 2
    np.testing.assert_array_equal(counts.output_counts, expected)


def test_penalties_agree_with_their_definitions():
    rng = np.random.default_rng(0)
    num_rows, vocab, length = 12, 60, 40
    logits = rng.normal(0, 3, (num_rows, vocab)).astype(np.float32)
    logits[:, 11] = -np.inf
    history = rng.integers(0, vocab, (num_rows, length))
    prompt_len = rng.integers(0, 20, num_rows)
    total_len = prompt_len + rng.integers(0, 20, num_rows)
    presence = rng.uniform(-2, 2, num_rows).astype(np.float32)
    frequency = rng.uniform(-2, 2, num_rows).astype(np.float32)
    repetition = rng.uniform(0.5, 2, num_rows).astype(np.float32)
    counts = token_counts(*map(jnp.asarray, (history, prompt_len, total_len)), vocab)
    result = jax.jit(apply_penalties)(
        jnp.asarray(logits), counts, *map(jnp.asarray, (presence, frequency, repetition))
    )
    for row in range(num_rows):
        prompt = history[row, : prompt_len[row]].tolist()
        output = history[row, prompt_len[row] : total_len[row]].tolist()
        options = (presence[row], frequency[row], repetition[row])
        expected = penalised(logits[row], prompt, output, *map(float, options))
        np.testing.assert_allclose(result[row], expected, rtol=1e-5, atol=1e-5)


def test_penalties_that_are_off_change_no_bit():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1e6, (4, 300)).astype(np.float32)
    logits[0, :5] = [-np.inf, 0.0, -0.0, 1e-40, 3e38]
    counts = TokenCounts(
        jnp.asarray(rng.random((4, 300)) < 0.5), jnp.asarray(rng.integers(0, 9, (4, 300)))
    )
    same = apply_penalties(jnp.asarray(logits), counts, *(jnp.full(4, v) for v in (0.0, 0.0, 1.0)))
    keep = np.abs(logits) > 1e-37
    np.testing.assert_array_equal(np.asarray(same)[keep], logits[keep])
