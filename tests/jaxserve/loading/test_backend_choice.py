"""What a start says of the kernels that it has chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.backend_choice import backends_for, warn_of_token_scales
from jaxserve.loading.defaults import resolve
from jaxserve.models.config_reader import read_model_config


class Device:
    def __init__(self, kind: str, capability: str, platform: str = "gpu") -> None:
        self.device_kind, self.compute_capability, self.platform = kind, capability, platform


H200, L4 = Device("NVIDIA H200", "9.0"), Device("NVIDIA L4", "8.9")


@pytest.mark.parametrize(
    ("device", "settings", "warns"),
    [
        (H200, {"kv_cache_dtype": "int8"}, True),
        (H200, {"kv_cache_dtype": "fp8"}, False),
        (H200, {"kv_cache_dtype": "int8", "decode_backend": "triton"}, False),
        (L4, {"kv_cache_dtype": "int8"}, False),
    ],
)
def test_int8_pages_on_hopper_are_told_to_attend_by_triton(
    device: Any,
    settings: dict[str, Any],
    warns: bool,
    model_folder: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = str(model_folder("llama_gqa", head_dim=64))
    model = read_model_config(folder)
    asked = EngineConfig(model=folder, dtype="bfloat16", **settings)
    config = resolve(asked, model, "gpu", capability=device.compute_capability)
    chosen = backends_for(config, model, device, None)
    warn_of_token_scales(config, model, device, chosen)
    assert len(caplog.records) == warns
    assert not warns or "fp8 is as small, and runs on mosaic_gpu on NVIDIA H200" in caplog.text


T4, V5E = Device("Tesla T4", "7.5"), Device("TPU v5 lite", "", "tpu")


@pytest.mark.parametrize(
    ("device", "prefill"),
    [(H200, "mosaic_gpu"), (L4, "triton"), (V5E, "mosaic_tpu"), (T4, None)],
)
def test_a_deterministic_engine_has_one_program_beside_a_cpu(
    device: Any, prefill: str | None, model_folder: Callable[..., Path]
) -> None:
    platform = device.platform
    folder = str(model_folder("llama_gqa", head_dim=128))
    model = read_model_config(folder)
    asked = EngineConfig(model=folder, dtype="bfloat16", deterministic=True)
    config = resolve(asked, model, platform, capability=device.compute_capability)
    if prefill is None:
        with pytest.raises(ValidationError, match=r"deterministic=True.*prefill runs on xla"):
            backends_for(config, model, device, None)
        return
    chosen = backends_for(config, model, device, None)
    assert chosen.prefill == prefill and chosen.decode_and_write is None
    assert chosen.one_program and chosen.prefill_options()["row_invariant"]
    usual = resolve(replace(asked, deterministic=False), model, platform)
    assert not backends_for(usual, model, device, None).one_program
    assert config.scheduler.max_num_seqs < usual.scheduler.max_num_seqs
