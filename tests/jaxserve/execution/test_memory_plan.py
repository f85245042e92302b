"""The memory plan is arithmetic; its answers are checked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.errors import ValidationError
from jaxserve.execution.device_state import StateShape
from jaxserve.execution.features import FULL, FULL_DECODE
from jaxserve.execution.memory_plan import (
    CacheBudget,
    device_limit,
    plan_num_pages,
    temporary_bound,
)
from jaxserve.execution.step_shape import StepShape
from jaxserve.memory.page_groups import PageGroups
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES

GIB = 1 << 30
SCORED = StepShape(256, 2048, 32, FULL, 288)
MASKED = StepShape(256, 0, 0, FULL_DECODE, 256)


def test_llama_3_8b_on_141_gb() -> None:
    per_page = 16 * 128 * 1024  # 128 KiB a token
    budget = CacheBudget(int(140 * GIB * 0.9) - (15 + 1) * GIB, "gpu_memory_utilization", 0.9)
    assert plan_num_pages(budget, per_page, 256 * 8192 // 16 + 1) == 110 * GIB // per_page


def pages_of(num_bytes: int, field: str = "f", value: float | None = None) -> int:
    return plan_num_pages(CacheBudget(num_bytes, field, value), 1024, useful=29)


def test_no_more_pages_than_are_of_use() -> None:
    assert pages_of(GIB) == 29


@pytest.mark.parametrize(
    ("field", "value"), [("gpu_memory_utilization", 0.1), ("kv_cache_memory_bytes", 2047)]
)
def test_a_budget_without_room_names_the_setting_it_follows_from(field, value) -> None:
    assert pages_of(2048, field, value) == 2
    for num_bytes in (-5, 2047):
        with pytest.raises(ValidationError, match=f"{num_bytes} bytes .* two pages need 2048") as e:
            pages_of(num_bytes, field, value)
        assert (e.value.field, e.value.value) == (field, value)


def test_page_table_history_and_lengths_of_256_slots_at_128k_tokens() -> None:
    history, page_table, lengths = 257 * 131_073 * 4, 257 * 8192 * 4, 257 * 4
    assert history == 134_743_044 and page_table == 8_421_376
    cache: Any = SimpleNamespace(
        page_size=16, shapes=lambda: None, groups=SimpleNamespace(pages=PageGroups())
    )
    kept = {"feature": jax.ShapeDtypeStruct((3, 5), jnp.int16)}
    shape = StateShape(cache, 256, 131_072, kept)
    assert shape.table_bytes == history + page_table + lengths + 2 * 15


@pytest.mark.parametrize(
    ("name", "shape", "compiled"),
    [
        ("llama-3-8b", SCORED, 647_413_824),
        ("llama-3-8b", MASKED, 558_694_976),
        ("llama-3-8b", StepShape(512, 4096, 32, FULL, 544), 1_199_116_096),
        ("llama-125m", SCORED, 160_230_464),
    ],
)
def test_the_bound_holds_what_xla_compiled_for_an_h200(name, shape, compiled) -> None:
    """Temporaries of two layers, by jax 0.11.2; more layers reuse the memory of the first."""
    bound = temporary_bound(shape, model_config_of(SHAPES[name]), itemsize=2)
    assert compiled <= bound <= 2 * compiled


@pytest.mark.parametrize(
    ("stats", "limit"), [(None, None), ({}, None), ({"bytes_limit": 7}, 7), ({"other": 7}, None)]
)
def test_a_device_may_not_say_what_memory_it_has(stats, limit) -> None:
    assert device_limit(SimpleNamespace(memory_stats=lambda: stats)) == limit
