"""The Triton kernel: how often it reads a row, and its program for CUDA."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from benchmarks.verify.prove.gpu_targets import compile_for, gpu_mesh
from pallas_kernels import KernelError, kept_threshold
from pallas_kernels.kept_threshold import triton
from tests.absent_devices import needs_gpu_compiler
from tests.pallas_kernels.kept_threshold.checks import KINDS, bounds, check, check_rows, row
from tests.pallas_kernels.lowering import A100, H200, lowered_for_cuda

INTERPRETED = {"backend": "triton", "interpret": True}
FILTERS = (
    np.int32([0, 5000, 4500, 70, 8000, 0, 900, 0, 300]),
    np.float32([0.9, 1.0, 0.5, 0.7, 0.99, 0.6, 0.3, 0.95, 0.9]),
    np.float32([0, 0, 0, 0.01, 0, 0, 1e-4, 0, 0]),
)


def operands(rows=16, vocab=128256):
    shape = jax.ShapeDtypeStruct
    number = shape((rows,), jnp.float32)
    return shape((rows, vocab), jnp.float32), shape((rows,), jnp.int32), number, number


def loads(jaxpr, of, loops=()):
    """The loops, outermost first, around each load of an operand of a kernel's jaxpr."""
    found = []
    for equation in jaxpr.eqns:
        places = [n for n, value in enumerate(equation.invars) if value is of]
        name = equation.primitive.name
        if places and ("load" in name or name == "get"):
            found.append(loops)
        for key, inner in equation.params.items():
            inner = getattr(inner, "jaxpr", inner)
            if not places or not hasattr(inner, "eqns"):
                continue
            first = 0
            if key == "body_jaxpr":
                first = equation.params["cond_nconsts"]
            if key == "cond_jaxpr" and places[0] >= equation.params["cond_nconsts"]:
                continue
            within = (*loops, name) if name in ("while", "scan") else loops
            found += loads(inner, inner.invars[places[0] - first], within)
    return found


def test_a_row_is_read_at_most_four_times():
    """One loop over the row counts, repeated at most COUNTS times, and one lists."""
    traced = jax.make_jaxpr(partial(kept_threshold, backend="triton"))(*operands())
    (program,) = traced.eqns
    (call,) = program.params["jaxpr"].jaxpr.eqns
    assert call.primitive.name == "pallas_call"
    kernel = call.params["jaxpr"]
    found = loads(kernel, kernel.invars[0])
    assert sorted(len(loop) for loop in found) == [1] * triton.GROUP + [2] * triton.GROUP
    assert triton.COUNTS + 1 <= 4


@pytest.mark.slow
@pytest.mark.parametrize("times", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_counting_only_shortens_the_list(times, monkeypatch):
    """The list alone decides: a crowded row is exact however few reads have narrowed it."""
    monkeypatch.setattr(triton, "COUNTS", times)
    rng = np.random.default_rng(3)
    weights = np.stack([row(kind, 9000 + times, rng) for kind in KINDS])
    top_k = np.int32([0, 5000, 4500, 70, 8000, 0, 900, 0, 300])
    top_p = np.float32([0.9, 1.0, 0.5, 0.7, 0.99, 0.6, 0.3, 0.95, 0.9])
    check_rows(weights, top_k, top_p, np.zeros(len(KINDS), np.float32), **INTERPRETED)


def divided(*operands):
    call = partial(triton.kept_threshold, divided=True, interpret=True)
    return np.asarray(call(*map(jnp.asarray, operands)))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 700, 9000, 40_000])
def test_rows_that_are_divided_among_thread_blocks(vocab):
    """40,000: pieces of two groups of tiles, of which the second is there in part."""
    rng = np.random.default_rng(vocab)
    weights = np.stack([row(kind, vocab, rng) for kind in KINDS])
    ranks, top_p, min_p = FILTERS
    for top_k in (ranks, np.zeros_like(ranks)):
        found = divided(weights, top_k, top_p, min_p)
        for case in zip(weights, found, top_k, top_p, min_p, strict=True):
            check(*case)
    whole = bounds(weights, top_k, top_p, min_p, **INTERPRETED)
    np.testing.assert_array_equal(found, whole)


@pytest.mark.slow
@pytest.mark.parametrize("times", [0, 1])
def test_counting_only_shortens_the_lists_of_divided_rows(times, monkeypatch):
    monkeypatch.setattr(triton, "COUNTS", times)
    rng = np.random.default_rng(3)
    weights = np.stack([row(kind, 9000 + times, rng) for kind in KINDS])
    found = divided(weights, *FILTERS)
    for case in zip(weights, found, *FILTERS, strict=True):
        check(*case)


@pytest.mark.slow
def test_the_kernels_of_divided_rows_are_short():
    """Triton's compiler takes a minute for one of 4,000 operations, and a few seconds for these."""

    def length(jaxpr):
        inner = [
            getattr(value, "jaxpr", value)
            for equation in jaxpr.eqns
            for value in equation.params.values()
        ]
        return len(jaxpr.eqns) + sum(length(one) for one in inner if hasattr(one, "eqns"))

    call = partial(triton.kept_threshold, divided=True)
    (program,) = jax.make_jaxpr(call)(*operands()).eqns
    calls = [one for one in program.params["jaxpr"].jaxpr.eqns if "pallas" in one.primitive.name]
    assert len(calls) == triton.COUNTS + 2
    assert max(length(one.params["jaxpr"]) for one in calls) < 2100


def test_few_rows_are_divided():
    """By the multiprocessors of the GPU that is traced for: 132 and 108."""
    for device, rows in ((H200, 16), (A100, 13)):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            assert triton.is_divided(rows) and not triton.is_divided(rows + 1)
    assert not triton.is_divided(1), "an interpreter runs one block after the other"


@pytest.mark.slow
@pytest.mark.parametrize(
    "find", [partial(bounds, **INTERPRETED), divided], ids=["whole", "divided"]
)
def test_nothing_is_read_where_every_filter_is_off(find):
    weights = np.full((4, 9000), np.nan, np.float32)
    top_k, min_p = np.int32([0, 9000, 0, 9001]), np.float32([0.0, 0.0, 0.25, 0.5])
    found = find(weights, top_k, np.ones(4, np.float32), min_p)
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.25, 0.5])


@pytest.mark.slow
def test_any_weights_come_to_an_end():
    rng = np.random.default_rng(5)
    weights = np.abs(rng.normal(0, 1, (6, 9000))).astype(np.float32)
    weights[0] = np.nan
    weights[1, ::3] = np.nan
    weights[2, 7] = np.inf
    weights[3] = np.inf
    weights[4] = 0.0
    found = bounds(
        weights, [500, 500, 0, 9, 0, 70], [0.9, 0.5, 0.5, 1.0, 0.3, 0.1], 0.0, **INTERPRETED
    )
    assert np.all((found >= 0) & (found <= 1))


def test_more_weights_than_can_be_addressed_are_refused():
    with pytest.raises(KernelError, match=r"weights.shape.*2\^31"):
        jax.eval_shape(partial(kept_threshold, backend="triton"), *operands(2**14, 131073))


def test_sums_lose_nothing():
    rng = np.random.default_rng(6)
    terms = (10.0 ** rng.uniform(-7, 0, (300, triton.LANES))).astype(np.float32)

    @jax.jit
    def summed(terms):
        none = jnp.zeros(triton.LANES)
        total, _ = jax.lax.scan(lambda sums, x: (triton._add(sums, x), None), (none, none), terms)
        return triton._across(total)

    high, low = map(np.float64, summed(terms))
    exact = terms.astype(np.float64).sum()
    assert abs(high + low - exact) < 2e-9 * exact
    # a plain sum in the same order is not as good
    assert abs(np.cumsum(terms, axis=0)[-1].astype(np.float64).sum() - exact) > 2e-9 * exact


@pytest.mark.parametrize(
    ("device", "kernels"),
    [(A100, 1), pytest.param(H200, triton.COUNTS + 2, marks=pytest.mark.slow)],
    ids=["a100", "h200"],
)
def test_lowers_for_cuda_without_a_gpu(device, kernels):
    """16 rows, which an H200 has thread blocks enough to divide."""
    function = partial(kept_threshold, backend="triton")
    text = lowered_for_cuda(function, *operands(), device=device).as_text()
    assert text.count("xla.gpu.triton") == kernels
    assert "stablehlo.while" not in text and "stablehlo.sort" not in text


@needs_gpu_compiler
@pytest.mark.parametrize("kind", ["h200", "a100"])
def test_compiles_without_a_loop_outside_the_kernel(kind):
    call = partial(kept_threshold, backend="triton")
    compiled = compile_for(gpu_mesh(kind), call, *operands())
    assert not re.search(r"\b(while|conditional|sort)\(", compiled.as_text())
