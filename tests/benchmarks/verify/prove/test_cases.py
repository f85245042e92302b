"""The list of cases, their operands and their cost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.verify.prove import CASES, KINDS, Attention, Cost, cases_for
from benchmarks.verify.prove.cases import Experts, Sampling
from benchmarks.verify.prove.cost import (
    decode_and_write_cost,
    decode_cost,
    prefill_cost,
    rotate_and_write_cost,
    threshold_cost,
    write_cost,
)
from benchmarks.verify.prove.grouped_problem import grouped_cost, weight_elements
from benchmarks.verify.prove.problems import BUILDERS, POOL_BYTES


def test_every_case_is_listed_once_and_for_known_kinds() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert set(case.quick) <= set(case.kinds) <= set(KINDS)
        assert case.operation in BUILDERS
        # float32 is multiplied exactly, without matrix instructions, and a rotation has no product
        plain = not case.own or case.problem.dtype == "float32"
        plain |= case.operation == "rotate_and_write"
        assert case.requires is None or not plain, case.name
        assert case.requires is not None or plain, case.name
    for kind in KINDS:
        assert cases_for(kind), f"a run for {kind} would pass without a proof"


def test_a_quick_run_proves_every_own_backend_of_the_list() -> None:
    own = {(case.operation, case.backend) for case in CASES if case.own}
    quick = {(case.operation, case.backend) for case in CASES if case.quick}
    assert own <= quick
    assert set(cases_for("h200", quick=True)) < set(cases_for("h200"))
    assert {case.backend for case in cases_for("h200", backend="xla")} == {"xla"}


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.own], ids=lambda case: case.name
)
def test_operands_fit_the_operation(case) -> None:
    problem = BUILDERS[case.operation](case, case.kinds[0])
    result = jax.eval_shape(problem.function, *problem.operands)
    # most give back what they are given first, kept_threshold a number a row
    expected = problem.operands[-1 if case.operation == "kept_threshold" else 0]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), result) == jax.tree.map(
        lambda a: (a.shape, a.dtype), expected
    )
    jax.tree.map(lambda leaf, spec: None, problem.operands, problem.specs)
    if problem.in_place:
        assert POOL_BYTES * 0.99 < problem.in_place <= POOL_BYTES


def test_the_cost_of_a_threshold() -> None:
    assert threshold_cost(Sampling(3, 100)).bytes == 2 * 3 * 100 * 4


def test_the_cost_of_experts() -> None:
    """Those that tokens may choose are read once each."""
    problem = Experts(rows=3, experts=4, choices=2, inputs=256, outputs=128, weight="int8")
    matrix, rows = 256 * 128 + 4 * 128, 3 * 2 * (256 + 128) * 2
    assert grouped_cost(problem).bytes == 4 * matrix + rows
    assert grouped_cost(problem).flops == 2 * 3 * 2 * 256 * 128
    assert grouped_cost(replace(problem, rows=1)).bytes == 2 * matrix + rows // 3


def test_a_copy_of_experts_is_known_by_its_elements() -> None:
    """Filled up on a TPU, where 768 inputs are 256 words in the place of 192."""
    numbers, matrices = 128 * 2048 * 768, 128
    words = {name: 128 * 2048 * count for name, count in {"triton": 192, "mosaic_tpu": 256}.items()}
    for backend, count in words.items():
        whole = {numbers, count, 4 * count}
        wanted = whole | {size // matrices for size in whole}
        assert weight_elements(Experts(), backend) == wanted


def test_the_cost_of_decode() -> None:
    problem = Attention(rows=3, heads=4, kv_heads=2, head_dim=8, context=100)
    cost = decode_cost(problem)
    assert cost.flops == 3 * 4 * 100 * (2 * 8 + 2 * 8)
    assert cost.bytes == 3 * (100 * 2 * 2 * 8 * 2 + 2 * 4 * 8 * 2)
    windowed = Attention(rows=3, heads=4, kv_heads=2, head_dim=8, context=100, window=10)
    assert decode_cost(windowed).flops * 10 == cost.flops
    several = decode_cost(replace(problem, queries=4))
    assert several.flops == 3 * 4 * (97 + 98 + 99 + 100) * (2 * 8 + 2 * 8)
    assert several.bytes - cost.bytes == 3 * 3 * 2 * 4 * 8 * 2  # the keys are read once
    windowed = decode_cost(replace(windowed, queries=4))
    assert windowed.bytes == 3 * (13 * 2 * 2 * 8 * 2 + 4 * 2 * 4 * 8 * 2)
    eight = Attention(3, 4, 2, 8, pages="int8", scales="token", context=100)
    assert decode_cost(eight).bytes == 3 * (100 * 2 * 2 * (8 + 2) + 2 * 4 * 8 * 2)


def test_the_cost_of_a_rotation_and_its_write() -> None:
    problem = Attention(rows=3, heads=4, kv_heads=2, head_dim=8)
    rows = 3 * (4 + 2 + 2) * 8 * 2  # of queries, keys and values, 2 bytes a number
    assert rotate_and_write_cost(problem) == Cost(0, 2 * rows, "shapes")


@pytest.mark.parametrize("window", [None, 7])
def test_the_cost_of_prefill_counts_what_each_row_sees(window: int | None) -> None:
    problem = Attention(12, 4, 2, 8, window=window, lanes=3, context=20)
    seen = [
        (lane, row, key)
        for lane, row in itertools.product(range(3), range(16, 20))
        for key in range(row + 1)
        if window is None or row - key < window
    ]
    cost = prefill_cost(problem)
    assert cost.flops == len(seen) * 4 * 4 * 8
    read = len({(lane, key) for lane, _, key in seen}) * 2 * 2 * 8 * 2
    assert cost.bytes == read + 2 * 12 * 4 * 8 * 2


def test_the_cost_of_a_write() -> None:
    row = 2 * 2 * 8
    both = decode_and_write_cost(Attention(5, 4, 2, 8, context=100)).bytes
    assert both - decode_cost(Attention(5, 4, 2, 8, context=100)).bytes == 5 * row * (2 + 2)
    assert write_cost(Attention(5, 4, 2, 8)).bytes == 5 * row * (2 + 2)
    stored = jnp.dtype("float8_e4m3fn").itemsize
    assert write_cost(Attention(5, 4, 2, 8, pages="float8_e4m3fn")).bytes == 5 * row * (2 + stored)
