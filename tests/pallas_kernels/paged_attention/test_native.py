"""The native backend against a float64 oracle, with NaN wherever nobody may look."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pallas_kernels.cases import paged_case
from tests.pallas_kernels.native.requirements import require_native
from tests.pallas_kernels.paged_attention.checks import check_decode, check_prefill, decode
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
    Program(6, 2, 80, 4, "int8", columns=40, per_page=False, query="float32"),
    Program(71, 1, 16, 1, "uint16", columns=130, sinks=True),
    Program(71, 1, 16, 1, "float16", columns=130, window=1),
    Program(3, 3, 36, 16, "float8_e4m3fn", per_page=False),
    Program(3, 3, 36, 16, "uint16", query="float32", window=19, **ALL),
]


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
