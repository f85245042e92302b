"""The plan of an engine is plain data: another process builds the same engine from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import EngineConfig
from jaxserve.engine.loop import Engine
from jaxserve.errors import ValidationError
from jaxserve.execution import runner
from jaxserve.loading import engine_plan, pool_plan
from jaxserve.loading.engine_build import build, load_engine
from jaxserve.loading.engine_plan import EnginePlan, decide
from jaxserve.loading.hub import locate
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.parallel.mesh import make_mesh
from tests.jaxserve import oracle
from tests.jaxserve.plain_json import from_json, to_json
from tests.jaxserve.test_step_contract import SETTINGS, finish, request
from tests.tiny_models import VOCAB_SIZE

CASE = "llama_gqa"


def asked_for(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_settings(model=str(folder), **(SETTINGS | settings))


def decided_for(config: EngineConfig) -> EnginePlan:
    report = LoadProgress(lambda line: None, shown=False)
    return decide(config, locate(config), make_mesh(1), report)[0]


def built(decided: EnginePlan, **options: Any) -> Engine:
    return build(decided, make_mesh(1), LoadProgress(lambda line: None, shown=False), **options)


def tokens(engine: Engine) -> list[list[int]]:
    prompts = oracle.prompts(3, VOCAB_SIZE, 30, seed=1)
    params = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.0}]
    return finish(engine, [request(i, p, 9, **params[i]) for i, p in enumerate(prompts)])


def test_a_start_says_why_xla_multiplies_experts(
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(runner, "uncovered_experts", lambda model: "96 columns")
    decided_for(asked_for(model_folder(CASE))).runner(make_mesh(1))
    assert "experts are multiplied by XLA" in caplog.text and "96 columns" in caplog.text


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (CASE, {"kv_cache_dtype": "fp8", "num_pages": None, "max_model_len": None}),
        ("gemma3", {"quantization": "int8"}),
    ],
)
def test_a_decision_is_plain_data(
    model_folder: Callable[..., Path], case: str, settings: dict[str, Any]
) -> None:
    config = asked_for(model_folder(case), **settings)
    decided = decided_for(replace(config, hf_token="secret"))
    text = to_json(decided)
    assert "secret" not in text and from_json(text) == decided
    assert decided.config.cache.num_pages > 1 and decided.config.cache.num_host_pages == 0
    assert from_json(text).of_steps == decided.of_steps


def test_steps_are_kept_by_what_decides_them_and_by_nothing_else(
    model_folder: Callable[..., Path],
) -> None:
    config = asked_for(model_folder(CASE))
    (plain,) = {
        decided_for(one).of_steps
        for one in (
            config,
            replace(config, seed=3, compile_ahead=1, overlap=False, max_num_queued_reqs=5),
            replace(config, hf_token="secret", served_model_name=("other",)),
        )
    }
    assert " at 0x" not in plain, "it names no place in this process's memory"
    others = {
        decided_for(replace(config, **change)).of_steps
        for change in (
            {"dtype": "bfloat16"},
            {"quantization": "int8"},
            {"kv_cache_dtype": "int8"},
            {"max_num_seqs": 3},
            {"max_model_len": 80},
            {"num_pages": 41},
            {"attention_window": 16},
        )
    }
    assert len({plain, *others}) == 8


def test_memory_decides_the_context_and_not_the_groups_of_layers(
    model_folder: Callable[..., Path],
) -> None:
    folder = model_folder("gemma3", sliding_window=40)
    config = asked_for(folder, max_model_len=None, block_size=16, num_pages=1 + 3 * 2)
    decided = decided_for(config)
    assert decided.config.scheduler.max_model_len == 32, "no window is passed then"
    assert decided.layer_groups.pages.num_windowed == 2
    assert decided.runner(make_mesh(1)).page_groups.window == 40
    assert decided.layer_groups != replace_asked(decided, keep_window_only=False).layer_groups
    assert decided.of_steps != replace_asked(decided, keep_window_only=False).of_steps


@pytest.mark.slow
def test_a_gemma_whose_images_cannot_be_read_is_one_of_text(
    model_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = model_folder("gemma3_images")
    bare, towerless = (shutil.copytree(whole, tmp_path / name) for name in ("bare", "towerless"))
    (bare / "preprocessor_config.json").unlink()
    weights = towerless / "model.safetensors"
    tower = ("vision_tower", "multi_modal_projector")
    held = {k: v for k, v in load_file(weights).items() if not any(one in k for one in tower)}
    save_file(held, weights)
    for folder, settings, told in (
        (bare, {}, "preprocessor_config.json"),
        (whole, {"max_num_seqs": 3, "max_num_batched_tokens": 11}, "max_num_batched_tokens=11"),
        (towerless, {}, "with an encoder"),
    ):
        caplog.clear()
        decided = decided_for(asked_for(folder, **settings))
        assert not decided.has_encoder and told in caplog.text
        with pytest.raises(ValidationError, match=told):
            decided_for(asked_for(folder, **settings, limit_mm_per_prompt=2))
    assert decided_for(asked_for(whole)).has_encoder
    folder = shutil.copytree(model_folder("llava"), tmp_path / "llava")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValidationError, match="preprocessor_config"):
        decided_for(asked_for(folder))


def replace_asked(decided: EnginePlan, **changes: Any) -> EnginePlan:
    config = decided.config
    return replace(decided, config=replace(config, asked=replace(config.asked, **changes)))


@pytest.mark.slow
def test_another_process_builds_the_same_engine_from_it_and_decides_nothing(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asked_for(model_folder(CASE), quantization="int8")
    text = to_json(decided_for(config))
    first = load_engine(config).engine

    def fails(*args: Any, **kwargs: Any) -> None:
        pytest.fail("decided again")

    monkeypatch.setattr(engine_plan, "read_model_config", fails)
    monkeypatch.setattr(pool_plan, "share_of_host", fails)
    monkeypatch.setattr(engine_plan, "open_checkpoint", fails)
    monkeypatch.setattr(engine_plan, "backends_for", fails)
    second = built(from_json(text))
    assert tokens(first) == tokens(second)
    assert first.runner.state_shape() == second.runner.state_shape()
    for engine in (first, second):
        engine.close()
