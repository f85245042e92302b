"""Folders of well-known models without weights, for benchmarks with random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.models.known_shapes import SHAPES

# sizes of a small model of such a shape
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def write_config(shape: str, folder: Path, **overrides: Any) -> Path:
    """A folder with the config.json of one of `SHAPES`, to load with `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(SHAPES[shape] | overrides, indent=2)
    (folder / "config.json").write_text(settings + "\n")
    return folder
