"""The model's parameters as operands of a step: flat arrays, and few of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.models.protocol import Model


@dataclass(frozen=True)
class ModelStructure:
    """How to get the module back from its operands, inside a traced step.

    Attributes:
        module_def: static part of the Flax module.
        treedef: tree of its parameters.
        places: for each parameter the index of its operand, and its row there if it is stacked.
    """

    module_def: Any
    treedef: Any
    places: tuple[tuple[int, int | None], ...]

    def merge(self, operands: tuple[jax.Array, ...]) -> Model:
        leaves = [
            operands[index] if row is None else operands[index][row] for index, row in self.places
        ]
        model: Model = nnx.merge(self.module_def, jax.tree.unflatten(self.treedef, leaves))
        return model


def split_model(model: Model) -> tuple[ModelStructure, tuple[jax.Array, ...]]:
    """The module as its structure and its parameters, arrays or `jax.ShapeDtypeStruct`s.

    Vectors of one kind (the norm weights of all layers) become the rows of one array, because a
    compiled call costs the host up to half a microsecond for each operand. A row is read inside
    the fusion that uses it. Matrices stay apart: a slice of a stack would be copied; and so do the
    vectors where a kernel that is not XLA's takes them, for the same reason.
    """
    form = model.form
    takes_vectors = form.residual_norm is not None or (form.qkv_in_parts and model.config.qk_norm)
    module_def, params = nnx.split(model)
    leaves, treedef = jax.tree.flatten(params)
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        is_stacked = leaf.ndim == 1 and not takes_vectors
        kinds[(leaf.shape, leaf.dtype, leaf.sharding) if is_stacked else index].append(index)
    operands: list[Any] = []
    places: dict[int, tuple[int, int | None]] = {}
    for members in kinds.values():
        is_stack = len(members) > 1
        for row, member in enumerate(members):
            places[member] = (len(operands), row if is_stack else None)
        arrays = [leaves[member] for member in members]
        operands.append(_stack(arrays) if is_stack else arrays[0])
    structure = ModelStructure(module_def, treedef, tuple(places[i] for i in range(len(leaves))))
    return structure, tuple(operands)


def _stack(vectors: list[Any]) -> Any:
    """Vectors [E] of one type and sharding -> [N, E]; each row placed as the vectors were."""
    first = vectors[0]
    sharding = first.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(vectors), *first.shape), first.dtype, sharding=sharding)
    if not sharding.is_fully_addressable:  # no process has them whole
        stacked: jax.Array = jax.jit(jnp.stack, out_shardings=sharding)(vectors)
        return stacked
    return jax.device_put(np.stack(vectors), sharding)
