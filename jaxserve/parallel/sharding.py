"""Sharding rules: which mesh axis each logical axis of an array is split over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ValidationError


class ModelSizes(Protocol):
    """The sizes that have to divide over the mesh."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


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

        A vocabulary that does not divide is kept whole on every device.

        Raises:
            ValidationError: heads or the MLP cannot be split evenly over the mesh.
        """
        size = mesh.shape["model"]
        for noun, count in (
            ("attention heads", sizes.num_heads),
            ("key/value heads", sizes.num_kv_heads),
            ("intermediate dimensions", sizes.intermediate_size),
        ):
            if count % size:
                raise ValidationError(
                    "tensor_parallel_size", size, f"a divisor of the model's {count} {noun}"
                )
        return cls(vocab=None if sizes.vocab_size % size else "model")

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Partition spec of an array whose axes have these logical names (None: never split)."""
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))

    def sharding(self, mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
        """Sharding on `mesh` of an array whose axes have these logical names."""
        return NamedSharding(mesh, self.spec(axes))
