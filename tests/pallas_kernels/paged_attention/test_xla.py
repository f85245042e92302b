"""The XLA and reference backends against a float64 oracle, with NaN in all invisible places."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import PrefillLanes, paged_decode_attention, paged_prefill_attention
from tests.pallas_kernels.paged_attention.checks import (
    check_decode,
    check_prefill,
    check_queries_as_rows,
)
from tests.pallas_kernels.strategies import Lanes, Program, Slots, examples, lanes, slots

ALL = {"soft_cap": 2.0, "sinks": True}
# every pool, with and without options, groups of 1 to 8; the last have many blocks of 64 tokens
PROGRAMS = [
    ("xla", Program(4, 4, 64, 16, "float32")),
    ("xla", Program(6, 2, 256, 8, "uint16", window=11, head_rows=2, **ALL)),
    ("xla", Program(8, 2, 64, 16, "int8", window=19, **ALL)),
    ("xla", Program(4, 2, 32, 16, "float8_e4m3fn", query="float16", per_token=False)),
    ("xla", Program(4, 2, 32, 16, "float32", columns=20, chunk=130, window=100)),
    ("reference", Program(6, 2, 80, 8, "float32", window=11, **ALL)),
    ("reference", Program(4, 1, 64, 16, "int8")),
]
MORE = [
    ("xla", Program(8, 1, 128, 32, "bfloat16", soft_cap=2.0)),
    ("xla", Program(3, 3, 16, 128, "float16", sinks=True, columns=2, chunk=130)),
    ("xla", Program(6, 2, 80, 8, "uint8", per_token=False, query="float32")),
    ("xla", Program(4, 2, 64, 16, "uint16", query="float32", window=1)),
]
# 2 to 8 queries a slot; groups and pools as above
SEVERAL = [
    ("xla", Program(4, 2, 64, 16, "float32", queries=3)),
    ("xla", Program(6, 2, 80, 8, "uint16", window=11, queries=8, **ALL)),
    ("xla", Program(8, 2, 64, 16, "int8", window=19, queries=5, **ALL)),
    ("xla", Program(4, 2, 32, 16, "float8_e4m3fn", query="float16", per_token=False, queries=2)),
    ("xla", Program(4, 1, 32, 16, "bfloat16", columns=20, window=100, queries=8, sinks=True)),
    ("reference", Program(6, 2, 80, 8, "float32", window=11, queries=5, **ALL)),
    ("reference", Program(4, 1, 64, 16, "int8", queries=8)),
]


def quick(*numbers: int) -> list:
    """All cases; but for those of `PROGRAMS` with these numbers they are slow."""
    chosen = [PROGRAMS[number] for number in numbers]
    rest = [case for case in [*PROGRAMS, *MORE] if case not in chosen]
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


# each program is quick in one of both operations
@pytest.mark.parametrize(("backend", "program"), quick(0, 3, 4, 6), ids=str)
@examples(8)
@given(data=st.data())
def test_decode(backend, program, data):
    check_decode(program, data.draw(slots(program)), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "program"), SEVERAL, ids=str)
@examples(6)
@given(data=st.data())
def test_decode_of_several_queries(backend, program, data):
    check_decode(program, data.draw(slots(program)), backend=backend)


@pytest.mark.parametrize(
    ("backend", "program"),
    [SEVERAL[1], pytest.param(*SEVERAL[-1], marks=pytest.mark.slow)],
    ids=str,
)
@examples(2)
@given(data=st.data())
def test_several_queries_are_as_many_calls_of_one(backend, program, data):
    check_queries_as_rows(program, data.draw(slots(program)), backend=backend)


@pytest.mark.parametrize(("backend", "program"), quick(1, 2, 5), ids=str)
@examples(6)
@given(data=st.data())
def test_prefill(backend, program, data):
    check_prefill(program, data.draw(lanes(program)), backend=backend)


@pytest.mark.parametrize(("backend", "program"), [PROGRAMS[0], PROGRAMS[1], PROGRAMS[-2]], ids=str)
def test_idle_rows_give_zeros(backend, program):
    none = [0] * program.rows
    check_decode(program, Slots(none, {}, stale=True, seed=0), backend=backend)
    check_prefill(program, Lanes(none, none, {}, stale=True, seed=0), backend=backend)


def loop_steps(function, *operands) -> int:
    """Steps of page blocks that a call makes, counted by a callback in the gather."""
    steps = 0

    def count(_):
        nonlocal steps
        steps += 1

    from pallas_kernels.paged_attention.xla import decode, prefill

    original = decode.gather_pages

    def counted(kv_pages, ids):
        jax.debug.callback(count, ids[..., :1])
        return original(kv_pages, ids)

    jax.clear_caches()  # the traces of other tests do not count
    try:
        decode.gather_pages = prefill.gather_pages = counted
        jax.block_until_ready(jax.jit(lambda *a: function(*a))(*operands))
        jax.effects_barrier()
    finally:
        decode.gather_pages = prefill.gather_pages = original
        jax.clear_caches()
    return steps


@pytest.mark.slow
def test_cost_follows_live_tokens_not_the_table():
    pool = jnp.zeros((3, 16, 2, 1, 16))
    q = jnp.ones((512, 2, 16))
    table = jnp.zeros((4, 512), jnp.int32)
    decode = functools.partial(paged_decode_attention, scale=1.0, backend="xla")
    prefill = functools.partial(paged_prefill_attention, scale=1.0, backend="xla")
    lengths = jnp.array([0, 10, 300, 0], jnp.int32)
    assert loop_steps(decode, q[:4], pool, table, lengths) == 5  # 300 tokens in blocks of 64
    windowed = functools.partial(decode, window=40)
    late = jnp.array([0, 0, 300, 290], jnp.int32)
    assert loop_steps(windowed, q[:4], pool, table, late) == 2  # tokens 250 .. 299
    idle = jnp.zeros(4, jnp.int32)
    assert loop_steps(decode, q[:4], pool, table, idle) == 0
    chunks = PrefillLanes(
        start=jnp.array([0, 65, 0, 0], jnp.int32),
        length=jnp.array([65, 3, 0, 0], jnp.int32),
        context=jnp.array([0, 128, 4000, 0], jnp.int32),
    )
    # lane 0: rows 0..63 see one block, row 64 two; lane 1: 131 tokens, three blocks
    assert loop_steps(prefill, q, pool, table, chunks) == 1 + 2 + 3
