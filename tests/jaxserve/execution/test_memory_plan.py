"""The memory plan is arithmetic; its answers are checked by hand."""

from __future__ import annotations

import pytest

from jaxserve.errors import ValidationError
from jaxserve.execution.memory_plan import (
    CacheBudget,
    cache_budget,
    page_bytes,
    plan_num_pages,
)

GIB = 1 << 30


def test_llama_3_8b_on_141_gb() -> None:
    per_page = page_bytes(num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, itemsize=2)
    assert per_page == 16 * 128 * 1024  # 128 KiB a token
    budget = cache_budget(
        limit_bytes=140 * GIB, utilization=0.9, weight_bytes=15 * GIB, temporary_bytes=GIB
    )
    assert budget == (110 * GIB, "gpu_memory_utilization", 0.9)
    pages = plan_num_pages(
        budget=budget,
        bytes_per_page=per_page,
        max_num_seqs=256,
        max_model_len=8192,
        page_size=16,
    )
    assert pages == 110 * GIB // per_page


def pages_of(num_bytes: int, field: str = "f", value: float | None = None) -> int:
    return plan_num_pages(
        budget=CacheBudget(num_bytes, field, value),
        bytes_per_page=1024,
        max_num_seqs=4,
        max_model_len=100,
        page_size=16,
    )


def test_no_more_pages_than_all_slots_can_fill() -> None:
    assert pages_of(GIB) == 4 * 7 + 1


@pytest.mark.parametrize(
    ("field", "value"), [("gpu_memory_utilization", 0.1), ("kv_cache_memory_bytes", 2047)]
)
def test_a_budget_without_room_names_the_setting_it_follows_from(field, value) -> None:
    assert pages_of(2048, field, value) == 2
    for num_bytes in (-5, 2047):
        with pytest.raises(ValidationError, match=f"{num_bytes} bytes .* two pages need 2048") as e:
            pages_of(num_bytes, field, value)
        assert (e.value.field, e.value.value) == (field, value)
