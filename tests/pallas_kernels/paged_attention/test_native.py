"""The native backend against a float64 oracle, with NaN in all invisible places."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pallas_kernels.cases import paged_case
from tests.pallas_kernels.native.requirements import require_native
from tests.pallas_kernels.paged_attention.checks import (
    check_decode,
    check_prefill,
    check_queries_as_rows,
    decode,
    prefill,
)
from tests.pallas_kernels.strategies import Lanes, Program, Slots, examples, lanes, slots

require_native()
ALL = {"soft_cap": 2.0, "sinks": True}
# whole vectors, groups of 1, 3, 8 and 71, odd head sizes; several blocks of 64 keys
PROGRAMS = [
    Program(12, 4, 64, 16, "uint16", columns=13),
    Program(12, 4, 64, 16, "float32", columns=13, window=19, **ALL),
    Program(4, 4, 128, 8, "int8", columns=20),
    Program(4, 4, 128, 8, "bfloat16", columns=20, window=11, **ALL),
    Program(8, 1, 256, 32, "uint16", columns=6, chunk=70, soft_cap=2.0),
    Program(6, 2, 80, 4, "uint8", columns=40, window=7, **ALL),
    Program(6, 2, 80, 4, "float32", columns=40),
    Program(6, 2, 80, 4, "int8", columns=40, per_token=False, query="float32"),
    Program(71, 1, 16, 1, "uint16", columns=130, sinks=True),
    Program(71, 1, 16, 1, "float16", columns=130, window=1),
    Program(3, 3, 36, 16, "float8_e4m3fn", per_token=False),
    Program(3, 3, 36, 16, "uint16", query="float32", window=19, **ALL),
]
PART = 512  # kPartTokens of split.h: contexts longer than two are attended to in parts
LONG = [
    Program(8, 1, 64, 16, "uint16", columns=104),
    Program(6, 2, 32, 128, "float32", columns=13, window=1100, **ALL),
    Program(4, 4, 64, 64, "int8", columns=26, window=1025),
    Program(4, 2, 32, 12, "float16", columns=139, window=1150),  # parts that end inside a page
    Program(3, 1, 36, 16, "float8_e4m3fn", columns=104, **ALL),
]
SEVERAL = [
    Program(12, 4, 64, 16, "uint16", columns=13, queries=8),
    Program(4, 4, 128, 8, "bfloat16", columns=20, window=11, queries=3, **ALL),
    Program(6, 2, 80, 4, "uint8", columns=40, window=7, queries=5, **ALL),
    Program(8, 2, 64, 16, "int8", columns=13, queries=8, window=60),
    Program(71, 1, 16, 1, "float16", columns=130, window=1, queries=2),
    Program(3, 3, 36, 16, "float32", queries=5, sinks=True),
]
LONG_SEVERAL = [
    Program(8, 1, 64, 16, "uint16", columns=104, queries=8),
    # at the ends of parts and windows some queries of a slot see a part and others do not
    Program(6, 2, 32, 128, "float32", columns=13, window=1025, queries=5, **ALL),
]
ROOT = Path(__file__).parents[3]


@st.composite
def long_slots(draw: st.DrawFn, program: Program) -> Slots:
    """Contexts that end beside a part's end, or that a window makes begin there."""
    ends = [2 * PART, 3 * PART, PART + program.window if program.window else 2 * PART]
    drawn = draw(slots(program))
    lengths = [
        near + offset
        for near in (draw(st.sampled_from(ends[:2])), ends[2])
        for offset in draw(st.permutations((-1, 0, 1)))
    ]
    return drawn._replace(lengths=lengths)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@examples(5)
@given(data=st.data())
def test_ragged_decode(program, data):
    check_decode(program, data.draw(slots(program)), backend="native")


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@examples(5)
@given(data=st.data())
def test_ragged_prefill(program, data):
    check_prefill(program, data.draw(lanes(program)), backend="native")


def test_ragged_prefill_of_long_contexts():
    """A KV head has more keys and values than two threads pack at a time for a matrix unit."""
    program = Program(4, 2, 256, 64, "uint16", columns=66, rows=1)
    drawn = Lanes([8], [66 * 64 - 8], {}, stale=True, seed=0)
    check_prefill(program, drawn, backend="native")


@pytest.mark.parametrize("program", LONG, ids=str)
@examples(3)
@given(data=st.data())
def test_ragged_decode_of_long_contexts(program, data):
    check_decode(program, data.draw(long_slots(program)), backend="native")


@pytest.mark.parametrize("program", SEVERAL, ids=str)
@examples(5)
@given(data=st.data())
def test_ragged_decode_of_several_queries(program, data):
    check_decode(program, data.draw(slots(program)), backend="native")


@pytest.mark.parametrize("program", LONG_SEVERAL, ids=str)
@examples(4)
@given(data=st.data())
def test_several_queries_of_long_contexts(program, data):
    drawn = data.draw(long_slots(program))
    check_decode(program, drawn, backend="native")
    check_queries_as_rows(program, drawn, backend="native")


@pytest.mark.parametrize("program", [SEVERAL[0], SEVERAL[2]], ids=str)
@examples(3)
@given(data=st.data())
def test_several_queries_are_as_many_calls_of_one(program, data):
    check_queries_as_rows(program, data.draw(slots(program)), backend="native")


def long_result(rows: int) -> np.ndarray:  # [6, H, D]
    """Decode of a fixed problem of long contexts, only the first rows of which are live."""
    program = LONG[1]
    lengths = [1664, 1100, 1537, 1025, 1300, 1600]
    case = program.case(Slots(lengths, {}, stale=True, seed=5), np.random.default_rng(5))
    live = case.lengths.at[rows:].set(0)
    options = program.options(5) | case.options
    return np.asarray(decode(*case[:3], live, **options, backend="native"))


def test_long_contexts_do_not_depend_on_the_rows_beside_them():
    # one row is too little for whole parts: its heads are items of their own
    np.testing.assert_array_equal(long_result(1)[0], long_result(6)[0])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 16])
def test_long_contexts_do_not_depend_on_the_number_of_threads(threads):
    code = (
        "import hashlib; from tests.pallas_kernels.paged_attention.test_native import long_result; "
        "print(hashlib.sha256(long_result(6).tobytes()).hexdigest())"
    )
    environment = os.environ | {"NPROC": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == hashlib.sha256(long_result(6).tobytes()).hexdigest(), done.stderr


@pytest.mark.parametrize("program", [*PROGRAMS[::5], *LONG[:2]], ids=str)
def test_a_row_of_a_prompt_is_the_decode_row_that_sees_as_much(program):
    """Bit for bit, wherever the prompt was cut; some rows have parts and others beside them not."""
    rng, longest = np.random.default_rng(11), program.longest
    contexts = [0, longest - 40, longest // 2, min(2 * PART - 9, longest - 20), 0, longest - 1]
    drawn = Lanes([40, 40, 7, 20, 0, 1], contexts, {}, stale=True, seed=11)
    packed, region = program.region(drawn, rng)
    case = program.case(drawn, rng, rows=region)
    options = program.options(11) | case.options | {"backend": "native"}
    whole = prefill(*case[:3], packed, **options, row_invariant=True)
    rows = [
        (int(start) + i, lane, int(context) + i + 1)
        for lane, (start, length, context) in enumerate(zip(*packed, strict=True))
        for i in range(int(length))
    ]
    places, lanes_of, lengths = (jnp.asarray(column, jnp.int32) for column in zip(*rows))
    alone = decode(case.q[places], case.kv_pages, case.page_table[lanes_of], lengths, **options)
    np.testing.assert_array_equal(np.asarray(whole)[places], np.asarray(alone))


def test_idle_rows_give_zeros():
    program = PROGRAMS[0]
    none = [0] * program.rows
    check_decode(program, Slots(none, {}, stale=True, seed=0), backend="native")
    check_prefill(program, Lanes(none, none, {}, stale=True, seed=0), backend="native")


def test_a_nan_that_a_row_sees_reaches_its_result_alone():
    rng = np.random.default_rng(3)
    case = paged_case(
        rng, [20, 20], heads=2, kv_heads=1, head_dim=64, page_size=4, pool="float32", share=False
    )
    poisoned = case.kv_pages.at[case.page_table[0, 1], 0, 0, 0, 3].set(jnp.nan)
    got = np.asarray(decode(case.q, poisoned, *case[2:4], scale=0.125, backend="native"))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()
