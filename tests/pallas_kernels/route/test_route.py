"""Routing against NumPy: the weights, and that the blocks hold every choice once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.backends import OPERATIONS
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear import block_sizes
from pallas_kernels.grouped_linear.blocks import GPU_SIZES, Sizes, block_size, most_blocks
from pallas_kernels.route import route
from tests.pallas_kernels.strategies import SEEDS, examples

# tokens, experts, choices
SHAPES = [(20, 6, 6)]
SLOW_SHAPES = [(1, 8, 2), (37, 40, 8), (64, 128, 8), (64, 8, 2)]
SLOW = [pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES]


def sizes_of(backend: str) -> Sizes:
    return block_sizes(backend) or GPU_SIZES


@functools.cache
def compiled(backend: str, choices: int, normalized: bool) -> Any:
    interpret = None if backend == "xla" else True
    options = {"choices": choices, "normalized": normalized, "sizes": sizes_of(backend)}
    return jax.jit(functools.partial(route, backend=backend, interpret=interpret, **options))


def routed(
    backend: str, scores: np.ndarray, live: np.ndarray, choices: int, normalized: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    run = compiled(backend, choices, normalized)
    weights, blocks = run(jnp.asarray(scores, jnp.float32), jnp.asarray(live))
    rows = np.asarray(blocks.rows).reshape(blocks.groups.shape[0], -1)
    return np.asarray(weights), rows, np.asarray(blocks.groups), np.asarray(blocks.counts)


def check(backend: str, scores: np.ndarray, live: np.ndarray, choices: int) -> None:
    tokens, groups = scores.shape
    best = np.argsort(-scores, axis=1, kind="stable")[:, :choices]
    parts = np.exp(scores - scores.max(1, keepdims=True))
    parts /= parts.sum(1, keepdims=True)
    wanted = np.take_along_axis(parts, best, 1)
    for normalized in (False, True):
        weights, rows, of_block, counts = routed(backend, scores, live, choices, normalized)
        each = wanted / wanted.sum(1, keepdims=True) if normalized else wanted
        np.testing.assert_allclose(weights[live], each[live], rtol=0, atol=2e-6)
        size = block_size(tokens * choices, groups, sizes_of(backend))
        assert len(counts) == most_blocks(tokens * choices, groups, size)
        assert rows.shape[1] == size and (counts >= 0).all() and (counts <= size).all()
        found: dict[int, int] = {}
        for row, group, count in zip(rows, of_block, counts):
            for one in row[:count]:
                assert one not in found
                found[int(one)] = int(group)
        flat = np.flatnonzero(np.repeat(live, choices))
        assert found == {int(i): int(best[i // choices, i % choices]) for i in flat}
        # a group's blocks are full but for its last
        sizes = np.bincount(list(found.values()), minlength=groups) if found else np.zeros(groups)
        assert (counts > 0).sum() == (-(-sizes // size)).sum()


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize("backend", OPERATIONS["route"])
@pytest.mark.parametrize("shape", [*SHAPES, *SLOW], ids=str)
@examples(4)
@given(seed=SEEDS, dead=st.booleans(), ties=st.booleans())
def test_every_choice_is_in_a_block_of_its_expert(
    backend: str, shape: tuple[int, int, int], seed: int, dead: bool, ties: bool
) -> None:
    tokens, groups, choices = shape
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(tokens, groups)) * 3
    scores = np.round(scores) if ties else scores.astype(np.float32).astype(np.float64)
    live = rng.random(tokens) < 0.6 if dead else np.ones(tokens, bool)
    check(backend, scores, live, choices)


@pytest.mark.parametrize("backend", OPERATIONS["route"])
def test_no_token_lives(backend: str) -> None:
    scores = np.random.default_rng(0).normal(size=(5, 8))
    *_, counts = routed(backend, scores, np.zeros(5, bool), 2)
    assert not counts.any()


@pytest.mark.parametrize("backend", ["triton", "mosaic_tpu"])
def test_one_token_without_numbers_spoils_no_other(backend: str) -> None:
    scores = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    scores[2] = np.nan
    _, rows, of_block, counts = routed(backend, scores, np.ones(6, bool), 2)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    held = {int(i): int(g) for r, g, c in zip(rows, of_block, counts) for i in r[:c]}
    held = {i: group for i, group in held.items() if i // 2 != 2}  # it may be in any block or none
    assert held == {i: int(best[i // 2, i % 2]) for i in range(12) if i // 2 != 2}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_as_many_tokens_as_a_tpus_kernel_takes(tied: bool) -> None:
    """Tied: each chooses the same experts."""
    scores = np.random.default_rng(0).normal(size=(256, 256))
    scores = np.zeros_like(scores) if tied else scores.astype(np.float32).astype(np.float64)
    check("mosaic_tpu", scores, np.ones(256, bool), 8)


@pytest.mark.parametrize(("backend", "most"), [("triton", 64), ("mosaic_tpu", 256)])
def test_a_large_batch_takes_the_backend_that_covers_it(backend: str, most: int) -> None:
    scores, live = jnp.zeros((512, 128)), jnp.ones(512, bool)
    options: dict[str, Any] = {"choices": 8, "normalized": True}
    with pytest.raises(KernelError, match=f"at most {most} tokens"):
        route(scores, live, backend=backend, **options)
    text = jax.jit(lambda s: route(s, live, backend=(backend, "xla"), **options)).lower(scores)
    assert "sort" in text.as_text()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scores": jnp.zeros((4, 8), jnp.bfloat16)}, "scores"),
        ({"live": jnp.ones(3, bool)}, "live"),
        ({"choices": 9}, "choices"),
        ({"backend": "gpu"}, "backend"),
    ],
)
def test_refusals_name_the_operand(changes: dict[str, Any], field: str) -> None:
    given_: dict[str, Any] = {
        "scores": jnp.zeros((4, 8)),
        "live": jnp.ones(4, bool),
        "choices": 2,
        "normalized": True,
        "backend": "xla",
    } | changes
    scores, live = given_.pop("scores"), given_.pop("live")
    with pytest.raises(KernelError) as caught:
        route(scores, live, **given_)
    assert caught.value.field == field
