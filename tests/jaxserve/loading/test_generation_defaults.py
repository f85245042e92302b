"""Defaults of sampling parameters from a model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.generation_defaults import generation_defaults

SAID = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 2, "max_new_tokens": None}


def folder(place: Path, said: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "generation_config.json").write_text(json.dumps(said))
    return place


def found(model: Path, **asked: Any) -> dict[str, float]:
    return generation_defaults(EngineConfig(model="m", **asked), model)


def test_the_models_own_another_folders_or_none(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", SAID)
    other = folder(tmp_path / "o", {"min_p": 0.1, "max_new_tokens": 9, "repetition_penalty": 1.2})
    assert found(model) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    expected = {"min_p": 0.1, "max_tokens": 9, "repetition_penalty": 1.2}
    assert found(model, generation_config=str(other)) == expected
    assert found(model, generation_config="vllm") == {} == found(tmp_path / "nowhere")
    over = {"top_k": None, "temperature": 1.0}
    changed = {"temperature": 1.0, "top_p": 0.9}
    assert found(model, override_generation_config=over) == changed
    assert found(model, generation_config="vllm", override_generation_config=over) == {
        "temperature": 1.0
    }


@pytest.mark.parametrize(
    ("said", "asked", "field"),
    [
        ({"temperature": 9}, {}, "generation_config.temperature"),
        ({"max_new_tokens": 0}, {}, "generation_config.max_new_tokens"),
        ({}, {"generation_config": "/nowhere"}, "generation_config"),
        ({}, {"override_generation_config": {"do_sample": 1}}, "override_generation_config"),
        ({}, {"override_generation_config": {"top_p": "x"}}, "generation_config.top_p"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, said: Any, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        found(folder(tmp_path, said), **asked)
    assert caught.value.field == field
