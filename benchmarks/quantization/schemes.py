"""The measured schemes, the texts, and the checkpoints that are made of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import jax.numpy as jnp

from benchmarks.model_shapes import write_config
from checkpoints.folder_writer import write_folder
from checkpoints.quantize.layer_schemes import Policy, read_policy, uniform_policy
from checkpoints.quantize.schemes import SCHEMES
from checkpoints.tiny.docstrings import load_docstrings
from checkpoints.tiny.tasks import training_pair
from jaxserve.config.engine_config import EngineConfig
from jaxserve.loading.engine_build import load_bare
from jaxserve.models.quantized_export import CheckpointExport

SENSITIVITY = "by sensitivity"
POLICY = {
    "attention": "int8-dynamic",
    "mlp": {"scheme": "int8-static", "calibration": "mse"},
    "embeddings": "keep",
    "lm_head": "keep",
    "norms": "keep",
}
# of a model with random weights, of which a calibration would learn nothing
UNCALIBRATED = tuple(name for name, scheme in SCHEMES.items() if not scheme.needs_text)


def policies() -> dict[str, Policy]:
    """The measured schemes, by name."""
    found = {name: uniform_policy(name, "mse") for name in SCHEMES}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.json"
        file.write_text(json.dumps(POLICY))
        return {**found, SENSITIVITY: read_policy(file)}


def calibration_text(pairs: int) -> str:
    """Texts and questions with answers of the training side of the split."""
    rng = Random("calibration")
    texts = [item.document for item in load_docstrings() if not item.held_out]
    drawn = [training_pair(rng) for _ in range(pairs)]
    texts = rng.sample(texts, pairs) + [f"{pair.prompt}\n{pair.answer}" for pair in drawn]
    rng.shuffle(texts)
    return "\n\n".join(texts)


def held_out_text(characters: int | None) -> str:
    """Texts of the other side of the split, cut."""
    return "\n\n".join(item.document for item in load_docstrings() if item.held_out)[:characters]


def write_random(shape: str, folder: Path) -> Path:
    """A checkpoint of random weights, without a tokenizer."""
    config = write_config(shape, folder / "config")
    model, _ = load_bare(EngineConfig(model=str(config), load_format="dummy"))
    small = {"config.json": (config / "config.json").read_bytes()}
    export = CheckpointExport(model, None, jnp.dtype(model.config.dtype))
    write_folder(folder / "model", export.tensors(), small)
    return folder / "model"
