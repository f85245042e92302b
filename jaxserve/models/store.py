"""A model's parameters as named arrays, and the store that they are kept in and restored from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints import CheckpointError
from checkpoints.gguf import is_gguf
from checkpoints.quantized import Encoding
from checkpoints.store import is_store, read_record
from jaxserve.errors import ValidationError
from jaxserve.models.kv_cache import KVScales
from jaxserve.models.kv_scales import read_kv_scales
from jaxserve.models.linear import LinearForm
from jaxserve.models.protocol import Model
from jaxserve.models.quant_array import QuantArray, WeightFormat
from jaxserve.models.sources import Place
from jaxserve.models.weight_plan import Plan
from pallas_kernels.backends.mosaic_tpu import LENGTH_MULTIPLE
from pallas_kernels.quantized_matmul.formats import PIECE

NO_FOLDER = "a model of a GGUF file is not written: its config and tokenizer are no files"
# (place in the module tree, abstract parameter) -> its value
Make = Callable[[Place, Any], Any]
# 8-bit integers as they are, and with 128 added, for a kernel that wants them so
_EIGHT_BITS = ("int8", "uint8")
# the order of scales, as a store's record names it: that of `WeightFormat.by_group`
_SCALES = "rows of groups"


def named_leaves(model: Model) -> dict[str, Any]:
    """The arrays of a model, or their abstract forms, by names such as "blocks.0.mlp.down.weight".

    The arrays of a quantised weight have names of their own behind that: "values", "scale".
    """
    found: dict[str, Any] = {}
    _, state = nnx.split(model)
    for place, variable in nnx.to_flat_state(state):
        found |= _leaves_of(place, variable.get_value())
    return found


def _leaves_of(place: Place, value: Any) -> dict[str, Any]:
    """The arrays of a parameter by their names."""
    name = ".".join(map(str, place))
    leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    return {".".join([name, *(_key(key) for key in path)]): leaf for path, leaf in leaves}


def with_leaves(model: Model, leaves: Mapping[str, Any]) -> Model:
    """The model with other arrays, by the names of `named_leaves`."""
    graph, state = nnx.split(model)
    filled = []
    for place, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, place))
        paths, tree = jax.tree_util.tree_flatten_with_path(variable.get_value())
        own = [leaves[".".join([name, *(_key(key) for key in path)])] for path, _ in paths]
        filled.append((place, variable.replace(jax.tree.unflatten(tree, own))))
    merged: Model = nnx.merge(graph, nnx.from_flat_state(filled))
    return merged


def save_model(
    model: Model,
    out: Path,
    *,
    dtype: str,
    model_folder: Path,
    make: Make | None = None,
    source: bool = False,
    made_up: bool = False,
    use_tqdm: bool = False,
) -> None:
    """Keep a model in a store.

    Args:
        model: with its arrays, on any mesh; with `make` their shapes are enough.
        out: the folder: absent, empty, or a store, which is replaced at once when all is written.
        dtype: of the model.
        model_folder: where config.json, tokenizer and scales of the KV cache are.
        make: gives the parameters, a part of the store at a time; None: the model has them.
        source: whether a run that was ended is gone on with.
        made_up: the parameters are of no file, and no scales of the KV cache belong to them.
        use_tqdm: show a progress bar where standard error is a terminal.

    Raises:
        CheckpointError: the place holds something else, there is no room, or the model is of a
            GGUF file.
    """
    # imported where it is used: most engines never write one
    from checkpoints.store.writer import small_files_of, source_of, write_store

    if is_gguf(model_folder):
        raise CheckpointError(model_folder, NO_FOLDER)
    leaves = named_leaves(model)
    scales = None if made_up else read_scales(model_folder, model.config.num_layers)
    about = {
        "architecture": model.config.architecture,
        "dtype": dtype,
        "quantization": model.form.quantization,
        "weights": {name: asdict(format) for name, format in _formats(model).items()},
        "scales": _SCALES,
        "kv_scales": None if scales is None else [list(scales.k), list(scales.v)],
    }
    small = small_files_of(model_folder)
    if not model.config.tie_word_embeddings:  # whatever config.json said of the weights
        said = json.loads(small["config.json"]) | {"tie_word_embeddings": False}
        small["config.json"] = json.dumps(said, indent=2).encode()
    write_store(
        out,
        leaves,
        about=about,
        small_files=small,
        read=None if make is None else partial(_made_leaves, model, make),
        source=source_of(model_folder, about) if source else "",
        use_tqdm=use_tqdm,
    )


def _made_leaves(model: Model, make: Make, names: Sequence[str]) -> dict[str, Any]:
    """Arrays of an abstract model by their names; a parameter that parts share is made for each."""
    wanted, found = set(names), dict[str, Any]()
    for place, variable in nnx.to_flat_state(nnx.split(model)[1]):
        if wanted & _leaves_of(place, variable.get_value()).keys():
            found |= _leaves_of(place, make(place, variable))
    return {name: found[name] for name in names}


def restore_model(
    path: Path, model: Model, told: Callable[[int, int], Any], *, mapped: bool = False
) -> Model:
    """An abstract model with the arrays of a store, each straight to its devices.

    Args:
        path: of the store.
        model: from `abstract_model`: what is wanted, on which devices.
        told: how many bytes of its files have been read, and of how many.
        mapped: leave the arrays in the files; for one CPU device, whose arrays read them there.

    Raises:
        CheckpointError: the store is damaged, or of another model, or its arrays are to be `mapped`
            and are not as they are wanted.
    """
    from checkpoints.store.reader import restore_store

    record = read_record(path)
    architecture = record.about.get("architecture")
    if architecture != model.config.architecture:
        raise CheckpointError(
            path, f"it holds a {architecture}, and config.json is of {model.config.architecture}"
        )
    recorded = _recorded_formats(path)
    ordered = record.about.get("scales") == _SCALES
    for name, format in _formats(model).items():
        if name in recorded and recorded[name].parts != format.parts:
            problem = (
                f"packed for {recorded[name].parts} devices, not {format.parts}: convert again"
            )
            raise CheckpointError(path, problem, name)
        if not (ordered or format.in_blocks):
            problem = "its scales are in another order than kernels read: convert again"
            raise CheckpointError(path, problem, f"{name}.scale")
    wanted, stored = named_leaves(model), record.leaves()
    kept = {
        name: _stored_form(path, name, like, stored[name].dtype) if name in stored else like
        for name, like in wanted.items()
    }
    found = restore_store(path, wanted if mapped else kept, told, mapped=mapped)
    if mapped:
        # XLA:CPU takes an aligned NumPy array as it is, and a file is mapped to whole pages
        found = {
            name: jax.make_array_from_callback(like.shape, like.sharding, found[name].__getitem__)
            for name, like in wanted.items()
        }
    leaves = {name: _flipped(found.pop(name), like.dtype) for name, like in wanted.items()}
    return with_leaves(model, jax.block_until_ready(leaves))


def read_scales(path: Path, num_layers: int) -> KVScales | None:
    """Scales of the KV cache of a model folder, of safetensors or a store.

    Raises:
        CheckpointError: they are not those of this model.
    """
    if not is_store(path):
        return read_kv_scales(path, num_layers)
    scales = read_record(path).about.get("kv_scales")
    if scales is None:
        return None
    k, v = (tuple(float(x) for x in kind) for kind in scales)
    if len(k) != num_layers or len(v) != num_layers:
        raise CheckpointError(path, f"kv_scales of {len(k)} layers, the model has {num_layers}")
    return KVScales(k, v)


def stored_quantization(path: Path, asked: str | None) -> str | None:
    """The quantisation that a store was written with, which `asked` must not contradict.

    Raises:
        ValidationError: it does.
    """
    stored = read_record(path).about.get("quantization")
    if asked is not None and asked != stored:
        allowed = f"none, for the store {path} holds weights in their own type: convert it again"
        if stored is not None:
            allowed = f"{stored} or none, as the store {path} was written"
        raise ValidationError("quantization", asked, allowed)
    return None if stored is None else str(stored)


def holds_integers(path: Path) -> bool | None:
    """Whether native kernels are to read a store: only they can, or it is products of integers.

    None: no weight is quantised.
    """
    formats = _recorded_formats(path).values()
    if any(format.native and not format.is_channel8 for format in formats):
        return True
    if not formats:
        return None
    return all(
        format.stored.activations == "int8" and not format.stored.static for format in formats
    )


def stored_plan(path: Path, form: LinearForm) -> Plan:
    """How the weights of a store are kept, by their places in the module tree.

    Raises:
        CheckpointError: they are kept for other kernels than this device's.
    """
    plan: dict[Place, WeightFormat] = {}
    native = form.backend == "native"
    for name, format in _recorded_formats(path).items():
        if format.native != native and not format.is_channel8:
            problem = f"kept for other kernels than {form.backend}: convert again here"
            raise CheckpointError(path, problem, name)
        if form.experts == "mosaic_tpu" and format.experts and format.stored.kind == "int4":
            words = read_record(path).leaves()[f"{name}.values"].shape[-1] // format.parts
            if words % LENGTH_MULTIPLE:
                problem = (
                    f"rows of {words} words, and this device's kernel takes a multiple of "
                    f"{LENGTH_MULTIPLE}: convert again here"
                )
                raise CheckpointError(path, problem, name)
        place = tuple(int(x) if x.isdigit() else x for x in name.split("."))
        plan[place] = replace(format, native=native)
    return plan


def _recorded_formats(path: Path) -> dict[str, WeightFormat]:
    """Of the quantised weights of a store, by name."""
    try:
        return {
            name: WeightFormat(
                Encoding(**values["stored"]),
                bool(values["native"]),
                int(values.get("parts", 1)),
                experts=bool(values.get("experts", False)),
                words=int(values.get("words", PIECE)),
            )
            for name, values in read_record(path).about["weights"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"its record of weights is damaged ({error!r})") from error


def _formats(model: Model) -> dict[str, WeightFormat]:
    """Of the quantised weights of a model, by name."""
    found = {}
    for place, variable in nnx.to_flat_state(nnx.split(model)[1]):
        value = variable.get_value()
        if isinstance(value, QuantArray):
            found[".".join(map(str, place))] = value.format
    return found


def _key(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))


def _stored_form(path: Path, name: str, like: Any, stored: str) -> Any:
    """What to ask the store for: floats of the wanted type, integers as they are stored."""
    wanted = np.dtype(like.dtype).name
    if wanted == stored or (_is_float(like.dtype) and _is_float(jnp.dtype(stored))):
        return like
    if wanted in _EIGHT_BITS and stored in _EIGHT_BITS:
        return jax.ShapeDtypeStruct(like.shape, jnp.dtype(stored), sharding=like.sharding)
    problem = f"it holds {stored}, and this device's kernels take {wanted}: convert again on it"
    raise CheckpointError(path, problem, name)


def _is_float(dtype: Any) -> bool:
    return np.dtype(dtype).name in ("float32", "float16", "bfloat16")


def _flipped(found: jax.Array, dtype: Any) -> jax.Array:
    """8-bit integers in the other of their two forms: 128 more or less is the highest bit."""
    if found.dtype == dtype:
        return found
    bits = jax.jit(
        lambda x: jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, jnp.uint8) ^ jnp.uint8(128), dtype
        ),
        out_shardings=found.sharding,
        donate_argnums=0,
    )
    return bits(found)
