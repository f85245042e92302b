"""Fills a model: from a checkpoint, or with random weights made on the device.

Every parameter goes straight to device arrays with their sharding, a few at a time, and each device
is given only the slice that it holds. A CPU device keeps the memory that the slice was read into.
Weights that are quantised are never whole in a wider type: each is in memory once.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from checkpoints import CheckpointError, TensorMismatchError
from checkpoints.quantized import Checkpoint
from checkpoints.quantized_formats import open_checkpoint
from checkpoints.store import is_store
from jaxserve.config.engine_config import LOAD_FORMATS
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.models.dummy import constant, dummy_array, dummy_quantized
from jaxserve.models.kv_scales import is_kv_scale
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.protocol import Model
from jaxserve.models.quant_array import QuantArray, WeightFormat
from jaxserve.models.quantize import read_quantized
from jaxserve.models.registry import family_of
from jaxserve.models.sources import Place
from jaxserve.models.store import Make, restore_model
from jaxserve.models.streamed import of_layers, with_streamed
from jaxserve.models.weight_plan import Plan, plan_weights, source_place
from jaxserve.parallel.mesh import is_divided
from jaxserve.parallel.sharding import ShardingRules
from jaxserve.parallel.spread import Spread
from jaxserve.parallel.stages import Stage

logger = logging.getLogger(__name__)

MOST_LOADING_THREADS = 2

NO_STORE = "no store, whose files can be mapped; `jaxserve convert MODEL OUT` makes one"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_ROWS = 1024  # of head and embedding, at a time

# Buffers that old checkpoints stored although they follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    mesh: Mesh,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    form: LinearForm = PLAIN_LINEAR,
    plan: Plan | None = None,
    mapped: bool = False,
    stage: Stage | None = None,
    streamed: int = 0,
    told: Callable[[int, int], Any] = lambda done, total: None,
) -> Model:
    """Returns the model with its parameters on the devices of `mesh`.

    Args:
        path: model folder in Hugging Face format, or a GGUF file; not looked at for load_format
            "dummy".
        config: the model's config.
        mesh: from `jaxserve.parallel.make_mesh`.
        dtype: type of the parameters, whatever the checkpoint's is; "auto" takes the config's.
        load_format: "auto" reads a store or else safetensors, "safetensors" and "orbax" that
            alone; "dummy" makes random weights (`jaxserve.models.dummy`), alike on every mesh but
            where KV heads are repeated, which are heads of their own; norms do nothing and biases
            are 0.
        seed: of the dummy weights.
        form: how the linear layers keep and multiply their weights.
        plan: of the quantised weights; None: what `plan_weights` says.
        mapped: leave the weights of a store in its files.
        stage, streamed: see `abstract_model`; of no store.
        told: how many bytes of the weights are there, and of how many, as it goes.

    Raises:
        ValidationError: unknown dtype or load_format, or sizes that do not divide over the mesh.
        CheckpointError: a file is missing or damaged, or no store's where weights are to be
            `mapped`.
        TensorMismatchError: tensors are missing, unexpected or of wrong shape (all are listed).
    """
    resolved = resolve_dtype(dtype, config)
    if load_format not in LOAD_FORMATS:
        raise ValidationError("load_format", load_format, f"one of {', '.join(LOAD_FORMATS)}")
    if load_format == "orbax" or (load_format == "auto" and is_store(path)):
        model = abstract_model(config, mesh, resolved, form, plan)
        return restore_model(Path(path), model, told, mapped=mapped)
    if mapped:
        raise CheckpointError(Path(path), f"its weights are not mapped: it is {NO_STORE}")
    if load_format == "dummy":
        model = abstract_model(config, mesh, resolved, form, plan, stage, streamed)
        return _filled(model, partial(_dummy, seed, config), told)
    given: dict[str, Any] = {"form": form, "plan": plan, "stage": stage, "streamed": streamed}
    with opened_model(path, config, mesh=mesh, dtype=resolved, **given) as (model, make):
        return _filled(model, make, told)


@contextmanager
def opened_model(
    path: str | Path,
    config: ModelConfig,
    *,
    mesh: Mesh,
    dtype: str,
    form: LinearForm = PLAIN_LINEAR,
    plan: Plan | None = None,
    stage: Stage | None = None,
    streamed: int = 0,
) -> Iterator[tuple[Model, Make]]:
    """The shapes of a checkpoint's model, and what reads one of its parameters while it is open.

    Args, Raises: see `load_model`; safetensors or a GGUF file, and a `dtype` that is not "auto".
    """
    with open_checkpoint(path) as checkpoint:
        config = with_stored_head(config, checkpoint)
        check_tensors(checkpoint, config)
        passed = _passed_over(checkpoint, config)
        if passed and family_of(config).encoding is None:
            logger.info("images are not read: %d tensors of %s are passed over", *passed)
        if plan is None:
            plan = plan_weights(config, form, dtype, checkpoint)
        model = abstract_model(config, mesh, dtype, form, plan, stage, streamed)
        yield model, partial(_read, checkpoint, config, jnp.dtype(dtype))


def with_stored_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The config of a checkpoint that has an lm head although `tie_word_embeddings` is true.

    As in transformers the head is taken where its numbers are not those of the embedding, which a
    log line tells.
    """
    names = (_HEAD, _EMBEDDING)
    if not config.tie_word_embeddings or not set(names) <= set(checkpoint.tensors):
        return config
    head, embedding = (checkpoint.tensors[name].shape for name in names)
    if head == embedding and len(head) == 2:
        for at in range(0, head[0], _COMPARED_ROWS):
            rows = slice(at, at + _COMPARED_ROWS)
            size = (len(range(*rows.indices(head[0]))), head[1])
            blocks = [np.empty(size, np.float32) for _ in names]
            for name, block in zip(names, blocks, strict=True):
                checkpoint.read_into(name, (rows,), block)
            if not np.array_equal(blocks[0], blocks[1]):
                break
        else:
            return config
    logger.warning(
        "tie_word_embeddings is true, but %s is in the checkpoint and is not %s: it is taken",
        *names,
    )
    return replace(config, tie_word_embeddings=False)


def check_tensors(reader: Checkpoint, config: ModelConfig) -> None:
    """Compares the names and shapes of a checkpoint with those that the config implies.

    Raises:
        TensorMismatchError: they differ; lists every difference at once.
    """
    family = family_of(config)
    expected: dict[str, tuple[int, ...]] = {}
    model = nnx.eval_shape(lambda: family.model(config, config.dtype))
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        source, is_matrix = family.source(place, config), variable.get_metadata("fill") is None
        expected |= source.tensors(variable.get_value().shape, is_matrix)
    found = {name: info.shape for name, info in reader.tensors.items()}
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected
        and not _HARMLESS.search(name)
        and not is_kv_scale(name)
        and not name.startswith(family.passed_over)
        and name not in reader.zero_biases
        and not (name == _HEAD and config.tie_word_embeddings)
    ]
    wrong = {
        name: (shape, found[name])
        for name, shape in expected.items()
        if name in found and found[name] != shape
    }
    if missing or unexpected or wrong:
        raise TensorMismatchError(reader.path, missing, sorted(unexpected), wrong)


def _passed_over(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, str] | None:
    """How many tensors belong to parts of the model that are not served, and to which."""
    prefixes = family_of(config).passed_over
    modules = [p for name in checkpoint.tensors for p in prefixes if name.startswith(p)]
    found = ", ".join(prefix.rstrip(".") for prefix in prefixes if prefix in modules)
    return (len(modules), found) if modules else None


def abstract_model(
    config: ModelConfig,
    mesh: Mesh,
    dtype: str,
    form: LinearForm,
    plan: Plan | None = None,
    stage: Stage | None = None,
    streamed: int = 0,
) -> Model:
    """The model with the shapes, types and shardings of its parameters, and no memory for them.

    `plan` is of the quantised weights; None: that of a checkpoint that is not quantised. Of a
    `stage`, whose mesh it is on, the parameters that others hold are None. The weights of so many
    of the last layers as are `streamed` stay on the host (`with_streamed`).

    Raises:
        ValidationError: sizes that do not divide over the mesh, or layers to stream that differ.
    """
    if plan is None:
        plan = plan_weights(config, form, dtype, None)
    rules = ShardingRules.for_model(mesh, config)
    if is_divided(mesh.size):
        form = replace(form, spread=Spread(mesh, rules))

    def make() -> Any:
        graph, state = nnx.split(family_of(config).model(config, dtype, form))
        flat = nnx.to_flat_state(state)
        kept = [
            (place, _planned(variable, plan.get(place), form.spread)) for place, variable in flat
        ]
        return nnx.merge(graph, nnx.from_flat_state(kept))

    model: Model = rules.abstract(mesh, make)
    if streamed:
        model = with_streamed(model, streamed)
    return model if stage is None else _of_stage(model, stage)


def _of_stage(model: Model, stage: Stage) -> Model:
    """A model without the parameters that other stages hold."""
    is_tied = model.config.tie_word_embeddings
    graph, state = nnx.split(model)
    kept = [
        (place, variable if stage.holds(place, is_tied=is_tied) else variable.replace(None))
        for place, variable in nnx.to_flat_state(state)
    ]
    part: Model = nnx.merge(graph, nnx.from_flat_state(kept))
    return part


def _planned(variable: Any, format: WeightFormat | None, spread: Spread | None) -> Any:
    """A parameter as the plan keeps it, on one device or spread over several.

    Raises:
        ValidationError: its stored elements cannot be divided as its axes are.
    """
    if format is None:
        return variable
    is_expert = variable.get_metadata("role") == "experts"
    format = replace(format, experts=is_expert)
    if spread is not None:
        axes, shape = variable.get_metadata("logical_axes"), variable.get_value().shape
        if spread.divides(axes[-1]):
            format = format.divided(shape[-1], spread.devices)
        elif any(map(spread.divides, axes[:-1])):
            outputs = shape[-2] if is_expert else math.prod(shape[:-1])
            format = format.with_divided_outputs(outputs, spread.devices, experts=is_expert)
    return variable.replace(QuantArray.empty(variable.get_value().shape, format))


def _filled(model: Model, make: Make, told: Callable[[int, int], Any]) -> Model:
    """An abstract model with the values that `make` gives for each of its parameters."""
    graph, state = nnx.split(model)

    def fill(item: tuple[Place, Any]) -> tuple[Place, Any]:
        place, variable = item
        if variable.get_value() is None:
            return item
        if place[0] == "streamed":
            made = of_layers(model, place, variable, make)
        else:
            made = make(place, variable)
        return place, variable.replace(jax.block_until_ready(made))

    # as many parameters are under way as there are threads, so that host memory stays bounded
    flat = nnx.to_flat_state(state)
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(v)) for _, v in flat]
    filled, done = [], 0
    with ThreadPoolExecutor(MOST_LOADING_THREADS) as pool:
        for item, size in zip(pool.map(fill, flat), sizes, strict=True):
            filled.append(item)
            done += size
            told(done, sum(sizes))
    loaded: Model = nnx.merge(graph, nnx.from_flat_state(filled))
    return loaded


def _dummy(seed: int, config: ModelConfig, place: Place, variable: Any) -> Any:
    """Random values of a parameter."""
    wanted, fill = variable.get_value(), variable.get_metadata("fill")
    if fill is not None:
        return constant(fill, wanted)
    place = source_place(place, config)
    if isinstance(wanted, QuantArray):
        return dummy_quantized(seed, place, wanted)
    return dummy_array(seed, place, wanted)


def _read(
    checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype, place: Place, variable: Any
) -> Any:
    """A parameter from its tensors."""
    wanted, is_matrix = variable.get_value(), variable.get_metadata("fill") is None
    source = family_of(config).source(source_place(place, config), config)
    if isinstance(wanted, QuantArray):
        return jax.tree.map(
            lambda array, like: jax.make_array_from_callback(
                array.shape, like.sharding, array.__getitem__
            ),
            read_quantized(source, checkpoint, wanted),
            wanted,
        )

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        whole = (slice(None),) * len(wanted.shape)
        return source.read(checkpoint, wanted.shape, index or whole, dtype, is_matrix)

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, read)
