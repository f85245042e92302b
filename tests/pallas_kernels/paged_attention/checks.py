"""A backend against the float64 oracle, on one drawn problem."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_decode_attention, paged_prefill_attention
from tests.pallas_kernels import oracle
from tests.pallas_kernels.strategies import Lanes, Program, Slots

STATIC = ("scale", "soft_cap", "window", "splits", "first_page", "backend", "tuning", "interpret")
decode = jax.jit(paged_decode_attention, static_argnames=STATIC)
prefill = jax.jit(
    paged_prefill_attention,
    static_argnames=[*(name for name in STATIC if name != "splits"), "row_invariant"],
)


def check_decode(program: Program, slots: Slots, **call: Any) -> None:
    """Every slot of a decode batch.

    Args:
        call: the backend and its own options.
    """
    case = program.case(slots, np.random.default_rng(slots.seed))
    options = program.options(slots.seed) | case.options
    if slots.queries is not None:
        options["query_lens"] = jnp.asarray(slots.queries, jnp.int32)
    pool = program.in_rows(case.kv_pages)
    got = decode(case.q, pool, *case[2:4], splits=program.splits, **options, **call)
    assert got.dtype == case.q.dtype
    agree(got, oracle.decode(*case[:4], **options), program)


def check_queries_as_rows(program: Program, slots: Slots, **call: Any) -> None:
    """A row of several queries against one call for each query of all rows."""
    case = program.case(slots, np.random.default_rng(slots.seed))
    options = program.options(slots.seed) | case.options
    counts = jnp.asarray(slots.queries or [program.queries] * program.rows, jnp.int32)
    options |= {"splits": program.splits, **call}
    got = decode(*case[:4], query_lens=counts, **options)
    for query in range(program.queries):
        ends = jnp.maximum(case.lengths - counts + query + 1, 0)
        ends = jnp.where(query < counts, ends, 0)
        want = decode(case.q[:, query], *case[1:3], ends, **options)
        agree(got[:, query], np.asarray(want, np.float64), program)


def check_prefill(program: Program, lanes: Lanes, **call: Any) -> None:
    """Every row of a prefill region; rows of no lane are zero."""
    rng = np.random.default_rng(lanes.seed)
    packed, region = program.region(lanes, rng)
    case = program.case(lanes, rng, rows=region)
    options = program.options(lanes.seed) | case.options
    pool = program.in_rows(case.kv_pages)
    got = prefill(case.q, pool, case.page_table, packed, **options, **call)
    assert got.dtype == case.q.dtype
    agree(got, oracle.prefill(*case[:3], packed, **options), program)


def agree(got: Any, want: np.ndarray, program: Program) -> None:
    """Each row by its own magnitude, so that a token missing from a long row shows; idle rows."""
    got, want = (np.asarray(x).reshape(-1, *want.shape[-2:]) for x in (got, want))
    idle = ~want.any(axis=(1, 2))
    assert not np.asarray(got, np.float32)[idle].any(), "a row that sees nothing is not zero"
    errors = oracle.row_errors(got, want)
    worst = int(errors.argmax())
    limit = oracle.TOLERANCE[program.precision]
    assert errors[worst] <= limit, f"row {worst}: error {errors[worst]:.1e} > {limit:.1e}"
