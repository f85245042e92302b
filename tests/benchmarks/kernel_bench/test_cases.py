"""The grid is whole, the most telling cases come first; bytes and operations are right."""

from __future__ import annotations

import itertools

from benchmarks.kernel_bench.cases import (
    CHUNKS,
    CONTEXTS,
    HEADS,
    SLOTS,
    DecodeCase,
    MatmulCase,
    PrefillCase,
    all_cases,
    anchor_cases,
    as_request,
    dry_cases,
    from_request,
)


def test_the_grid_is_whole_and_has_no_case_twice():
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    decode = {(c.slots, c.context, (c.heads, c.kv_heads)) for c in cases if type(c) is DecodeCase}
    assert decode == set(itertools.product(SLOTS, CONTEXTS, HEADS))
    prefill = {(c.chunk, (c.heads, c.kv_heads)) for c in cases if type(c) is PrefillCase}
    assert prefill == set(itertools.product(CHUNKS, HEADS))
    rows = {c.rows for c in cases if type(c) is MatmulCase}
    assert {*range(1, 3), 4, 8, 16, 64, 256, 2048} == rows


def test_what_the_targets_are_about_comes_first():
    first = all_cases()[:16]
    assert DecodeCase(64, 4096, 32, 8) in first and DecodeCase(1, 16384, 32, 8) in first
    assert PrefillCase(4096, 0, 32, 8) in first
    assert MatmulCase("gate_up", 1, 4096, 28672) in first


def test_bytes_and_operations():
    case = DecodeCase(64, 4096, 32, 8)
    assert case.read_bytes == 64 * 4096 * 2 * 8 * 128 * 2 == case.layer_bytes
    assert DecodeCase(1, 17, 32, 8).layer_bytes == 32 * 4096  # whole pages
    # the first of two rows sees 3 tokens and itself, the second one more
    assert PrefillCase(2, 3, 4, 1).flops == 4 * 4 * 128 * (4 + 5)
    assert MatmulCase("m", 3, 4, 5).flops == 2 * 3 * 4 * 5


def test_a_ragged_batch_has_the_bytes_of_a_uniform_one():
    case = DecodeCase(64, 2048, 32, 8, ragged=True)
    assert case.lengths == [66560] + 63 * [1024]
    even = DecodeCase(64, 2048, 32, 8)
    assert sum(case.lengths) == sum(even.lengths) == 64 * 2048
    assert (case.read_bytes, case.layer_bytes) == (even.read_bytes, even.layer_bytes)
    assert case.label == "32/8 heads, 64 x 2048 ragged"


def test_the_anchors_have_both_page_sizes_and_few_rows():
    found = anchor_cases()
    for size in (16, 64):
        decode = [c for c in found if type(c) is DecodeCase and c.page_size == size]
        assert [(c.slots, c.context) for c in decode] == [
            (64, 4096), (1, 16384), (8, 1024), (256, 128), (64, 2048)
        ]  # fmt: skip
        assert [c.ragged for c in decode] == [False] * 4 + [True]
        prefill = [c for c in found if type(c) is PrefillCase and c.page_size == size]
        assert [(c.chunk, c.prior) for c in prefill] == [(4096, 0)]
    assert [c.rows for c in found if type(c) is MatmulCase] == [1, 16, 64]
    assert len({case.label for case in found}) == len(found)


def test_a_case_survives_json():
    for case in (*all_cases()[:40], *dry_cases()):
        assert from_request(as_request(case)) == case
