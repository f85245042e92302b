"""The memory plan is arithmetic; its answers are checked by hand."""

from __future__ import annotations

import pytest

from jaxserve.errors import ValidationError
from jaxserve.execution.memory_plan import cache_budget, page_bytes, plan_num_pages

GIB = 1 << 30


def test_llama_3_8b_on_141_gb() -> None:
    per_page = page_bytes(num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, itemsize=2)
    assert per_page == 16 * 128 * 1024  # 128 KiB a token
    budget = cache_budget(
        limit_bytes=140 * GIB, utilization=0.9, weight_bytes=15 * GIB, temporary_bytes=GIB
    )
    assert budget == 110 * GIB
    pages = plan_num_pages(
        budget_bytes=budget,
        bytes_per_page=per_page,
        max_num_seqs=256,
        max_model_len=8192,
        page_size=16,
    )
    assert pages == 110 * GIB // per_page


def test_no_more_pages_than_all_slots_can_fill() -> None:
    pages = plan_num_pages(
        budget_bytes=GIB, bytes_per_page=1024, max_num_seqs=4, max_model_len=100, page_size=16
    )
    assert pages == 4 * 7 + 1


def test_a_model_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValidationError, match="gpu_memory_utilization"):
        plan_num_pages(
            budget_bytes=-5, bytes_per_page=1024, max_num_seqs=4, max_model_len=100, page_size=16
        )
