"""Model folders from one format into another: safetensors of Hugging Face, stores of Orbax."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from checkpoints import CheckpointError
from checkpoints.folder_writer import FolderWriter
from checkpoints.store import is_store
from checkpoints.store.writer import small_files_of
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.engine_build import decide_bare, load_weights
from jaxserve.loading.hub import names_gguf
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.models.kv_scales import kv_scale_tensors
from jaxserve.models.protocol import Model
from jaxserve.models.quantized_export import CheckpointExport
from jaxserve.models.registry import family_of
from jaxserve.models.store import NO_FOLDER, read_scales, save_model
from jaxserve.models.weights import opened_model

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

    To safetensors the whole model is loaded first; to a store a part at a time is. `out` is written
    whole or not at all; a conversion to a store that was ended goes on with the parts that are
    there.

    Args:
        model: folder with safetensors, store, or the id of a hub's model.
        out: absent or empty; a store may be replaced by another.
        to: "orbax" or "safetensors"; None: the other one.
        dtype: of the weights; "auto": as they are.
        quantization: what weights are rounded to, as the engine's setting.
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
    out = Path(out)
    with LoadProgress(logger.info) as report:
        loads = to == "safetensors" or is_store(model)
        decided, files, mesh = decide_bare(config, report, in_memory=loads)
        from_store = is_store(files.model)
        if to is None:
            to = "safetensors" if from_store else "orbax"
        if out.absolute() == files.model.absolute():
            raise ValidationError("OUT", str(out), "another folder than MODEL")
        architecture, dtype = decided.model.architecture, decided.config.model.dtype
        if to == "safetensors" and family_of(decided.model).passed_over:
            allowed = f"orbax: the part of {architecture} that reads images would be lost"
            raise ValidationError("to", to, allowed)
        save = partial(
            save_model, dtype=dtype, model_folder=files.model, source=True, use_tqdm=use_tqdm
        )
        if to == "orbax" and not from_store:
            with opened_model(
                files.model,
                decided.model,
                mesh=mesh,
                dtype=dtype,
                form=decided.form,
                plan=decided.plan,
            ) as (shapes, make):
                save(shapes, out, make=make)
            return out
        loaded = load_weights(decided, mesh, report)
    if to == "orbax":
        save(loaded, out)
    else:
        _write_safetensors(loaded, files.model, out, dtype, use_tqdm)
    return out


def _write_safetensors(model: Model, folder: Path, out: Path, dtype: str, use_tqdm: bool) -> None:
    """A Hugging Face folder of a model, quantised as it is loaded."""
    small = small_files_of(folder)
    config = _with_dtype(folder / "config.json", small, dtype)
    if not model.config.tie_word_embeddings:  # whatever config.json said of the weights
        config["tie_word_embeddings"] = False
    source = config.pop("quantization_config", None) or {}
    export = CheckpointExport(model, source.get("quant_method"), jnp.dtype(dtype))
    config |= export.overrides
    scales = read_scales(folder, model.config.num_layers)
    with FolderWriter(out) as writer:
        bar = tqdm(export.tensors(), desc="writing", disable=None if use_tqdm else True)
        for name, tensor in bar:
            writer.add({name: tensor})
        if scales is not None:
            writer.add(kv_scale_tensors(scales))
        if export.is_quantized:
            config["quantization_config"] = export.config()
        writer.finish(small | {"config.json": json.dumps(config, indent=2).encode()})


def _with_dtype(file: Path, small: dict[str, bytes], dtype: str) -> dict[str, Any]:
    """config.json with the type that the weights are written in."""
    try:
        values = json.loads(small["config.json"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(file, f"cannot be read ({error!r})") from error
    values.pop("torch_dtype", None)
    return dict(values | {"dtype": dtype})
