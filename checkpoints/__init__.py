"""File formats of model checkpoints, and the small models that come with jaxserve."""

from __future__ import annotations

from pathlib import Path

from checkpoints.errors import CheckpointError, TensorMismatchError
from checkpoints.safetensors_reader import SafetensorsReader, TensorInfo, aligned_empty

__all__ = [
    "CheckpointError",
    "SafetensorsReader",
    "TensorInfo",
    "TensorMismatchError",
    "aligned_empty",
    "bundled_model_path",
    "bundled_picture_model_path",
]


def bundled_model_path() -> Path:
    """Folder of the bundled model, in Hugging Face format."""
    return Path(__file__).resolve().parent / "tiny"


def bundled_picture_model_path() -> Path:
    """Folder of the bundled model that reads pictures, in Hugging Face format."""
    return Path(__file__).resolve().parent / "pictures"
