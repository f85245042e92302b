"""Layers whose weights stay in the host's memory, from where a step brings them one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.errors import ValidationError
from jaxserve.models.protocol import AtLayer, Cache, Looped
from jaxserve.models.sources import Place
from jaxserve.parallel.placement import HOST, placed

FIELD = "cpu_offload_gb"
# of its weights these stay on the host; the others, vectors and routers, are few
ROLES = ("linear", "experts")
HELD = 4  # layers that the device may have at once: of two turns, as a compiler may order them


class StreamedBlocks(nnx.Module):
    """The last layers of a model, alike, in one loop.

    Each parameter of `block` has a first axis of so many layers; those with one of ROLES lie in the
    host's memory. While a layer is computed the next one's weights are on their way: the
    loop has two in its body, so that each has a place of its own.

    Args:
        block: of the first of them; parameters as above.
        first: its number in the model.
        count: how many there are.
    """

    def __init__(self, block: Any, first: int, count: int):
        self.block = block
        self.first, self.count = first, count

    def __call__(
        self, x: jax.Array, cache: Cache, at: Callable[[Looped], AtLayer[Cache]]
    ) -> tuple[jax.Array, Cache]:
        """x [T, E] and the cache through all of its layers; `at` tells each what it is told."""
        graph, stacks = nnx.split(self.block)
        last = self.count - 1

        def fetch(row: Any) -> Any:
            def part(stack: jax.Array) -> jax.Array:
                own = lax.dynamic_index_in_dim(stack, row, keepdims=False)
                return jax.device_put(own, jax.memory.Space.Device)

            return jax.tree.map(part, stacks)

        def run(row: Any, weights: Any, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            layer = Looped(self.first, self.first + row)
            through: tuple[jax.Array, Cache] = nnx.merge(graph, weights)(x, cache, at(layer))
            return through

        def pair(turn: Any, carry: Any) -> Any:
            x, cache, weights = carry
            following = fetch(2 * turn + 1)
            x, cache = run(2 * turn, weights, x, cache)
            weights = fetch(2 * turn + 2)
            return *run(2 * turn + 1, following, x, cache), weights

        x, cache, weights = lax.fori_loop(0, last // 2, pair, (x, cache, fetch(0)))
        if last % 2 == 0:
            return run(last, weights, x, cache)
        following = fetch(last)
        x, cache = run(last - 1, weights, x, cache)
        return run(last, following, x, cache)


def streamed_layers(model: Any, gib: float) -> int:
    """How many of a model's last layers stay on the host so that so many GiB do, or all.

    Args:
        model: with its parameters or their shapes, none of them streamed yet.
        gib: a byte at least.

    Raises:
        ValidationError: its layers are not alike.
    """
    _require_alike(model, FIELD, gib)
    layers = math.ceil(int(gib * 2**30) / streamed_bytes(model.blocks[0]))
    return min(len(model.blocks), layers)


def streamed_bytes(module: Any) -> int:
    """Bytes of a module's parameters that stay on the host where it is streamed."""
    return sum(
        leaf.size * leaf.dtype.itemsize
        for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
        if variable.get_metadata("role") in ROLES
        for leaf in jax.tree.leaves(variable.get_value())
    )


def largest_parameters(model: Any, number: int) -> int:
    """Bytes of so many of the largest parameters of a layer.

    Those of all streamed layers are in the host's memory twice while they are loaded.
    """
    sizes = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(variable.get_value()))
        for _, variable in nnx.to_flat_state(nnx.state(model.blocks[0], nnx.Param))
    ]
    return sum(sorted(sizes)[-number:])


def with_streamed(model: Any, count: int) -> Any:
    """A model of abstract parameters whose last layers, so many of them, are `StreamedBlocks`.

    Raises:
        ValidationError: its layers are not alike.
    """
    blocks = list(model.blocks)
    _require_alike(model, "streamed", count)
    first = len(blocks) - count
    graph, state = nnx.split(blocks[first])

    def stacked(variable: Any) -> Any:
        kind = HOST if variable.get_metadata("role") in ROLES else None

        def stack(leaf: Any) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec(None, *leaf.sharding.spec)
            where = NamedSharding(leaf.sharding.mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=where)

        return variable.replace(jax.tree.map(stack, variable.get_value()))

    flat = [(place, stacked(variable)) for place, variable in nnx.to_flat_state(state)]
    model.blocks = nnx.List(blocks[:first])
    model.streamed = StreamedBlocks(nnx.merge(graph, nnx.from_flat_state(flat)), first, count)
    return model


def of_layers(model: Any, place: Place, variable: Any, make: Callable[[Place, Any], Any]) -> Any:
    """The value of a parameter of `model.streamed`, of what `make` gives for each of its layers.

    Args:
        model: of abstract parameters.
        place: of the parameter in it.
        variable: its shapes.
        make: for the place of a layer's parameter and its shapes, the value on the device.
    """
    first, (_, _, *of_block) = model.streamed.first, place
    stacks, tree = jax.tree.flatten(variable.get_value())
    held = [np.empty(stack.shape, stack.dtype) for stack in stacks]

    def alone(stack: Any) -> jax.ShapeDtypeStruct:
        where = NamedSharding(stack.sharding.mesh, PartitionSpec(*stack.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=where)

    one = variable.replace(jax.tree.map(alone, variable.get_value()))
    for row in range(model.streamed.count):
        made = jax.tree.leaves(make(("blocks", first + row, *of_block), one))
        for whole, part in zip(held, made, strict=True):
            whole[row] = np.asarray(part)
    return jax.tree.unflatten(
        tree, [placed(x, stack.sharding) for x, stack in zip(held, stacks, strict=True)]
    )


def _require_alike(model: Any, field: str, value: float) -> None:
    """Raises ValidationError, which names the field, unless one program computes each layer."""
    config, blocks = model.config, list(model.blocks)
    windows = {config.layer_window(layer) for layer in range(config.num_layers)}
    kinds = {
        (graph, jax.tree.structure(state), *((x.shape, x.dtype) for x in jax.tree.leaves(state)))
        for graph, state in map(nnx.split, blocks)
    }
    if len(windows) > 1 or len(config.ropes) > 1 or len(kinds) > 1:
        allowed = f"none for {config.architecture} of layers that differ: one loop has all"
        raise ValidationError(field, value, allowed)
