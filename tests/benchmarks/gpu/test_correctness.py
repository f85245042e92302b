"""The matrix holds every choice, and each of its problems is one that a backend can be right at."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.gpu import correctness, smoke
from benchmarks.gpu.correctness import CUT, WHOLE, Small
from benchmarks.gpu.setting import dry_setting
from benchmarks.verify.prove_check import absent_setting
from pallas_kernels.paged_attention.hopper.decode import cut_of

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
    assert "decode bfloat16, 4 queries a row" in smoke.PROBES


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_whole_rows_are_written_directly_and_cut_rows_in_pieces(block_tokens):
    for longest, cut in ((WHOLE, False), (CUT, True)):
        small = Small("bfloat16", 128, 4, 16, longest, {})
        problem = correctness.decode_problem(absent_setting("h200"), small, True).problem
        page_size, _, kv_heads, head_dim = problem.kv_pages.shape[1:]
        found = cut_of(block_tokens, head_dim, problem.kv_pages.dtype, kv_heads)
        pieces = found.most_pieces(problem.page_table.shape[1] * page_size)
        assert (pieces > 1) == cut


@pytest.mark.parametrize(
    "queries", [*(pytest.param(n, marks=pytest.mark.slow) for n in (None, 1)), 4]
)
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
