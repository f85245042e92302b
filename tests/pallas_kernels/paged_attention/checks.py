"""A backend against the float64 oracle, on one drawn problem."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels import paged_decode_attention, paged_prefill_attention
from tests.pallas_kernels import oracle
from tests.pallas_kernels.strategies import Lanes, Program, Slots

STATIC = ("scale", "soft_cap", "window", "splits", "first_page", "backend", "tuning", "interpret")
decode = jax.jit(paged_decode_attention, static_argnames=STATIC)
prefill = jax.jit(
    paged_prefill_attention, static_argnames=[name for name in STATIC if name != "splits"]
)


def check_decode(program: Program, slots: Slots, **call: Any) -> None:
    """Every slot of a decode batch.

    Args:
        call: the backend and its own options.
    """
    case = program.case(slots, np.random.default_rng(slots.seed))
    options = program.options(slots.seed) | case.options
    got = decode(*case[:4], splits=program.splits, **options, **call)
    assert got.dtype == case.q.dtype
    agree(got, oracle.decode(*case[:4], **options), program)


def check_prefill(program: Program, lanes: Lanes, **call: Any) -> None:
    """Every row of a prefill region; rows of no lane are zero."""
    rng = np.random.default_rng(lanes.seed)
    packed, region = program.region(lanes, rng)
    case = program.case(lanes, rng, rows=region)
    options = program.options(lanes.seed) | case.options
    got = prefill(*case[:3], packed, **options, **call)
    assert got.dtype == case.q.dtype
    agree(got, oracle.prefill(*case[:3], packed, **options), program)


def agree(got: jax.Array, want: np.ndarray, program: Program) -> None:
    """Each row by its own magnitude, so that a token missing from a long row shows; idle rows."""
    idle = ~want.any(axis=(1, 2))
    assert not np.asarray(got, np.float32)[idle].any(), "a row that sees nothing is not zero"
    errors = oracle.row_errors(got, want)
    worst = int(errors.argmax())
    limit = oracle.TOLERANCE[program.precision]
    assert errors[worst] <= limit, f"row {worst}: error {errors[worst]:.1e} > {limit:.1e}"
