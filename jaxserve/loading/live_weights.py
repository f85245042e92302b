"""Other weights for an engine that serves: the same model, its programs stay compiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from checkpoints import CheckpointError
from jaxserve.errors import ValidationError
from jaxserve.loading.engine_build import load_stages
from jaxserve.loading.engine_plan import EnginePlan
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.models import Model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel.placement import HOST

logger = logging.getLogger(__name__)

FIELD = "weights"
# what of two configurations must be the same, beside the shapes of the tensors
COMPARED = (
    *("architecture", "num_layers", "num_heads", "head_dim", "vocab_size", "hidden_act"),
    *("rms_norm_eps", "attention_scale", "attention_soft_cap", "windows", "rope"),
)
MOST_SHOWN = 4  # parameters that an error names


def weights_of_folder(path: str | PathLike[str], decided: EnginePlan, mesh: Mesh) -> list[Model]:
    """The weights of a folder of the same architecture and shape, see `load_stages`.

    Raises:
        ValidationError: another model, weights that cannot be read, or an engine that reads images.
    """
    said, asked = str(path), decided.config.asked
    if decided.has_encoder:
        allowed = "a folder only where limit_mm_per_prompt is 0: the images' encoder would stay old"
        raise ValidationError(FIELD, said, allowed)
    try:
        config = read_model_config(said, asked.hf_overrides)
        for name in COMPARED:
            mine, its = getattr(decided.model, name), getattr(config, name)
            if mine != its:
                raise ValidationError(FIELD, said, f"weights of this model, whose {name} is {mine}")
        asked = replace(asked, load_format="auto")
        plan = replace(decided, model_path=said, config=replace(decided.config, asked=asked))
        return load_stages(plan, mesh, LoadProgress(logger.info, shown=False))
    except CheckpointError as error:
        raise ValidationError(FIELD, said, f"weights of this model: {error}") from error


def weights_of_tree(given: Mapping[str, Any], model: Model) -> Model:
    """A model with the parameters of a pytree, as `LLM.params` has them.

    Numbers of another float type are converted to the parameter's; each array goes where the
    parameter is.

    Args:
        given: nested mappings of arrays.
        model: that serves now.

    Raises:
        ValidationError: names what is missing, is not of this model or has another shape or type.
    """
    graph, state = nnx.split(model)
    own = dict(nnx.to_flat_state(state))
    if any(isinstance(variable.get_value(), QuantArray) for variable in own.values()):
        allowed = "a folder: this engine keeps its weights quantised"
        raise ValidationError(FIELD, "a pytree", allowed)
    if not isinstance(given, Mapping):
        raise ValidationError(FIELD, type(given).__name__, "a folder, or mappings as llm.params")
    flat = _flat(given)
    names = {".".join(map(str, place)): place for place in own}
    missing, unexpected = [*names.keys() - flat.keys()], [*flat.keys() - names.keys()]
    wrong = [
        f"{name} is {_kind(flat[name])}, not {_kind(own[place].get_value())}"
        for name, place in names.items()
        if name in flat and not _fits(flat[name], own[place].get_value())
    ]
    if missing or unexpected or wrong:
        told = [
            f"{what}: {', '.join(sorted(some)[:MOST_SHOWN])}" + (", ..." * (len(some) > MOST_SHOWN))
            for what, some in (("missing", missing), ("unknown", unexpected), ("wrong", wrong))
            if some
        ]
        raise ValidationError(
            FIELD, "a pytree", f"the parameters of this model ({'; '.join(told)})"
        )
    placed = []
    for name, place in names.items():
        like = own[place].get_value()
        # what stays on the host may be more than the device has room for
        on_host = like.sharding.memory_kind == HOST
        value = (np if on_host else jnp).asarray(flat[name], like.dtype)
        # the caller may donate or change its own
        value = jax.device_put(value, like.sharding, may_alias=False)
        placed.append((place, own[place].replace(value)))
    made: Model = nnx.merge(graph, nnx.from_flat_state(placed))
    return jax.block_until_ready(made)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Arrays by their names, "blocks.0.mlp.down.weight"."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _fits(value: Any, like: Any) -> bool:
    shape, kind = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != like.shape or kind is None:
        return False
    return bool(jnp.issubdtype(kind, jnp.floating) or kind == like.dtype)


def _kind(value: Any) -> str:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}{[*value.shape]}"
