"""The matrix holds every choice, and each of its problems is one that a backend can be right at."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.gpu import correctness, smoke
from benchmarks.gpu.correctness import CUT, WHOLE, Small
from benchmarks.gpu.setting import dry_setting

SETTING = dry_setting({}, 600.0)


def test_the_matrix_holds_every_choice():
    found = correctness.matrix()
    assert len(found) == len(correctness.POOLS) * len(correctness.HEAD_DIMS)
    for field, values in [
        ("longest", correctness.LONGEST),
        ("queries", correctness.QUERIES),
        ("group", correctness.GROUPS),
        ("page_size", correctness.PAGE_SIZES),
    ]:
        assert {getattr(small, field) for small in found} == set(values)
    assert all(correctness.as_small(json.dumps(small)) == small for small in found)


def test_ten_smoke_cases_hold_whole_and_cut_rows():
    assert len(smoke.PROBES) == 10 and smoke.LIMIT_S == 20
    assert WHOLE < 256 and CUT > 4096


@pytest.mark.parametrize("queries", [None, 1, 4])
def test_rows_of_several_queries_are_right(queries):
    small = Small("bfloat16", 64, 4, 16, 200, {}, queries)
    section = correctness.decode(SETTING, json.dumps(small), chosen=False)
    assert section.rows and not section.failures
    posed = correctness.decode_problem(SETTING, small, False)
    assert posed.problem.q.shape[1:] == ((queries,) if queries else ()) + (8, 64)


def test_prefill_has_no_queries_a_row():
    small = Small("bfloat16", 64, 4, 16, 200, {}, 4)
    section = correctness.prefill(SETTING, json.dumps(small), chosen=True)
    assert section.rows and not section.failures


def test_a_smoke_case_that_fails_says_so(monkeypatch):
    monkeypatch.setattr("tests.pallas_kernels.oracle.relative_error", lambda got, want: np.inf)
    section = smoke.run(SETTING, "decode int8 pages")
    assert section.rows[0][:2] == ("decode int8 pages", "FAILED")
    assert section.failures[0].startswith("decode int8 pages: xla int8")
