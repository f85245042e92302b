"""Arrays of the host on a mesh, and back, whose devices may be those of several processes.

Every process has the whole of a host's array and gives its own devices their parts.
`jax.device_put` would compare the array over all processes first, by a program of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

Index = tuple[slice, ...]
HOST = "pinned_host"  # JAX's name of the host's memory that a device reads


def placed(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array of the host on the devices of a sharding; every process gives the same numbers."""
    if sharding.is_fully_addressable:
        put: jax.Array = jax.device_put(value, sharding)
        return put
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


class HostCopy:
    """The parts of an array that this process's devices have, in the host's memory.

    Args:
        array: the array; it may be deleted afterwards.
    """

    def __init__(self, array: jax.Array):
        self._shape, self._sharding = array.shape, array.sharding
        shards = {_key(shard.index): shard.data for shard in array.addressable_shards}
        self._parts = {key: np.array(data) for key, data in shards.items()}

    def on_devices(self) -> jax.Array:
        """The array again."""
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._parts[_key(index)]
        )


def put_away(
    arrays: Sequence[jax.Array], *, keep: bool
) -> tuple[tuple[Any, ...], list[HostCopy | None] | None]:
    """Free arrays on their devices; returns their shapes with their shardings, and copies.

    Args:
        arrays: are deleted.
        keep: have copies of them in the host's memory; else None is returned in their place.
            What is in the host's memory already stays where it is, without a copy.
    """
    left: list[Any] = []
    kept: list[HostCopy | None] = []
    for array in arrays:
        if keep and array.sharding.memory_kind == HOST:
            left.append(array)
            kept.append(None)
            continue
        left.append(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding))
        if keep:
            kept.append(HostCopy(array))
        array.delete()
    return tuple(left), kept if keep else None


def taken_back(left: Sequence[Any], kept: Sequence[HostCopy | None]) -> tuple[jax.Array, ...]:
    """The arrays that `put_away` has kept, on their devices again."""
    both = zip(left, kept, strict=True)
    return tuple(one if copy is None else copy.on_devices() for one, copy in both)


def _key(index: Index | None) -> tuple[Any, ...]:
    return tuple((one.start, one.stop) for one in index or ())
