"""Quantised models through a store and back to folders of Hugging Face: the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.jobs.convert import convert
from jaxserve.loading.engine_build import load_bare
from jaxserve.models.quantized_export import CheckpointExport
from jaxserve.models.store import named_leaves, with_leaves
from tests.quantized_models import CASES, quantize_folder

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}


def loaded(folder: Path, **settings: Any) -> dict[str, np.ndarray]:
    model, _ = load_bare(EngineConfig(model=str(folder), **settings))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}


def there_and_back(folder: Path, tmp_path: Path, **settings: Any) -> tuple[Path, dict[str, Any]]:
    """Through a store to a folder of Hugging Face that loads as the same arrays, which make the
    same logits; the folder and its config."""
    convert(str(folder), tmp_path / "store", use_tqdm=False, **settings)
    back = convert(str(tmp_path / "store"), tmp_path / "back", use_tqdm=False)
    dtype = settings.get("dtype", "auto")
    before, after = loaded(tmp_path / "store", dtype=dtype), loaded(back, dtype=dtype)
    assert before.keys() == after.keys()
    assert any(array.dtype.itemsize == 1 for array in before.values())
    for name, array in before.items():
        assert array.dtype == after[name].dtype and (array == after[name]).all(), name
    return back, json.loads((back / "config.json").read_text())


QUICK_CASES = ("gptq-act-order",)


@pytest.mark.parametrize(
    "case",
    [c if c in QUICK_CASES else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
def test_a_quantised_checkpoint_comes_back_in_its_format(
    case: str, model_folder: Any, tmp_path: Path
) -> None:
    config, pack = CASES[case]
    base = model_folder("llama_biases", **WIDE)
    folder, _ = quantize_folder(base, tmp_path, config, lambda module: pack)
    back, values = there_and_back(folder, tmp_path, dtype="bfloat16")
    method = values["quantization_config"]["quant_method"]
    # plain e4m3 is one of the formats of compressed-tensors
    assert method == {"fp8": "compressed-tensors"}.get(
        config["quant_method"], config["quant_method"]
    )
    if case in ("awq", "gptq", "gptq-8", "gptq-act-order", "w4a16", "w8a8"):
        before, after = (load_file(f / "model.safetensors") for f in (folder, back))
        parts = ("qweight", "qzeros", "g_idx", "scales", "packed", "weight_scale")
        names = [name for name in before if name.endswith(parts)]
        assert names and all((before[n] == after[n]).all() for n in names)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("case", ["llama_tied", "phi3", "qwen3_moe"])
def test_weights_that_were_rounded_at_load_become_a_checkpoint(
    case: str, quantization: str, model_folder: Any, tmp_path: Path
) -> None:
    folder = model_folder(case)
    _, values = there_and_back(folder, tmp_path, dtype="bfloat16", quantization=quantization)
    # the lm head of int8 is rounded too, and the embedding is not
    is_own = case != "llama_tied" or quantization == "int8"
    assert bool(values.get("tie_word_embeddings")) != is_own
    ignored = values["quantization_config"]["ignore"]
    assert ("lm_head" in ignored) == (quantization != "int8")


@pytest.mark.slow
def test_an_engine_of_a_checkpoint_made_of_a_store_says_the_same(
    model_folder: Any, make_llm: Any, tmp_path: Path
) -> None:
    from jaxserve import SamplingParams

    config, pack = CASES["awq"]
    base = model_folder("llama_biases", **WIDE)
    scale = {"k_scale": np.array([0.05], np.float32), "v_scale": np.array([0.02], np.float32)}
    folder, _ = quantize_folder(
        base,
        tmp_path,
        config,
        lambda module: pack,
        lambda module: scale_of(module, scale),
    )
    back, _ = there_and_back(folder, tmp_path, dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    said = []
    for place in (folder, tmp_path / "store", back):
        llm = make_llm(place, dtype="bfloat16", kv_cache_dtype="fp8")
        outputs = llm.generate([[5, 6, 7, 8, 9], [11, 12]], params, use_tqdm=False)
        said.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert said[0] == said[1] == said[2]
    kept = load_file(back / "model.safetensors")
    assert kept["model.layers.1.self_attn.k_scale"] == np.float32(0.05)


def scale_of(module: str, scale: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scales of the KV cache as exporters put them, below the projections."""
    kind = module.rpartition(".")[2][0]
    return (
        {f"{kind}_scale": scale[f"{kind}_scale"]} if module.endswith(("k_proj", "v_proj")) else {}
    )


def test_zeros_that_are_no_integers_are_refused(model_folder: Any, tmp_path: Path) -> None:
    """As GGUF's Q4_1 and Q4_K have them."""
    config, pack = CASES["awq"]
    base = model_folder("llama_biases", **WIDE)
    folder, _ = quantize_folder(base, tmp_path, config, lambda module: pack)
    model, _ = load_bare(EngineConfig(model=str(folder), linear_backend="native"))
    leaves = named_leaves(model)
    name = "blocks.1.mlp.down.weight.zero"
    changed = with_leaves(model, leaves | {name: leaves[name] * 1.01})
    with pytest.raises(ValidationError, match=r"blocks\.1\.mlp\.down.*integer zeros"):
        list(CheckpointExport(changed, "awq", np.dtype(np.float32)).tensors())
