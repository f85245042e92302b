"""The model on fake devices against one, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fake_devices import said
from tests.tiny_models import make_case


def compare(folder: Path, devices: int = 2) -> dict[str, Any]:
    words = ["-m", "tests.jaxserve.models.tensor_parallel", str(folder), str(devices)]
    return json.loads(said(devices, *words, timeout=300)[-1])


@pytest.mark.parametrize(
    ("case", "vocab_size", "vocab_rows"),
    [
        pytest.param("llama_biases", 200, 100, marks=pytest.mark.slow),
        pytest.param("qwen3_tied_biases", 199, 199, marks=pytest.mark.slow),
    ],
)
def test_two_devices_equal_one(tmp_path: Path, case: str, vocab_size: int, vocab_rows: int) -> None:
    result = compare(make_case(tmp_path, case, vocab_size=vocab_size))
    assert result["difference"] <= 1e-6
    assert result["equal"] == {"dummy": True, "int8": True, "dummy int8": True}
    shapes = result["shard_shapes"]
    assert shapes["embedding"] == [vocab_rows, 64]
    assert shapes["blocks/0/attention/qkv/weight"][0] == 1  # of 2 KV heads
    assert shapes["blocks/0/attention/output/weight"] == [64, 32]
    assert shapes["blocks/0/mlp/gate_up/weight"] == [96, 64]
    assert shapes["blocks/0/mlp/down/weight"] == [64, 48]
    # No weight and no activation is gathered: partial sums are added, two a layer of three and of
    # the embeddings where devices divide these; nothing else travels.
    of_embeddings = {"all-reduce": 1} if vocab_rows == 100 else {}
    assert result["collectives"] == {"all-reduce": 6 + len(of_embeddings)}
    # Where rows are divided as many bytes travel, and fewer where the norms are rounded: those of
    # the five that a projection reads.
    assert result["rows divided"] <= 5e-6
    of_rows = result["collectives of rows"]
    assert 6 <= of_rows.pop("all-gather") <= 8, "XLA may divide the embeddings as well"
    assert of_rows == {"reduce-scatter": 6, **of_embeddings}
    assert result["rounded rows gathered"] == 5
    # A row is rounded with the same scale wherever that is done. Inputs that devices divide are
    # rounded with a scale of each part: products differ by as much, and by nothing where the scales
    # are alike.
    assert result["rounded rows against whole ones"] == 0.0
    assert result["inputs with scales alike"] < 1e-6
    assert 1e-4 < result["inputs with scales unlike"] < 0.01
    assert 0.0 < result["rounded rows against one device"] < result["rounding itself"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama_mqa", "qwen3_tied_biases", "phi3", "olmo2", "qwen3_moe"])
def test_neighbours_have_copies_of_a_key_value_head(tmp_path: Path, case: str) -> None:
    """Of 1 or 2 on 4 devices, each copy for a part of its query heads."""
    result = compare(make_case(tmp_path, case), devices=4)
    assert result["difference"] <= 5e-6  # float32, added in another order
    assert result["shard_shapes"]["blocks/0/attention/qkv/weight"][:2] == [1, 3]
    assert result["collectives"] == {"all-reduce": 6}
