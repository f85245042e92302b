"""Settings of wrong types and out of their ranges are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve import EngineConfig
from jaxserve.errors import ValidationError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("seed", None),
        ("seed", "1"),
        ("overlap", "no"),
        ("skip_tokenizer_init", 1),
        ("compile_in_background", 1),
        ("block_size", 24),
        ("max_num_seqs", 0),
        ("max_model_len", "auto"),
        ("dtype", "int4"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.from_settings(model="m", **{name: value})
    assert caught.value.field == name
