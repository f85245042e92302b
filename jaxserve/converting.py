"""Model folders from one format into another: safetensors of Hugging Face, stores of Orbax."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from checkpoints import CheckpointError
from checkpoints.store import is_store
from checkpoints.store.writer import small_files_of
from checkpoints.writing import write_folder
from jaxserve.config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.hub import names_gguf
from jaxserve.loading import load_bare
from jaxserve.models.export import hf_tensors
from jaxserve.models.stored import NO_FOLDER, save_model

logger = logging.getLogger(__name__)


def convert(
    model: str,
    out: str | Path,
    *,
    to: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    use_tqdm: bool = True,
) -> Path:
    """Write a model folder in the other format; returns the folder.

    The whole model is loaded first. `out` is written whole or not at all; a conversion to a store
    that was ended goes on with the parts that are there.

    Args:
        model: folder with safetensors, store, or the id of a hub's model.
        out: absent or empty; a store may be replaced by another.
        to: "orbax" or "safetensors"; None: the other one.
        dtype: of the weights; "auto": as they are.
        quantization: of a store, as the engine's setting.
        tensor_parallel_size: devices whose shards are the files of a store.
        use_tqdm: show progress bars where standard error is a terminal.

    Raises:
        ValidationError: a setting that does not fit the model.
        CheckpointError: the model cannot be read, or the folder not be written.
    """
    config = EngineConfig(
        model=str(model),
        dtype=dtype,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
    )
    if names_gguf(config.model):
        raise CheckpointError(model, NO_FOLDER)
    loaded, files = load_bare(config)
    out, from_store = Path(out), is_store(files.model)
    if to is None:
        to = "safetensors" if from_store else "orbax"
    if out.absolute() == files.model.absolute():
        raise ValidationError("OUT", str(out), "another folder than MODEL")
    kept = _dtype_of(loaded)
    if to == "orbax":
        save_model(
            loaded, out, dtype=kept, model_folder=files.model, source=True, use_tqdm=use_tqdm
        )
        return out
    if loaded.form.quantization is not None:
        raise ValidationError(
            "to",
            to,
            "orbax for a quantised model: `jaxserve quantize` writes quantised safetensors",
        )
    small = small_files_of(files.model)
    small["config.json"] = _with_dtype(files.model / "config.json", small, kept)
    write_folder(out, hf_tensors(loaded), small, use_tqdm=use_tqdm)
    return out


def _dtype_of(model: Any) -> str:
    return str(model.norm.weight[...].dtype)


def _with_dtype(file: Path, small: dict[str, bytes], dtype: str) -> bytes:
    """config.json with the type that the weights are written in."""
    try:
        values = json.loads(small["config.json"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(file, f"cannot be read ({error!r})") from error
    values.pop("torch_dtype", None)
    return json.dumps(values | {"dtype": dtype}, indent=2).encode()
