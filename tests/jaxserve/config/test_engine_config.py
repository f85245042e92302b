"""Settings of wrong types and out of their ranges are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve import EngineConfig, Isolation
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
        ("revision", ""),
        ("compilation_cache", ""),
        ("tokenizer", 7),
        ("hf_overrides", [1]),
        ("hf_overrides", {1: 2}),
        ("device_flops_per_second", 1e12),  # without enable_mfu_metrics
        ("device_bytes_per_second", 1e12),
        ("scheduling_policy", "module:"),
        ("output_classes", (5, 5)),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.from_settings(model="m", **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["step_timeout", "load_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "soon", True])
def test_a_wrong_timeout_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Isolation(**{name: value})
    assert caught.value.field == name
    for good in (None, 2, 0.5):
        assert getattr(Isolation(**{name: good}), name) == good
    assert Isolation().step_timeout == "auto"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_classes", (3, 4)),
        ("length_shares", [1, 1, 1]),
        ("max_overtaken_tokens", 0),
    ],
)
def test_what_the_policy_does_not_read_is_refused(policy: str, name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"unless scheduling_policy.*{policy}") as caught:
        EngineConfig.from_settings(model="m", scheduling_policy=policy, **{name: value})
    assert caught.value.field == name
    EngineConfig.from_settings(model="m", scheduling_policy="length", **{name: value})


@pytest.mark.parametrize("token", ["", "secret secret", "secret\n", "sécret", 7, b"secret"])
def test_a_token_is_never_shown(token: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(model="m", hf_token=token)
    assert caught.value.field == "hf_token" and "cret" not in str(caught.value)
    assert "secret" not in repr(EngineConfig(model="m", hf_token="secret"))


def test_paths_are_taken() -> None:
    made = EngineConfig.from_settings(model=Path("/m"), tokenizer=Path("/t"))
    assert (made.model, made.tokenizer) == ("/m", "/t")
