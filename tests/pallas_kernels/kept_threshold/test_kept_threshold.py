"""kept_threshold on every backend against float64, and what it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError, choose_backends, kept_threshold
from tests.pallas_kernels.kept_threshold.checks import KINDS, WITHIN, bounds, check_rows, row
from tests.pallas_kernels.strategies import examples

BACKENDS = {
    "reference": {"backend": "reference"},
    "xla": {"backend": "xla"},
    "triton": {"backend": "triton", "interpret": True},
}
ROWS = 2 * len(KINDS)


def drawn(vocab, rng):
    """Two rows of each kind with filters of every combination."""
    weights = np.stack([row(kind, vocab, rng) for kind in KINDS for _ in range(2)])
    ranks = [0, 1, 2, 7, 65, vocab // 20, vocab // 3, vocab - 1, vocab, vocab + 5]
    shares = np.float32([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.99999, 1.0])
    shares[-2] = 1 - 2.0**-24
    floors = [0.0, 0.0, 1e-30, 1e-4, 0.05, 1.0]
    off = rng.random((3, ROWS)) < 0.4
    top_k = np.where(off[0], 0, rng.choice(ranks, ROWS)).astype(np.int32)
    top_p = np.where(off[1], np.float32(1), rng.choice(shares, ROWS)).astype(np.float32)
    return weights, top_k, top_p, np.where(off[2], 0, rng.choice(floors, ROWS)).astype(np.float32)


SIZES = [(name, size) for size in (5, 1000, 1, 2, 100, 4097, 20011) for name in BACKENDS]
QUICK = [("reference", 5), ("xla", 5)]


@pytest.mark.parametrize(
    ("backend", "vocab"),
    [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in SIZES],
)
def test_the_kept_tokens_are_those_of_float64(backend, vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(4):
        check_rows(*drawn(vocab, rng), **BACKENDS[backend])


@st.composite
def problems(draw, rows=6, vocab=6000):
    """Rows of any kinds with any filters, near each other's borders too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = np.stack([row(draw(st.sampled_from(KINDS)), vocab, rng) for _ in range(rows)])
    numbers = st.floats(0, 1, width=32)
    top_k = np.int32([draw(st.integers(0, vocab + 1)) for _ in range(rows)])
    top_p = np.float32([draw(st.one_of(st.just(1.0), numbers)) for _ in range(rows)])
    # as often as not exactly one of the row's weights
    place = [draw(st.integers(0, vocab - 1)) for _ in range(rows)]
    min_p = np.where(rng.random(rows) < 0.5, weights[np.arange(rows), place], 0)
    return weights, top_k, np.maximum(top_p, np.float32(1e-7)), min_p.astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "triton"])
@examples(12)
@given(problem=problems())
def test_any_filters_of_any_rows(backend, problem):
    check_rows(*problem, **BACKENDS[backend])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_every_rank(backend):
    weights = np.stack([row("normal", 300, np.random.default_rng(4))] * 301)
    top_k = np.arange(301, dtype=np.int32)
    kept = (weights >= bounds(weights, top_k, 1.0, 0.0, **BACKENDS[backend])[:, None]).sum(-1)
    np.testing.assert_array_equal(kept, np.where(top_k == 0, 300, top_k))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_weights_are_kept_together(backend):
    weights = np.repeat(np.float32([[1.0, 0.5, 0.25]]), 2000, axis=1)
    np.random.default_rng(0).shuffle(weights[0])
    top_k = [1, 2000, 2001, 4001, 0, 0, 0]
    top_p = [1, 1, 1, 1, 0.1, 4 / 7 + 2 * WITHIN, 4 / 7 - 2 * WITHIN]
    found = bounds(np.repeat(weights, 7, axis=0), top_k, top_p, 0.0, **BACKENDS[backend])
    kept = (weights >= found[:, None]).sum(-1)
    assert kept.tolist() == [2000, 2000, 4000, 6000, 2000, 4000, 2000]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_top_p_counts_what_top_k_leaves(backend):
    weights = np.float32([[1.0, 1.0, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125]])
    for top_k, top_p, expected in ((3, 0.79, 2), (3, 0.81, 3), (0, 0.73, 3), (0, 0.75, 5)):
        found = bounds(weights, top_k, top_p, 0.0, **BACKENDS[backend])
        assert (weights >= found[:, None]).sum() == expected, (top_k, top_p)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_row_does_not_depend_on_its_batch(backend):
    rng = np.random.default_rng(8)
    operands = drawn(5000, rng)
    found = bounds(*operands, **BACKENDS[backend])
    order = rng.permutation(ROWS)[:5]
    some = bounds(*(operand[order] for operand in operands), **BACKENDS[backend])
    np.testing.assert_array_equal(found[order], some)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"weights": jnp.zeros((2, 3, 4))}, "weights.shape"),
        ({"weights": jnp.zeros((2, 0))}, "weights.shape"),
        ({"weights": jnp.zeros((2, 8), jnp.bfloat16)}, "weights"),
        ({"top_k": jnp.zeros(2)}, "top_k"),
        ({"top_p": jnp.zeros(3)}, "top_p"),
        ({"min_p": jnp.zeros((2, 1))}, "min_p"),
        ({"backend": "cuda"}, "backend"),
        ({"interpret": True}, "interpret"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name(changed, field):
    call = {"weights": jnp.zeros((2, 8)), "top_k": jnp.zeros(2, jnp.int32), "top_p": jnp.ones(2)}
    call |= {"min_p": jnp.zeros(2), "backend": "xla"}
    with pytest.raises(KernelError) as refusal:
        kept_threshold(**{**call, **changed})
    assert refusal.value.field == field


def test_gpus_have_the_kernel():
    for kind in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA B200"):
        assert choose_backends(kind, "gpu").threshold_options == {
            "backend": "triton",
            "interpret": None,
        }
    for kind, platform in (("cpu", "cpu"), ("TPU v5 lite", "tpu"), ("Tesla T4", "gpu")):
        assert choose_backends(kind, platform).threshold_options == {"backend": "xla"}
