"""Quantised checkpoints that we make: what they mean, how near they are, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from checkpoints import CheckpointError, SafetensorsReader, bundled_model_path
from checkpoints.quantize.layer_schemes import Policy, read_policy, uniform_policy
from checkpoints.quantize.schemes import SCHEMES
from checkpoints.tiny.docstrings import load_docstrings
from jaxserve.errors import ValidationError
from jaxserve.jobs.quantize import Calibration, quantize
from tests.checkpoints.quantize import decoding

GROUP = 32
TEXT = "\n\n".join(item.document for item in load_docstrings() if not item.held_out)[:6000]
CALIBRATION = Calibration(TEXT, samples=4, window=128)
# largest share of a weight's size that rounding may change, by bits
NEAR = {8: 0.05, 4: 0.35}


def make(out: Path, policy: Policy, **more: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of the bundled model quantised so."""
    folder = quantize(
        str(bundled_model_path()),
        out,
        policy,
        calibration=CALIBRATION,
        group=GROUP,
        use_tqdm=False,
        **more,
    )
    return json.loads((folder / "config.json").read_text()), tensors_of(folder)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            tensor = file.get_tensor(name)
            is_fp8 = "float8" in str(tensor.dtype)
            found[name] = tensor.float().numpy() if is_fp8 else tensor.numpy()
    return found


def decoded(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every matrix that is quantised, by the name of its weight."""
    how = config["quantization_config"]
    found = {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part == "qweight" and how["quant_method"] == "awq":
            found[f"{module}.weight"] = decoding.awq(tensors, module, how["group_size"])
        elif part == "qweight":
            found[f"{module}.weight"] = decoding.gptq(tensors, module)
        elif part == "weight_scale":
            groups = how["config_groups"].values()
            own = next(g for g in groups if module in g["targets"] or g["targets"] == ["Linear"])
            found[f"{module}.weight"] = decoding.compressed(tensors, module, own["weights"])
    return found


@pytest.fixture(scope="module")
def original() -> dict[str, np.ndarray]:
    with SafetensorsReader(bundled_model_path()) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_near_what_it_was_made_of(
    name: str, original: dict[str, np.ndarray], tmp_path: Path
) -> None:
    config, tensors = make(tmp_path / "out", uniform_policy(name))
    matrices = decoded(config, tensors)
    assert len(matrices) == 4 * 7
    if SCHEMES[name].format not in ("int-quantized", "float-quantized"):
        assert not any(weight in tensors for weight in matrices)
    scheme = SCHEMES[name]
    for weight, found in matrices.items():
        wanted = original[weight]
        assert found.shape == wanted.shape
        if name != "int4-awq":  # whose inputs have been scaled
            near = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
            assert near < NEAR[scheme.bits], weight
        module = weight.removesuffix(".weight")
        assert (f"{module}.input_scale" in tensors) == (scheme.activations == "tensor")
    kept = {name for name in original if name not in matrices}
    assert kept <= tensors.keys()
    changed = {n for n in kept if not np.array_equal(original[n], tensors[n])}
    assert bool(changed) == (name == "int4-awq") and all("norm" in n for n in changed)


@pytest.mark.slow
def test_awq_scales_inputs_and_undoes_it_before(
    original: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Norm times weight is what it was, but for rounding: by column."""
    config, tensors = make(tmp_path / "out", uniform_policy("int4-awq"))
    matrices, spreads = decoded(config, tensors), []
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        for norm, names in (
            ("input_layernorm", [f"self_attn.{x}_proj" for x in "qkv"]),
            ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            factor = original[f"{prefix}.{norm}.weight"] / tensors[f"{prefix}.{norm}.weight"]
            spreads.append(factor.max() / factor.min())
            for name in names if spreads[-1] > 1.2 else ():
                found, wanted = (m[f"{prefix}.{name}.weight"] for m in (matrices, original))
                sizes = np.linalg.norm(found, axis=0) / np.linalg.norm(wanted, axis=0)
                # up and v are also divided, by rows, for the layer behind them
                if not name.endswith(("v_proj", "up_proj")):
                    assert np.corrcoef(sizes, factor)[0, 1] > 0.9
    assert max(spreads) > 1.2, "the search has changed something"


@pytest.mark.slow
def test_a_policy_by_sensitivity(original: dict[str, np.ndarray], tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    mlp = {"scheme": "int8-static", "calibration": "mse"}
    layers = {"0": {"mlp": "keep", "attention": "keep"}}
    file.write_text(json.dumps({"attention": "int8-dynamic", "mlp": mlp, "layers": layers}))
    config, tensors = make(tmp_path / "out", read_policy(file))
    matrices = decoded(config, tensors)
    assert len(matrices) == 3 * 7 and not any(".layers.0." in name for name in matrices)
    how = config["quantization_config"]
    assert set(how["ignore"]) >= {"lm_head", "model.layers.0.mlp.down_proj"}
    static = {name for name in tensors if name.endswith("input_scale")}
    assert len(static) == 3 * 3 and all(".mlp." in name for name in static)
    assert all(0 < float(tensors[name][0]) < 10 for name in static)
    for name in original:
        if name not in matrices:
            assert np.array_equal(original[name], tensors[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8-dynamic", "fp8"])
def test_experts_are_rounded_and_their_router_is_not(
    name: str, model_folder: Any, tmp_path: Path
) -> None:
    folder = model_folder("qwen3_moe")
    quantize(str(folder), tmp_path / "out", uniform_policy(name), use_tqdm=False)
    tensors = tensors_of(tmp_path / "out")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight_scale" in tensors
    assert "model.layers.0.mlp.gate.weight_scale" not in tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model.layers.0.mlp.gate" in config["quantization_config"]["ignore"]
    with pytest.raises(ValidationError, match="experts"):
        static = uniform_policy("int8-static")
        more = {"calibration": Calibration(TEXT, 1, 64), "use_tqdm": False}
        (folder / "tokenizer.json").write_bytes(
            (bundled_model_path() / "tokenizer.json").read_bytes()
        )
        quantize(str(folder), tmp_path / "static", static, **more)
    assert not (tmp_path / "static").exists()


@pytest.mark.parametrize(
    ("scheme", "more", "named"),
    [
        ("int4-awq", {}, "calibration=None"),
        ("int8-static", {"calibration": Calibration("too short")}, "tokens"),
        ("int4-gptq", {"calibration": Calibration(TEXT, samples=0)}, "calibration="),
        ("int4-dynamic", {"group": 24}, "group_size=24"),
        ("int4-dynamic", {"group": 96}, "group_size=96"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    scheme: str, more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=named):
        quantize(str(bundled_model_path()), tmp_path / "out", uniform_policy(scheme), **more)
    assert os.listdir(tmp_path) == []


def test_other_families_and_quantised_models_are_refused(model_folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"int4-awq.*Olmo2"):
        quantize(str(model_folder("olmo2")), tmp_path / "out", uniform_policy("int4-awq"))
    folder = tmp_path / "quantised"
    folder.mkdir()
    config = json.loads((bundled_model_path() / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValidationError, match="not quantised already"):
        quantize(str(folder), tmp_path / "out", uniform_policy("int8"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(CheckpointError, match="not overwritten"):
        quantize(str(bundled_model_path()), tmp_path / "full", uniform_policy("int8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_engines_read_what_was_written(name: str, make_llm: Any, tmp_path: Path) -> None:
    from jaxserve.evaluation.perplexity import perplexity

    make(tmp_path / "out", uniform_policy(name))
    text = "\n\n".join(item.document for item in load_docstrings() if item.held_out)[:6000]
    found = [
        perplexity(
            make_llm(folder, skip_tokenizer_init=False), text, 128, 128, use_tqdm=False
        ).perplexity
        for folder in (bundled_model_path(), tmp_path / "out")
    ]
    assert abs(found[1] / found[0] - 1) < (0.03 if SCHEMES[name].bits == 8 else 0.2)
