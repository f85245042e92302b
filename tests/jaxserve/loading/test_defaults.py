"""Sizes that the user left open, by device and preset."""

from __future__ import annotations

import pytest

from jaxserve.config.device_defaults import DEFAULTS
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.programs import wanted_shapes
from jaxserve.loading.defaults import resolve
from jaxserve.models.config_reader import read_model_config


@pytest.mark.parametrize(("preset", "factor"), [("chat", 0.5), ("balanced", 1.0), ("bulk", 2.0)])
def test_presets_scale_what_is_left_open(preset, factor, model_folder):
    folder = str(model_folder("llama_gqa"))
    model = read_model_config(folder)
    cpu = DEFAULTS["cpu"]
    resolved = resolve(EngineConfig(model=folder, preset=preset), model, "cpu")
    assert resolved.scheduler.max_num_seqs == cpu.max_num_seqs * factor
    assert resolved.scheduler.max_num_batched_tokens == cpu.max_num_batched_tokens * factor
    given = EngineConfig(model=folder, preset=preset, max_num_seqs=3, max_num_batched_tokens=50)
    resolved = resolve(given, model, "cpu")
    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == (3, 50)


def test_an_unknown_preset_is_named():
    with pytest.raises(ValidationError, match="preset='fast'"):
        EngineConfig(model="m", preset="fast")


@pytest.mark.parametrize(
    ("capability", "block_size", "page_size"),
    [("9.0", None, 64), ("8.0", None, 16), ("12.0", None, 16), ("9.0", 16, 16), ("8.9", 32, 32)],
)
def test_pages_of_hopper_are_larger(capability, block_size, page_size, model_folder):
    folder = str(model_folder("llama_gqa"))
    asked = EngineConfig(model=folder, block_size=block_size)
    resolved = resolve(asked, read_model_config(folder), "gpu", capability=capability)
    assert resolved.cache.page_size == page_size
    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == (
        256,
        2048,
    )


def test_a_gpu_compiles_everything_before_it_serves(model_folder):
    """What is compiled later would make it drop the graphs of all programs."""
    folder = str(model_folder("llama_gqa"))
    model = read_model_config(folder)
    resolved = resolve(EngineConfig(model=folder), model, "gpu")
    wanted = wanted_shapes(
        resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens, 1
    )
    assert resolved.programs.compile_ahead >= len(wanted)
    assert resolved.programs.compile_in_background is False
    assert resolve(EngineConfig(model=folder), model, "cpu").programs.compile_in_background
    asked = EngineConfig(model=folder, compile_in_background=True, compile_ahead=3)
    resolved = resolve(asked, model, "gpu")
    assert (resolved.programs.compile_in_background, resolved.programs.compile_ahead) == (True, 3)
