"""Folders of well-known models without weights, for benchmarks with random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.models.known_shapes import SHAPES


def write_config(shape: str, folder: Path, **overrides: Any) -> Path:
    """A folder with the config.json of one of `SHAPES`, to load with `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(SHAPES[shape] | overrides, indent=2)
    (folder / "config.json").write_text(settings + "\n")
    return folder
