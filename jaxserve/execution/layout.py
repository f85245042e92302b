"""Dataclasses of arrays laid into one flat int32 array, by the shapes in their declarations.

A step takes everything that changes from the host in ONE array, because every further array from
the host costs a compiled call tens of microseconds; its result comes back as one too. Floats and
unsigned words travel as their bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def array(*axes: str | int, dtype: str = "int32") -> Any:
    """Declares a field of a dataclass as an array.

    Args:
        axes: sizes, or names of sizes that the layout is given.
        dtype: "int32", "uint32" or "float32".
    """
    return dataclasses.field(metadata={"axes": axes, "dtype": dtype})


@dataclass_transform(field_specifiers=(array,))
def arrays(kind: type[T]) -> type[T]:
    """Makes a class of fields declared by `array` a dataclass that JAX takes apart.

    It is not frozen: one is made a step, and a frozen one takes twice as long.
    """
    made = dataclasses.dataclass(slots=True)(kind)
    return jax.tree_util.register_dataclass(made)


class Place(NamedTuple):
    """Where one array lies."""

    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Layout(Generic[T]):
    """The places of the arrays of one dataclass, one behind the other.

    Args:
        kind: made by `arrays`.
        sizes: of the axes that the declarations name.
        offset: of the first array.
    """

    def __init__(self, kind: type[T], sizes: Mapping[str, int], offset: int = 0):
        self.kind = kind
        self.places: dict[str, Place] = {}
        self.end = offset
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            axes = field.metadata["axes"]
            shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in axes)
            dtype = np.dtype(field.metadata["dtype"])
            self.places[field.name] = Place(self.end, math.prod(shape), shape, dtype)
            self.end += self.places[field.name].size
        # once a step each: what need not be done is not, and arrays of nothing are made here
        self._views = [
            (
                slice(place.offset, place.offset + place.size),
                None if place.dtype == np.int32 else place.dtype,
                None if len(place.shape) == 1 else place.shape,
                None if place.size else np.zeros(place.shape, place.dtype),
            )
            for place in self.places.values()
        ]

    def views(self, flat: np.ndarray) -> T:
        """The arrays of a NumPy int32 array, in place."""
        arrays = []
        for part, dtype, shape, nothing in self._views:
            if nothing is not None:
                arrays.append(nothing)
                continue
            array = flat[part]
            if dtype is not None:
                array = array.view(dtype)
            arrays.append(array if shape is None else array.reshape(shape))
        return self.kind(*arrays)

    def abstract(self) -> T:
        """Shapes and types of the arrays."""
        places = self.places.values()
        return self.kind(*(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in places))

    def read(self, flat: jax.Array) -> T:
        """The arrays of a traced int32 array."""
        return self.kind(
            **{
                name: jax.lax.bitcast_convert_type(flat[offset : offset + size], dtype).reshape(
                    shape
                )
                for name, (offset, size, shape, dtype) in self.places.items()
            }
        )

    def cut(self, value: T, axis: str, count: int) -> T:
        """`value` with the first `count` entries of the fields whose first axis is `axis`."""
        found = {}
        for field in dataclasses.fields(self.kind):  # type: ignore[arg-type]
            part = getattr(value, field.name)
            found[field.name] = part[:count] if field.metadata["axes"][:1] == (axis,) else part
        return self.kind(**found)

    def parts(self, value: T) -> list[jax.Array]:
        """The traced arrays of `value`, of the declared shapes, as flat int32 arrays."""
        found = (getattr(value, name) for name in self.places)
        return [jax.lax.bitcast_convert_type(one, jnp.int32).reshape(-1) for one in found]


class RowTable:
    """The scalars that each row has, of several dataclasses, as columns of one int32 table.

    Args:
        kinds: by name one made by `arrays`, of fields without axes.
    """

    def __init__(self, kinds: Mapping[str, type]):
        self.kinds = dict(kinds)
        self.columns: dict[str, dict[str, tuple[int, np.dtype]]] = {}
        self.width = 0
        for name, kind in self.kinds.items():
            self.columns[name] = {}
            for field in dataclasses.fields(kind):
                self.columns[name][field.name] = (self.width, np.dtype(field.metadata["dtype"]))
                self.width += 1

    def places_in(self, other: RowTable) -> slice | np.ndarray:
        """Where its columns are among those of a table that has all of its dataclasses."""
        found = [other.columns[name][field][0] for name, of in self.columns.items() for field in of]
        if found == [*range(self.width)]:
            return slice(self.width)
        return np.array(found, np.intp)

    def write(self, row: np.ndarray, name: str, value: Any) -> None:
        """Write the scalars of one of the dataclasses into an int32[width] row."""
        for field, (column, dtype) in self.columns[name].items():
            row[column] = np.array(getattr(value, field), dtype).view(np.int32)

    def read(self, table: jax.Array) -> dict[str, Any]:
        """The dataclasses of a traced int32[R, width] table, their fields arrays [R]."""
        return {
            name: kind(
                **{
                    field: jax.lax.bitcast_convert_type(table[:, column], dtype)
                    for field, (column, dtype) in self.columns[name].items()
                }
            )
            for name, kind in self.kinds.items()
        }
