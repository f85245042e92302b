"""Weights that differ have another digest, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxserve.loading.weights_digest import SAMPLE_BYTES, SAMPLES, weights_digest


def test_names_shapes_sizes_and_numbers_count_and_the_folder_does_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    (one / "config.json").write_text("{}")
    weights = {"a": np.zeros((SAMPLES, SAMPLE_BYTES), np.int8), "b": np.ones(3, np.float32)}
    save_file(weights, one / "model.safetensors")
    shutil.copytree(one, two)
    first = weights_digest(one)
    assert weights_digest(two) == first

    def changed(**other: np.ndarray) -> str:
        save_file(weights | other, two / "model.safetensors")
        return weights_digest(two)

    other = {
        changed(b=np.zeros(3, np.float32)),
        changed(a=weights["a"].reshape(-1, 2)),
        changed(c=weights["b"]),
    }
    assert first not in other and len(other) == 3 and changed() == first
    (two / "config.json").write_text('{"a": 1}')
    assert weights_digest(two) != first
    assert weights_digest(one / "model.safetensors") != first, "a GGUF file stands for itself"
