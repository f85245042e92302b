"""Loads the encoder of a model that reads more than text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import TensorMismatchError
from checkpoints.quantized_formats import open_checkpoint
from checkpoints.store import is_store
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.models.dummy import constant, dummy_array
from jaxserve.models.registry import Encoding, family_of


def abstract_encoder(config: ModelConfig, mesh: Mesh, dtype: str) -> nnx.Module:
    """The encoder with shapes, types and shardings in the place of parameters."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    made = nnx.eval_shape(lambda: encoding_of(config).module(config, resolve_dtype(dtype, config)))
    graph, state = nnx.split(made)
    module: nnx.Module = nnx.merge(graph, jax.tree.map(placed, state))
    return module


def load_encoder(
    path: str | Path, config: ModelConfig, *, mesh: Mesh, dtype: str, load_format: str, seed: int
) -> nnx.Module:
    """The encoder with its parameters; every device of the mesh has all of them.

    Arguments are as for `load_model`.

    Raises:
        ValidationError: see `check_encoder`.
        CheckpointError: a file is missing or damaged.
        TensorMismatchError: tensors are missing or of wrong shape.
    """
    if load_format != "dummy":
        check_encoder(path, config)
    graph, state = nnx.split(abstract_encoder(config, mesh, dtype))
    flat = nnx.to_flat_state(state)
    if load_format == "dummy":
        filled = [
            (place, variable.replace(_dummy(seed, place, variable))) for place, variable in flat
        ]
    else:
        filled = _read(path, config, flat)
    module: nnx.Module = nnx.merge(graph, nnx.from_flat_state(filled))
    return module


def check_encoder(path: str | Path, config: ModelConfig) -> None:
    """Refuse weights without any of an encoder.

    Raises:
        ValidationError: they are in a store, or no tensor is one of an encoder.
        CheckpointError: a file is missing or damaged.
    """
    allowed = "a folder of safetensors with an encoder; limit_mm_per_prompt=0 reads text alone"
    if is_store(path):
        raise ValidationError("model", str(path), f"{allowed}, from a store too")
    with open_checkpoint(path) as checkpoint:
        prefixes = family_of(config).passed_over
        if not any(name.startswith(prefixes) for name in checkpoint.tensors):
            raise ValidationError("model", str(path), allowed)


def encoding_of(config: ModelConfig) -> Encoding:
    """What a family that has an encoder says of it."""
    encoding = family_of(config).encoding
    assert encoding is not None
    return encoding


def _dummy(seed: int, place: Any, variable: Any) -> Any:
    wanted, fill = variable.get_value(), variable.get_metadata("fill")
    return dummy_array(seed, place, wanted) if fill is None else constant(fill, wanted)


def _read(path: str | Path, config: ModelConfig, flat: Any) -> list[tuple[Any, Any]]:
    source_of, filled = encoding_of(config).source, []
    with open_checkpoint(path) as checkpoint:
        expected: dict[str, tuple[int, ...]] = {}
        for place, variable in flat:
            is_matrix = variable.get_metadata("fill") is None
            shape = variable.get_value().shape
            expected |= source_of(place, config).tensors(shape, is_matrix)
        found = {name: info.shape for name, info in checkpoint.tensors.items()}
        missing = [name for name in expected if name not in found]
        wrong = {
            name: (shape, found[name])
            for name, shape in expected.items()
            if name in found and found[name] != shape
        }
        if missing or wrong:
            raise TensorMismatchError(checkpoint.path, missing, [], wrong)
        for place, variable in flat:
            wanted, is_matrix = variable.get_value(), variable.get_metadata("fill") is None
            whole = (slice(None),) * len(wanted.shape)
            source, dtype = source_of(place, config), jnp.dtype(wanted.dtype)
            array = source.read(checkpoint, wanted.shape, whole, dtype, is_matrix)
            filled.append((place, variable.replace(jax.device_put(array, wanted.sharding))))
    return filled
