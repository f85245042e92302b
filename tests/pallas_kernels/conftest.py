"""Reads beyond the ends of an array, made visible in JAX's interpreter of Triton kernels.

The interpreter reads the nearest element there, a GPU whatever follows in its memory.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import triton as plt

load = plt.load
FEW = 3  # quick cases of a test that are all quick


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every sixth quick case of a kernel's test stays quick where there are more than FEW.

    Kernels have half of all cases' time, and their releases of JAX run them three times.
    """
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        for number, case in enumerate(cases):
            if len(cases) > FEW and number % 6:
                case.add_marker(pytest.mark.slow)


def poisoned_load(ref: Any, *, mask: jax.Array | None = None, **options: Any) -> jax.Array:
    """`plt.load` of NaN, or of the largest integer, where an index is beyond the array."""
    value = load(ref, mask=mask, **options)
    outside: Any = False
    *_, indexer = ref.transforms
    for index, size in zip(indexer.indices, indexer.shape):
        outside |= (index < 0) | (index >= size)
    if mask is not None:
        outside &= mask
    integer = jnp.issubdtype(value.dtype, jnp.integer)
    poison = jnp.iinfo(value.dtype).max if integer else jnp.nan
    return jnp.where(outside, jnp.asarray(poison, value.dtype), value)


@pytest.fixture
def poison_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interpreted Triton kernel reads beyond an array is NaN."""
    monkeypatch.setattr(plt, "load", poisoned_load)
