"""Calibrated scales are the largest keys and values that transformers computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from jaxserve import LLM
from jaxserve.errors import ValidationError
from jaxserve.jobs.kv_calibration import LARGEST, calibrate, save
from jaxserve.models.kv_scales import read_kv_scales
from server.cli import main
from tests.tiny_models import VOCAB_SIZE

WINDOW = 40
SMALL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_pages": 9,  # two windows at once, so later ones overwrite the pages of earlier ones
    "skip_tokenizer_init": True,
    "compile_ahead": 2,
    "compile_in_background": False,
}


@torch.no_grad()
def largest(folder: str, windows: list[list[int]]) -> np.ndarray:
    """float[num_layers, 2] of transformers' keys and values over all windows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for window in windows:
        past = DynamicCache(config=model.config)
        model(torch.tensor(window)[None], past_key_values=past, use_cache=True)
        found.append([[one.keys.abs().max(), one.values.abs().max()] for one in past.layers])
    return np.array(found).max(axis=0)


@pytest.mark.slow
def test_scales_are_the_largest_keys_and_values(model_folder, tmp_path) -> None:
    folder = str(model_folder("llama_gqa"))
    ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, 7 * WINDOW - 5).tolist()
    llm = LLM(folder, dtype="float32", **SMALL)
    scales = calibrate(llm, ids, WINDOW)
    with pytest.raises(ValidationError, match="20 tokens"):
        calibrate(llm, ids[:20], WINDOW)
    llm.close()
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    np.testing.assert_allclose(
        np.array([scales.k, scales.v]).T * LARGEST, largest(folder, windows), rtol=1e-5
    )
    save(scales, tmp_path / "scales.safetensors")
    again = read_kv_scales(tmp_path / "scales.safetensors", len(scales.k))
    assert again is not None
    np.testing.assert_allclose([again.k, again.v], [scales.k, scales.v], rtol=1e-6)


@pytest.mark.slow
def test_the_command_writes_what_an_engine_reads(tmp_path, capsys) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "scales.safetensors"
    text.write_text("The list is [3, 1, 2] and sorted it is [1, 2, 3].\n" * 40)
    few = ["--max-model-len", "256", "--max-num-batched-tokens", "64"]
    assert main(["calibrate-kv", "--text", str(text), "--output", str(output), *few]) == 0
    assert "keys" in capsys.readouterr().out
    words = ["generate", "--prompt", "Sort [3, 1].", "--max-tokens", "2", *few]
    fp8 = ["--kv-cache-dtype", "fp8"]
    assert main([*words, *fp8, "--kv-cache-scales", str(output)]) == 0
    assert "no scales" not in capsys.readouterr().err
    assert main([*words, *fp8, "--kv-cache-scales", str(text)]) == 1
    assert main([*words, "--kv-cache-scales", str(output)]) == 1
    assert "kv_cache_scales" in capsys.readouterr().err
