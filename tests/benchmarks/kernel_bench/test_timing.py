"""The fixed cost of a series cancels out, and candidates take turns."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from benchmarks.kernel_bench.timing import (
    Candidate,
    difference,
    interleaved,
    jax_candidate,
    relative_difference,
)


def test_the_difference_of_two_series_has_no_launch_cost():
    assert difference(lambda calls: 5.0 + 0.25 * calls, 3, 11) == pytest.approx(0.25)
    assert math.isnan(difference(lambda calls: -calls, 1, 2))


def test_candidates_take_turns_and_a_failing_one_is_told():
    order = []

    def sampler(name, values):
        def sample():
            order.append(name)
            value = values[order.count(name) - 1]
            if isinstance(value, Exception):
                raise value
            return value

        return Candidate(name, sample)

    medians, failed = interleaved(
        [
            sampler("a", [3.0, 1.0, 2.0]),
            sampler("b", [1.0, RuntimeError("gone"), 1.0]),
            sampler("c", [math.nan] * 3),
        ],
        rounds=3,
    )
    assert order == ["a", "b", "c", "a", "b", "c", "a", "c"]
    assert medians["a"] == 2.0 and math.isnan(medians["c"])
    assert "b" not in medians and "gone" in failed["b"]


def test_after_an_error_of_the_device_nothing_is_timed_but_full_memory_is_a_row():
    def sample(message):
        def raising():
            raise jax.errors.JaxRuntimeError(message)

        return Candidate("a", raising)

    with pytest.raises(jax.errors.JaxRuntimeError):
        interleaved([sample("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")])
    _, failed = interleaved([sample("RESOURCE_EXHAUSTED: out of memory")])
    assert "out of memory" in failed["a"]


def test_a_program_runs_over_every_rotation_and_its_first_result_is_compared():
    seen = []

    def program(x):
        seen.append(float(x[0]))
        return x * 2

    rotations = [(np.full(4, float(i)),) for i in range(3)]
    candidate = jax_candidate("x", program, rotations, operations=4)
    candidate.sample()
    assert set(seen) == {0.0, 1.0, 2.0}
    assert (candidate.result() == 0).all()


def test_differences_are_relative_and_nan_is_infinite():
    wanted = np.array([3.0, 4.0])
    assert relative_difference(wanted * 1.1, wanted) == pytest.approx(0.1)
    assert relative_difference(np.array([np.nan, 4.0]), wanted) == math.inf
    assert relative_difference(np.zeros(3), wanted) == math.inf
