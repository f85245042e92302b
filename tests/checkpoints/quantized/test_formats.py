"""Quantised safetensors: each format's numbers come back, and contradictions are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import CheckpointError
from checkpoints.quantized_formats import open_checkpoint, quantization_of
from tests import quantized_models as packers
from tests.quantized_models import CASES, Packer, Tensors

FILE = "model.safetensors"
MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
SHAPE = (48, 256)


def write(
    folder: Path,
    config: dict[str, Any],
    pack: Packer,
    edit: Callable[[Tensors], object] = lambda tensors: None,
) -> np.ndarray:
    """A checkpoint of one quantised matrix and one that is not; returns what it stands for."""
    rng = np.random.default_rng(0)
    tensors, values = pack(rng.normal(size=SHAPE).astype(np.float32), rng)
    named = {f"{MODULE}.{part}": array for part, array in tensors.items()}
    named["model.norm.weight"] = np.ones(4, np.float32)
    edit(named)
    save_file({k: np.ascontiguousarray(v) for k, v in named.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return values


@pytest.mark.parametrize("case", CASES)
def test_numbers_come_back(tmp_path: Path, case: str) -> None:
    config, pack = CASES[case]
    wanted = write(tmp_path, config, pack)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {NAME, "model.norm.weight"}
        assert checkpoint.tensors[NAME].shape == SHAPE
        found = np.empty(SHAPE, np.float32)
        checkpoint.read_into(NAME, (), found)
        np.testing.assert_array_equal(found, wanted)
        # rows that begin and end within a word, two an index, and some of the columns
        part = np.empty((5, 2, 64), np.float32)
        checkpoint.read_into(NAME, (slice(3, 13), slice(64, 128)), part)
        np.testing.assert_array_equal(part.reshape(10, 64), wanted[3:13, 64:128])
        matrix, rows = checkpoint.matrices[NAME], slice(3, 13)
        own = matrix.elements(rows, slice(64, 128))
        np.testing.assert_array_equal(own, matrix.elements(rows)[:, 64:128])


def nan_scale(part: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        scale = tensors[f"{MODULE}.{part}"].copy()
        scale.reshape(-1)[1] = np.nan
        tensors[f"{MODULE}.{part}"] = scale

    return edit


def without(part: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{MODULE}.{part}")


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("awq", nan_scale("scales"), "scales'.*1 of 192 scales are not finite"),
        ("gptq", nan_scale("scales"), "not finite"),
        ("w4a16", nan_scale("weight_scale"), "not finite"),
        ("fp8-block", nan_scale("weight_scale_inv"), "not finite"),
        ("awq", without("scales"), "scales'.*missing"),
        ("awq", without("qzeros"), "qzeros'.*missing"),
        ("gptq", without("qzeros"), "qzeros'.*missing"),
        ("w4a16", without("weight_shape"), "weight_shape'.*missing"),
        ("w4a16", without("weight_scale"), "weight_scale'.*missing"),
        ("fp8-block", without("weight_scale_inv"), "weight_scale'.*missing"),
        ("w8a8-static", without("input_scale"), "input_scale'.*missing.*static"),
        (
            "fp8-tensor-static",
            lambda t: t.update({f"{MODULE}.input_scale": np.float32([np.nan])}),
            "input_scale'.*nan is no scale",
        ),
        (
            "w8a8-static",
            lambda t: t.update({f"{MODULE}.input_scale": np.ones(4, np.float32)}),
            "input_scale'.*float32\\[4\\]",
        ),
        (
            "gptq",
            lambda t: t.update({f"{MODULE}.g_idx": np.zeros(256, np.int32)}),
            "g_idx'.*4 groups of 64 inputs each",
        ),
        (
            "w8a8",
            lambda t: t.update({f"{MODULE}.weight_zero_point": np.ones((1, 1), np.int8)}),
            "weight_zero_point'.*zero points, and the scheme is symmetric",
        ),
        (
            "w8a8",
            lambda t: t.update({NAME: t[NAME].astype(np.float32)}),
            "it is float32.*want int8",
        ),
    ],
)
def test_damaged_tensors(
    tmp_path: Path, case: str, edit: Callable[[Tensors], None], message: str
) -> None:
    config, pack = CASES[case]
    write(tmp_path, config, pack, edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("awq", {"group_size": 128}, r"scales'.*float16\[4, 48\].*\[2, 48\]"),
        ("awq", {"group_size": 17}, "group_size=17 .*multiple of 16"),
        ("awq", {"bits": 8}, "bits=8 .*one of 4"),
        ("awq", {"version": "gemv"}, "version='gemv' .*gemm"),
        ("awq", {"modules_to_not_convert": ["down_proj"]}, "modules_to_not_convert"),
        ("gptq", {"bits": 3}, "bits=3 .*one of 4, 8"),
        ("gptq", {"sym": True}, "sym is true, but not all zero points are 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("gptq-act-order", {"desc_act": False}, "desc_act is false"),
        ("fp8-block", {"weight_block_size": [64, "x"]}, "weight_block_size="),
        ("fp8-block", {"weight_block_size": [128, 128]}, r"weight_scale_inv'.*\[1, 2\]"),
        ("fp8-block", {"activation_scheme": "other"}, "activation_scheme='other'"),
        ("awq", {"quant_method": "hqq"}, "quant_method='hqq' .*awq, gptq, compressed-tensors, fp8"),
        ("w4a16", {"config_groups": {}}, "config_groups={}"),
        ("w4a16", {"ignore": ["re:.*down_proj"]}, "ignore names its module"),
        ("w4a16", {"format": "marlin-24"}, "format='marlin-24'"),
        (
            "w4a16",
            {"config_groups": {"g": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 4}}}},
            "no group of config_groups has it as a target",
        ),
        (
            "w4a16",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 2}}}},
            "config_groups.g.weights.num_bits=2",
        ),
    ],
)
def test_configs_that_contradict_the_tensors(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    config, pack = CASES[case]
    write(tmp_path, config | changes, pack)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    config, pack = CASES["awq"]
    write(tmp_path, config, pack)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path)


def test_configs_of_old_tools(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert quantization_of(tmp_path) is None
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    found = quantization_of(tmp_path)
    assert found is not None
    assert found[0] == "gptq"
    (tmp_path / "config.json").write_text('{"quantization_config": []}')


def test_integers_that_no_matrix_is_made_of(tmp_path: Path) -> None:
    config, pack = CASES["awq"]
    integers = {"model.other.weight": np.ones((2, 2), np.int32)}
    write(tmp_path, config, pack, lambda tensors: tensors.update(integers))
    with pytest.raises(CheckpointError, match=r"model\.other\.weight.*no part of a matrix"):
        open_checkpoint(tmp_path)


def test_act_order_of_compressed_tensors(tmp_path: Path) -> None:
    config, _ = CASES["w4a16"]
    rng = np.random.default_rng(0)
    g_idx = rng.permutation(np.arange(256) // 64).astype(np.int32)
    order = np.argsort(g_idx, kind="stable")
    weight = rng.normal(size=SHAPE).astype(np.float32)
    q, scale, zero = packers.integers(weight[:, order], 4, 64, asymmetric=False)
    tensors = {
        "weight_packed": packers.packed(q[:, np.argsort(order)], 4),
        "weight_scale": scale,
        "weight_shape": np.array(SHAPE, np.int64),
        "weight_g_idx": g_idx,
    }
    write(tmp_path, config, lambda weight, rng: (tensors, weight))
    with open_checkpoint(tmp_path) as checkpoint:
        found = np.empty(SHAPE, np.float32)
        checkpoint.read_into(NAME, (), found)
        wanted = packers.values_of(q, scale, zero, 64)[:, np.argsort(order)]
        np.testing.assert_array_equal(found, wanted)
