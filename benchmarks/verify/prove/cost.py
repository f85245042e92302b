"""The work of an operation by its shapes: what must be computed and moved at the least.

Attention is counted with every request at the longest context that its page table can name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from benchmarks.verify.prove.cases import Attention, Sampling
from benchmarks.verify.prove.proof import Cost


def _token_bytes(problem: Attention) -> int:
    """Keys and values of one token in all KV heads, scales by token included."""
    pages = jnp.dtype(problem.pages or problem.dtype)
    scale = 2 if pages.itemsize == 1 and problem.scales == "token" else 0
    return 2 * problem.kv_heads * (problem.head_dim * pages.itemsize + scale)


def _shared(problem: Attention, flops: int, size: int) -> Cost:
    return Cost(flops // problem.shards, size // problem.shards, "shapes")


def decode_cost(problem: Attention) -> Cost:
    """The last query tokens of each slot against all that they may see; keys are read once."""
    window = problem.window or problem.context
    first = problem.context - problem.queries
    seen = sum(min(position + 1, window) for position in range(first, problem.context))
    read = min(problem.context, window + problem.queries - 1)
    row = problem.heads * problem.head_dim
    moved = problem.rows * (
        read * _token_bytes(problem) + 2 * problem.queries * row * jnp.dtype(problem.dtype).itemsize
    )
    return _shared(problem, 4 * problem.rows * row * seen, moved)


def prefill_cost(problem: Attention) -> Cost:
    """Chunks of equal length at the end of each lane's context; keys are read once a lane."""
    chunk = problem.rows // problem.lanes
    window = problem.window or problem.context
    first = problem.context - chunk
    visible = sum(min(position + 1, window) for position in range(first, problem.context))
    row = problem.heads * problem.head_dim
    read = problem.lanes * min(problem.context, window + chunk - 1) * _token_bytes(problem)
    moved = read + 2 * problem.rows * row * jnp.dtype(problem.dtype).itemsize
    return _shared(problem, 4 * problem.lanes * row * visible, moved)


def write_cost(problem: Attention) -> Cost:
    """New rows are read once and written once."""
    values = 2 * problem.kv_heads * problem.head_dim
    sizes = [jnp.dtype(name).itemsize for name in (problem.dtype, problem.pages or problem.dtype)]
    return _shared(problem, 0, problem.rows * values * sum(sizes))


def decode_and_write_cost(problem: Attention) -> Cost:
    """As decode, and the new rows are read and written; they are not read again from the pages."""
    decode = decode_cost(problem)
    write = write_cost(replace(problem, rows=problem.rows * problem.queries))
    return Cost(decode.flops, decode.bytes + write.bytes, "shapes")


def threshold_cost(problem: Sampling) -> Cost:
    """The weights are read once to find where the bounds are and once to find them."""
    tokens = problem.rows * problem.vocab
    return Cost(0, 2 * 4 * tokens, "shapes")


def rotate_and_write_cost(problem: Attention) -> Cost:
    """As a write of new rows, and the queries are read and written."""
    queries = 2 * problem.heads * problem.head_dim * jnp.dtype(problem.dtype).itemsize
    write = write_cost(problem)
    return Cost(0, write.bytes + problem.rows * queries // problem.shards, "shapes")


COSTS: dict[str, Callable[[Any], Cost]] = {
    "kept_threshold": threshold_cost,
    "decode": decode_cost,
    "decode_and_write": decode_and_write_cost,
    "prefill": prefill_cost,
    "rotate_and_write": rotate_and_write_cost,
    "write_kv": write_cost,
    "write_kv_scaled": write_cost,
}
