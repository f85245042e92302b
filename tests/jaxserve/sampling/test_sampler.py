"""The sampler: its distribution, its reproducibility, and its edges."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks.verify.prove.gpu_targets import compile_for, gpu_mesh
from jaxserve.sampling.penalties import TokenCounts, apply_penalties
from jaxserve.sampling.sampler import (
    PORTABLE,
    SamplingRows,
    pick,
    random_words,
    sample,
    sample_apart,
)
from pallas_kernels import blocks, choose_backends, kept_threshold
from tests.absent_devices import needs_gpu_compiler
from tests.jaxserve.sampling.draws import compiled_sample, make_rows
from tests.jaxserve.sampling.oracle import penalised, probabilities

DRAWS = 4096
ONE_BELOW = 1.0 - 2.0**-24  # the largest uniform number
compiled_pick = jax.jit(pick)


def chi_square(tokens, expected):
    """p-value of the counts of tokens against probabilities; rare tokens are counted together."""
    counts = np.bincount(tokens, minlength=expected.size).astype(float)
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    rare = expected * len(tokens) < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * len(tokens)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    return scipy.stats.chisquare(observed, wanted).pvalue


def many_draws(logits, seed=3, **options):
    rows = make_rows(DRAWS, seed, **options)
    tiled = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (DRAWS, 1))
    return np.asarray(compiled_sample(tiled, rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 250},
        {"top_p": 0.5},
        {"top_p": 0.97, "temperature": 2.0},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "vocab", [300, *(pytest.param(size, marks=pytest.mark.slow) for size in (37, 1000))]
)
def test_distribution(options, vocab):
    logits = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    tokens = many_draws(logits, **options)
    assert chi_square(tokens, probabilities(logits, **options)) > 1e-4


@pytest.mark.slow
def test_rare_tokens_keep_their_probability():
    # 2048 tokens share 2 % of the mass: each lies below the resolution of one float32 inversion
    # of a row whose first token has nearly everything.
    logits = np.full(2049, np.log(0.02 / 2048))
    logits[0] = np.log(0.98)
    tokens = many_draws(logits)
    tail = tokens[tokens > 0]
    assert 40 < len(tail) < 130
    assert scipy.stats.kstest(tail / 2049, "uniform").pvalue > 1e-3


@pytest.mark.slow
def test_distribution_with_penalties_and_bias():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1.5, 50).astype(np.float32)
    prompt, output = [1, 2, 2, 3], [3, 4, 4, 4, 5]
    bias = np.zeros(50, np.float32)
    bias[7], bias[8] = 3.0, -np.inf
    seen = np.zeros((1, 50), bool)
    seen[:, prompt] = True
    counts = np.bincount(output, minlength=50).astype(np.int32)[None]
    ours = apply_penalties(
        jnp.asarray(logits + bias)[None],
        TokenCounts(jnp.asarray(seen), jnp.asarray(counts)),
        *(jnp.full(1, value, jnp.float32) for value in (0.7, -0.4, 1.3)),
    )
    tokens = many_draws(ours[0], top_p=0.95)
    with np.errstate(invalid="ignore"):
        adjusted = penalised(logits + bias, prompt, output, 0.7, -0.4, 1.3)
    assert chi_square(tokens, probabilities(adjusted, top_p=0.95)) > 1e-4


def mixed_rows(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return make_rows(
        num_rows,
        rng.integers(0, 2**62, num_rows),
        rng.integers(0, 10_000, num_rows),
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7], num_rows),
        top_p=rng.choice([0.3, 0.9, 1.0], num_rows),
        top_k=rng.choice([0, 1, 20, 500], num_rows),
        min_p=rng.choice([0.0, 0.05], num_rows),
    )


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch():
    vocab = 2049
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(0, 2, (24, vocab)), jnp.float32)
    rows = mixed_rows(24)
    tokens = np.asarray(compiled_sample(logits, rows))
    order = rng.permutation(24)
    shuffled = compiled_sample(logits[order], jax.tree.map(lambda field: field[order], rows))
    np.testing.assert_array_equal(tokens[order], shuffled)
    for first, last in ((3, 4), (8, 24)):
        part = jax.tree.map(lambda field: field[first:last], rows)  # noqa: B023
        some = compiled_sample(logits[first:last], part)
        np.testing.assert_array_equal(tokens[first:last], some)


@pytest.mark.slow
def test_the_kernel_of_gpus_gives_the_same_tokens():
    rng = np.random.default_rng(7)
    logits = jnp.asarray(rng.normal(0, 2, (24, 5000)), jnp.float32)
    rows = mixed_rows(24, 5)
    kernel = partial(kept_threshold, backend="triton", interpret=True)
    sampled = partial(jax.jit, static_argnames="threshold")(sample)
    got, want = (
        np.asarray(sampled(logits, rows, threshold=threshold)) for threshold in (kernel, PORTABLE)
    )
    np.testing.assert_array_equal(got, want)


@needs_gpu_compiler
def test_on_a_gpu_no_loop_leaves_the_graph():
    """XLA records no `while` in a CUDA graph; loops inside a kernel do not concern it."""
    shape = jax.ShapeDtypeStruct
    fields = {"seed": shape((16, 2), jnp.uint32), "top_k": shape((16,), jnp.int32)}
    fields |= {name: shape((16,), jnp.float32) for name in ("temperature", "top_p", "min_p")}
    rows = SamplingRows(**fields, position=shape((16,), jnp.int32))
    options = choose_backends("NVIDIA H200", "gpu").threshold_options
    call = partial(sample, threshold=partial(kept_threshold, **options))
    compiled = compile_for(gpu_mesh("h200"), call, shape((16, 128256), jnp.float32), rows)
    assert not re.search(r"\b(while|conditional|sort)\(", compiled.as_text())


def test_seed_and_position_decide():
    logits = jnp.zeros((64, 5000), jnp.float32)

    def draw(seeds, positions):
        return np.asarray(compiled_sample(logits, make_rows(64, seeds, positions)))

    first = draw(7, range(64))
    np.testing.assert_array_equal(first, draw(7, range(64)))
    for other in (draw(8, range(64)), draw(2**32 + 7, range(64)), draw(-7, range(64))):
        assert np.mean(first == other) < 0.1
    assert len(set(first)) > 55
    assert len(set(draw(7, 3))) == 1


def test_random_words_follow_the_documented_key():
    seeds = np.array([[0, 5], [1, 2**32 - 1]], np.uint32)
    words = random_words(jnp.asarray(seeds), jnp.asarray([9, 0], jnp.int32))
    for row, (seed, position) in enumerate(zip(seeds, (9, 0))):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        np.testing.assert_array_equal(words[row], jax.random.bits(key, (2,), jnp.uint32))
    same = jax.random.key_data(jax.random.key(5, impl="threefry2x32"))
    np.testing.assert_array_equal(seeds[0], same)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 1000, 2049])
def test_greedy_takes_the_lowest_of_equals(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 3, (40, vocab)).astype(np.float32)
    logits[0] = 0.0
    logits[1, : vocab // 2] = -np.inf
    tokens = compiled_sample(jnp.asarray(logits), make_rows(40, temperature=0.0))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(blocks.argmax(jnp.asarray(logits))[1], logits.max(-1))


@pytest.mark.parametrize("u", [0.0, 1e-45, 0.5, ONE_BELOW])
@pytest.mark.parametrize("vocab", [130, 1000])
def test_weight_zero_is_never_picked(u, vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.random((200, vocab)).astype(np.float32) * (rng.random((200, vocab)) < 0.02)
    weights[:, 0] = weights[:, -1] = 0.0
    weights[:, vocab // 2] += 1e-30
    weights[::2] *= np.float32(1e-6)
    index = np.asarray(compiled_pick(jnp.asarray(weights), jnp.full((200, 2), u, jnp.float32)))
    assert np.all(np.take_along_axis(weights, index[:, None], -1) > 0)
    if u == 0.0:
        np.testing.assert_array_equal(index, (weights > 0).argmax(-1))
    if u == ONE_BELOW:
        heavy = weights.cumsum(-1, dtype=np.float64) >= 0.9999 * weights.sum(-1, keepdims=True)
        assert np.mean(index >= heavy.argmax(-1)) > 0.99


def test_pick_of_nothing_stays_in_range():
    index = compiled_pick(jnp.zeros((200, 1000)), jnp.full((200, 2), 0.7))
    assert np.all((np.asarray(index) >= 0) & (np.asarray(index) < 1000))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30])
@pytest.mark.parametrize("temperature", [0.01, 2.0])
def test_extreme_logits_and_temperatures(scale, temperature):
    logits = np.random.default_rng(0).normal(0, 1, 300).astype(np.float32) * np.float32(scale)
    tokens = many_draws(logits, temperature=temperature, top_p=0.9, top_k=200)
    expected = probabilities(logits, temperature, 200, 0.9)
    if scale > 1:
        np.testing.assert_array_equal(tokens, logits.argmax())
    assert np.all(expected[tokens] > 0) or scale < 1


def test_masked_rows():
    logits = np.zeros((4, 300), np.float32)
    bias = np.full((4, 300), -np.inf, np.float32)
    bias[0, 299] = bias[1, 5] = bias[2, [7, 8]] = 0.0  # row 3 allows nothing
    rows = make_rows(4, temperature=[1.0, 0.0, 1.0, 1.0], top_p=0.9, top_k=3)
    tokens = np.asarray(compiled_sample(jnp.asarray(logits + bias), rows))
    assert tokens[0] == 299 and tokens[1] == 5 and tokens[2] in (7, 8)
    assert 0 <= tokens[3] < 300


def test_broken_logits_stay_in_range():
    logits = np.zeros((3, 1000), np.float32)
    logits[0, 5], logits[1] = np.nan, np.nan
    logits[2, 4] = np.inf
    for temperature in (0.0, 1.0):
        rows = make_rows(3, temperature=temperature, top_p=0.5, top_k=200)
        tokens = np.asarray(compiled_sample(jnp.asarray(logits), rows))
        assert np.all((tokens >= 0) & (tokens < 1000))
        assert tokens[2] == 4


@pytest.mark.slow
def test_rows_apart_have_the_sums_that_they_have_alone():
    """Of the weights, as a search for a bound sees them."""
    seen = []

    def bound(weights, *filters):
        jax.debug.callback(lambda sums: seen.extend(sums.tolist()), weights.sum(-1), ordered=True)
        return PORTABLE(weights, *filters)

    logits = jnp.asarray(np.random.default_rng(4).normal(0, 3, (32, 2048)), jnp.float32)
    rows = make_rows(32, 5, top_p=0.9, top_k=300)
    draw = jax.jit(partial(sample_apart, threshold=bound))
    tokens = draw(logits, rows)
    one_by_one = [
        draw(logits[at : at + 1], jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], rows))
        for at in range(32)
    ]
    np.testing.assert_array_equal(tokens, np.concatenate(one_by_one))
    np.testing.assert_array_equal(tokens, sample(logits, rows))
    jax.effects_barrier()
    assert len(set(seen)) == 32 and seen[:32] == seen[32:]
