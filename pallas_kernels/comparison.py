"""An attention backend beside the reference, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.backends import has
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import (
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)

REFERENCE = "reference"
OPERATIONS = ("decode", "prefill")


class Difference(NamedTuple):
    """How far a backend's result is from the reference's.

    Attributes:
        operation: "decode" or "prefill".
        largest: the largest difference of two numbers; NaN where the backend read what it must not.
        of: the largest number of the reference.
    """

    operation: str
    largest: float
    of: float


def compare_attention(
    backend: str,
    *,
    contexts: Sequence[int] = (1, 17, 100, 260),
    chunk: int = 48,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: DTypeLike = jnp.float32,
    soft_cap: float | None = None,
    window: int | None = None,
    seed: int = 0,
    interpret: Any = None,
) -> list[Difference]:
    """Random queries over random pages, by a backend and by the reference in plain JAX.

    Pages lie in no order, and what no query may see is NaN.

    Args:
        backend: of the package, or `module:NAME` of your own.
        contexts: tokens of each decode row, and before each chunk of a prompt.
        chunk: tokens of each prompt's chunk.
        heads, kv_heads, head_dim, page_size, dtype, soft_cap, window: of the model and its cache.
        seed: of the numbers.
        interpret: parameters of a kernel's interpreter, where its device is not here.

    Returns:
        An entry for each of the operations that the backend has.

    Raises:
        KernelError: the backend is not there, has no attention, or does not cover the shape.
    """
    rng = np.random.default_rng(seed)
    implemented = [name for name in OPERATIONS if has(name, backend)]
    if not implemented:
        raise KernelError("backend", repr(backend), "one with decode or prefill")
    options = {"scale": head_dim**-0.5, "soft_cap": soft_cap, "window": window}
    own = options | {"backend": backend, "interpret": interpret}
    found = []
    for operation in implemented:
        new = 0 if operation == "decode" else chunk
        ends = np.array(contexts) + new  # [rows]
        pool, table = _pool(rng, ends, page_size, kv_heads, head_dim, dtype)
        rows = len(ends) if operation == "decode" else len(ends) * chunk
        q = jnp.asarray(rng.normal(size=(rows, heads, head_dim)), dtype)
        if operation == "decode":
            operands: tuple[Any, ...] = q, pool, table, jnp.asarray(ends, jnp.int32)
            attend: Any = paged_decode_attention
        else:
            starts = jnp.arange(len(ends), dtype=jnp.int32) * chunk
            lanes = PrefillLanes(
                starts, jnp.full_like(starts, chunk), jnp.asarray(contexts, jnp.int32)
            )
            operands, attend = (q, pool, table, lanes), paged_prefill_attention
        result = attend(*operands, **own).astype(jnp.float32)
        wanted = attend(*operands, **options, backend=REFERENCE).astype(jnp.float32)
        largest = float(jnp.abs(result - wanted).max())
        found.append(Difference(operation, largest, float(jnp.abs(wanted).max())))
    return found


def _pool(
    rng: np.random.Generator,
    ends: np.ndarray,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Pages with so many tokens of each row, and its page table int32[rows, pages]."""
    most = -(-int(ends.max()) // page_size)
    table = 1 + rng.permutation(len(ends) * most).reshape(len(ends), most)
    pool = np.full((1 + table.size, page_size, 2, kv_heads, head_dim), np.nan, np.float32)
    for pages, end in zip(table, ends, strict=True):
        place = np.arange(end)
        values = rng.normal(size=(end, 2, kv_heads, head_dim))
        pool[pages[place // page_size], place % page_size] = values
    return jnp.asarray(pool, dtype), jnp.asarray(table, jnp.int32)
