"""Policies: what a file may say, and how errors name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CheckpointError
from checkpoints.quantize.layer_schemes import read_policy, uniform_policy
from checkpoints.quantize.schemes import SCHEMES, quantization_config
from server.commands import quantize

SENSITIVITY = {
    "attention": "int8-dynamic",
    "mlp": {"scheme": "int8-static", "calibration": "percentile"},
    "embeddings": "keep",
    "lm_head": "keep",
    "norms": "keep",
    "layers": {"0-1": {"mlp": "keep"}, "1": {"mlp": "int8-dynamic"}},
}


def written(tmp_path: Path, values: Any) -> Path:
    file = tmp_path / "policy.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return file


def test_parts_and_layers(tmp_path: Path) -> None:
    policy = read_policy(written(tmp_path, SENSITIVITY))
    names = [
        [scheme.name if (scheme := policy.of(layer, part).scheme) else None for layer in range(3)]
        for part in ("attention", "mlp")
    ]
    assert names == [["int8-dynamic"] * 3, [None, "int8-dynamic", "int8-static"]]
    assert policy.of(2, "mlp").calibration == "percentile"
    assert [scheme.name for scheme in policy.schemes] == ["int8-dynamic", "int8-static"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("{", "JSON"),
        ([1], "JSON object"),
        ({"atention": "int8"}, "atention='int8'"),
        ({"attention": "int7"}, "attention='int7'"),
        ({"attention": {"scheme": "int8", "kind": 1}}, "attention="),
        ({"attention": {"scheme": "int8-static", "calibration": "best"}}, "calibration='best'"),
        ({"attention": "int8", "lm_head": "int8"}, "lm_head='int8'"),
        ({"attention": "int8", "layers": {"a": {"mlp": "keep"}}}, "layers.a"),
        ({"attention": "int8", "layers": {"1": {"norms": "keep"}}}, "layers.1"),
        ({"attention": "int8", "layers": [1]}, "layers="),
        ({"attention": "int4-awq", "mlp": "int8"}, "not supported together"),
        ({"attention": "keep"}, "nothing to quantise"),
    ],
)
def test_bad_policies_are_refused(tmp_path: Path, values: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_policy(written(tmp_path, values))


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_policy(tmp_path / "nothing.json")
    with pytest.raises(CheckpointError, match="int3"):
        uniform_policy("int3")


def test_the_command_offers_every_scheme() -> None:
    assert set(quantize.SCHEMES) == set(SCHEMES)


def test_configs_name_layers() -> None:
    config = quantization_config({"a.q": SCHEMES["int8"]}, ["lm_head"], 128)
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    mixed = {"a.q": SCHEMES["int8-dynamic"], "a.up": SCHEMES["fp8"]}
    config = quantization_config(mixed, ["b.q", "lm_head"], 128)
    assert config["format"] == "mixed-precision"
    assert [g["targets"] for g in config["config_groups"].values()] == [["a.q"], ["a.up"]]
    config = quantization_config({"a.q": SCHEMES["int4-gptq"]}, ["b.q", "lm_head"], 32)
    assert config["dynamic"] == {r"-:^b\.q$": {}} and config["group_size"] == 32
    config = quantization_config({"a.q": SCHEMES["int4-awq"]}, ["b.q", "lm_head"], 32)
    assert config["modules_to_not_convert"] == ["b.q"]
