"""Sharding rules: which mesh axis each logical axis of an array is split over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ValidationError


class ModelSizes(Protocol):
    """The sizes that have to divide over the mesh."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def inner_sizes(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...


def check_divides(devices: int, sizes: ModelSizes) -> None:
    """Raises ValidationError unless a model can be shared by so many devices.

    Fewer KV heads than devices have been repeated.
    """
    for noun, count in (
        ("attention heads", sizes.num_heads),
        *(("intermediate dimensions", size) for size in sizes.inner_sizes),
    ):
        if count % devices:
            raise ValidationError(
                "tensor_parallel_size", devices, f"a divisor of the model's {count} {noun}"
            )
    if sizes.num_kv_heads % devices:
        raise ValidationError(
            "tensor_parallel_size",
            devices,
            f"a divisor or a multiple of the model's {sizes.num_kv_heads} key/value heads",
        )


@dataclass(frozen=True, slots=True)
class ShardingRules:
    """Logical axis name -> mesh axis, None where the axis is whole on every device.

    The names of the fields are the logical axes; arrays name their axes by them.

    Attributes:
        vocab: rows of the embedding table and of the lm head.
        hidden: the residual stream.
        kv_heads: key/value heads, each with its group of query heads (fused qkv, KV pages).
        heads: the flattened query heads that the output projection contracts.
        intermediate: the MLP's inner axis.
    """

    vocab: str | None = "model"
    hidden: str | None = None
    kv_heads: str | None = "model"
    heads: str | None = "model"
    intermediate: str | None = "model"

    @classmethod
    def for_model(cls, mesh: Mesh, sizes: ModelSizes) -> ShardingRules:
        """Returns the rules of a model on a mesh; `sizes` is the model's config.

        A vocabulary that does not divide is kept whole on every device. Fewer KV heads than devices
        have been repeated (`ModelConfig.spread_over`).

        Raises:
            ValidationError: heads or the MLP cannot be split evenly over the mesh.
        """
        size = mesh.shape["model"]
        check_divides(size, sizes)
        return cls(vocab=None if sizes.vocab_size % size else "model")

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Partition spec of an array whose axes have these logical names (None: never split)."""
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))

    def specs(self, mesh: Mesh, variable: Any) -> Any:
        """Partition spec of each array of a parameter, whose axes have the names of its metadata
        `logical_axes`; a value of several arrays says which of them each has (`leaf_axes`), and an
        axis of one that does not divide is whole on every device."""
        axes, value = variable.get_metadata("logical_axes"), variable.get_value()
        if not hasattr(value, "leaf_axes"):
            return self.spec(axes)
        leaves, tree = jax.tree.flatten(value)

        def divided(leaf: Any, names: tuple[str | None, ...]) -> PartitionSpec:
            named = zip(leaf.shape, names, strict=True)
            kept = [None if size % mesh.shape["model"] else name for size, name in named]
            return self.spec(kept)

        return jax.tree.unflatten(tree, map(divided, leaves, value.leaf_axes(axes)))

    def shardings(self, mesh: Mesh, variable: Any) -> Any:
        """The same as shardings on a mesh."""
        return jax.tree.map(partial(NamedSharding, mesh), self.specs(mesh, variable))

    def abstract(self, mesh: Mesh, make: Callable[[], Any]) -> Any:
        """The module that `make` makes, its parameters as `jax.ShapeDtypeStruct`s with shardings.

        Nothing is allocated.
        """

        def placed(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        graph, state = nnx.split(nnx.eval_shape(make))
        filled = []
        for place, variable in nnx.to_flat_state(state):
            value = jax.tree.map(placed, variable.get_value(), self.shardings(mesh, variable))
            filled.append((place, variable.replace(value)))
        return nnx.merge(graph, nnx.from_flat_state(filled))
