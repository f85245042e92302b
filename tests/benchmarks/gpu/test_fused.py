"""The fused kernels' cases fail when a kernel is wrong, and say where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu import fused
from benchmarks.gpu.setting import dry_setting
from benchmarks.verify.prove_check import absent_setting
from pallas_kernels import Backends
from pallas_kernels.finish_rows import triton as finished
from pallas_kernels.kept_threshold import triton as threshold
from pallas_kernels.residual_norm import triton as normed
from pallas_kernels.rotate_and_write import triton as moved

SETTING = dry_setting({}, 600.0)


def wrong_page(right):
    """One token lands on the page before its own."""

    def run(qkv, cos, sin, pool, page_ids, *others, **options):
        return right(qkv, cos, sin, pool, page_ids.at[0].add(-1), *others, **options)

    return run


def wrong_value(right):
    def run(*given, **options):
        q, pool = right(*given, **options)
        return q, pool.at[:, :, 1].multiply(1.5)

    return run


def wrong_query(right):
    def run(*given, **options):
        q, pool = right(*given, **options)
        return q.at[:, 1].multiply(1.1), pool

    return run


def one_part(right):
    return lambda residual, product, *others, **options: right(
        residual, product.at[-1].set(0), *others, **options
    )


def one_part_less(right):
    return lambda product, **options: right(product.at[-1].set(0), **options)


def too_high(right):
    return lambda *given, **options: right(*given, **options) + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("case", fused.KERNELS)
def test_right_kernels_pass(case):
    section = fused.run(SETTING, case)
    assert section.rows and not section.failures
    assert {told for _, told, *_ in section.rows} == {"triton, interpreted"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, kernel, wrong, told",
    [
        (moved, "rotate_and_write", wrong_page, "pages changed where nothing is written"),
        (moved, "rotate_and_write", wrong_value, "values are not written bit for bit"),
        (moved, "rotate_and_write", wrong_query, "error"),
        (normed, "residual_norm", one_part, "error"),
        (finished, "finish_rows", one_part_less, "error"),
        (threshold, "kept_threshold", too_high, "row 0: top_k="),
    ],
)
def test_a_wrong_kernel_is_a_failure_that_names_the_problem(
    monkeypatch, module, kernel, wrong, told
):
    monkeypatch.setattr(module, kernel, wrong(getattr(module, kernel)))
    section = fused.run(SETTING, kernel)
    assert any(told in failure for failure in section.failures), section.failures
    assert all(failure.startswith(f"{kernel}: ") for failure in section.failures)


def test_the_problems_of_a_gpu_hold_what_is_served():
    setting = absent_setting("h200")
    moves = fused.moves(setting)
    assert {move.tokens for move in moves} == {1, 17, 256, 2048}
    assert {(move.parts, move.norms) for move in moves} == {
        (parts, norms) for parts in (1, 3) for norms in (False, True)
    }
    assert all(move.first_page > 0 for move in moves)
    heads = fused.heads_of(setting)
    page_bytes = 4 * heads.page_size * heads.kv_heads * heads.head_dim
    assert moves[-1].first_page * page_bytes > 2**32
    setting.memory = 2**32
    assert len(fused.moves(setting)) == len(moves) - 1
    for case in fused.KERNELS:
        assert fused.backend_of(setting, case) == ("triton", None)


def test_a_kernel_that_is_not_chosen_is_told():
    plain = Backends("xla", "xla", "xla", "a test")
    setting = replace(SETTING, dry_run=False, backends=plain)
    for case in ("rotate_and_write", "residual_norm"):
        section = fused.run(setting, case)
        assert section.rows[0][1].startswith("not chosen") and not section.failures
