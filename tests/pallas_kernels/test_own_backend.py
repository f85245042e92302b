"""Backends of attention outside the package, by the places of their records."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import (
    AttentionShape,
    Backends,
    KernelError,
    compare_attention,
    paged_decode_attention,
    require_backend,
)
from pallas_kernels.backends import own_backend
from pallas_kernels.backends.record import CPU, TPU, Backend, Implementation
from pallas_kernels.paged_attention import reference

SHAPE = AttentionShape(head_dim=8, page_size=16)


def covers(shape: AttentionShape) -> KernelError | None:
    return None if shape.page_size == 16 else KernelError("page_size", shape.page_size, "16 tokens")


class Counting(ModuleType):
    """A module with a record and a kernel that counts its calls."""

    def __init__(self) -> None:
        super().__init__("own_attention")
        self.calls = 0
        self.MINE = Backend("mine", (Implementation("decode", "own_attention", covers, (CPU,)),))
        self.ELSEWHERE = Backend("mine", (Implementation("decode", "own_attention", runs=(TPU,)),))
        self.number = 5

    def decode(self, *operands: Any) -> Any:
        self.calls += 1
        return reference.decode(*operands)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()
    monkeypatch.setitem(sys.modules, "own_attention", made)
    own_backend.cache_clear()
    return made


def test_it_is_called_as_those_of_the_package_are(module: Counting) -> None:
    require_backend("decode", "own_attention:MINE", "cpu", "cpu", SHAPE)
    chosen = Backends(decode="own_attention:MINE", prefill="xla", write_kv="xla", reason="asked")
    q, pool = jnp.ones((2, 4, 8)), jnp.ones((3, 16, 2, 2, 8))
    table, lens = jnp.array([[1], [2]], jnp.int32), jnp.array([3, 5], jnp.int32)
    found, wanted = (
        paged_decode_attention(q, pool, table, lens, scale=1.0, **one.decode_options)
        for one in (chosen, replace(chosen, decode="reference"))
    )
    assert module.calls == 1 and jnp.allclose(found, wanted)


def test_one_call_compares_it_with_the_reference(module: Counting) -> None:
    def compare() -> Any:
        shape: dict[str, Any] = {"contexts": (1, 17), "heads": 4, "head_dim": 8}
        return compare_attention("own_attention:MINE", **shape)

    (right,) = compare()
    assert module.calls == 1 and right.operation == "decode" and right.largest == 0 < right.of
    plain = module.decode

    def blind(q: Any, pool: Any, table: Any, lens: Any, options: Any) -> Any:
        return plain(q, pool, table, jnp.maximum(lens - 1, 1), options)

    def greedy(q: Any, pool: Any, table: Any, lens: Any, options: Any) -> Any:
        return plain(q, pool, table, lens + 1, options)

    module.decode = blind  # type: ignore[method-assign]
    assert compare()[0].largest > 0.01
    module.decode = greedy  # type: ignore[method-assign]
    assert math.isnan(compare()[0].largest), "what no query may see is NaN"
    with pytest.raises(KernelError, match="one with decode or prefill"):
        compare_attention("gpu")


@pytest.mark.parametrize(
    ("operation", "name", "told"),
    [
        ("decode", "own_attention:NONE", "that can be imported .*no attribute 'NONE'"),
        ("decode", "no_such_module:MINE", "that can be imported .*No module named"),
        ("decode", "own_attention:number", "module:NAME of a Backend .it is of type int"),
        ("decode", "own_attention:ELSEWHERE", "module:NAME of a backend that runs on a CPU"),
        ("prefill", "own_attention:MINE", "one of decode alone"),
        ("linear", "own_attention:MINE", "on a CPU one of native, xla$"),
    ],
)
def test_what_is_refused_by_one_error(
    module: Counting, operation: str, name: str, told: str
) -> None:
    with pytest.raises(KernelError, match=told):
        require_backend(operation, name, "cpu", "cpu", SHAPE)


def test_a_shape_that_it_does_not_cover_is_refused(module: Counting) -> None:
    shape = AttentionShape(head_dim=8, page_size=32)
    with pytest.raises(KernelError, match=r"a backend that covers page_size=32 .* takes 16 tokens"):
        require_backend("decode", "own_attention:MINE", "cpu", "cpu", shape)
