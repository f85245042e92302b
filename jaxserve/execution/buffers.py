"""Arrays of features on the device, which the host replaces row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxserve.execution.features import Buffer, Feature
from jaxserve.parallel.placement import placed

MOST_BYTES = 1 << 22  # of rows that one call writes, if one row is not longer
FEW_ROWS = 4  # of the calls that write little
WIDTHS = (1, 2, 4)  # bytes of a number
HEAD = 2  # words before the rows: the first row, and how many


class RowsProgram:
    """Writes some rows of one feature's arrays: a program beside the step.

    Args:
        feature: its name.
        shapes: of the arrays, which have an axis of rows first, with their shardings.
        most: rows that a call writes at most; None: as many as MOST_BYTES are.
    """

    def __init__(self, feature: str, shapes: Any, most: int | None = None):
        self.shapes = shapes
        self._leaves = jax.tree.leaves(shapes)
        self._words = [_words(leaf) for leaf in self._leaves]  # of a row of each
        most = most or max(1, MOST_BYTES // (4 * sum(self._words)))
        self.num_rows = min(most, self._leaves[0].shape[0])
        self.name = f"{self.num_rows} rows of {feature}"
        self.size = HEAD + self.num_rows * sum(self._words)

    def run(self, arrays: Any, blob: jax.Array) -> Any:
        """The arrays with the rows written; traced."""
        place = jnp.arange(self.num_rows)
        begin, leaves = HEAD, []
        for leaf, words in zip(jax.tree.leaves(arrays), self._words):
            flat = blob[begin : begin + self.num_rows * words].reshape(self.num_rows, words)
            begin += self.num_rows * words
            # a row that is not written names one that does not exist
            rows = jnp.where(place < blob[1], blob[0] + place, leaf.shape[0])
            leaves.append(leaf.at[rows].set(_typed(flat, leaf), mode="drop"))
        return jax.tree.unflatten(jax.tree.structure(arrays), leaves)

    def check(self, start: int, arrays: Any) -> int:
        """How many rows are given.

        Raises:
            ValueError: other shapes or types than those of the arrays, or rows beyond their end.
        """
        given = [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]
        counts = {leaf.shape[0] for leaf in given if leaf.ndim}
        wanted = [(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in self._leaves]
        found = [(leaf.shape[1:], leaf.dtype) for leaf in given]
        trees: list[Any] = [jax.tree.structure(one) for one in (arrays, self.shapes)]
        if trees[0] != trees[1] or wanted != found or len(counts) != 1 or start < 0:
            raise ValueError(f"{self.name} are {wanted}, not {found}")
        (count,) = counts
        if start + count > self._leaves[0].shape[0]:
            raise ValueError(f"{self.name} end before row {start + count}")
        return count

    def pack(self, start: int, arrays: Any, begin: int, count: int) -> np.ndarray:
        """The operand that writes rows `begin` .. of the given ones; it is fresh memory."""
        blob = np.zeros(self.size, np.int32)
        blob[:HEAD] = start + begin, count
        place = HEAD
        for leaf, words in zip(jax.tree.leaves(arrays), self._words):
            rows = np.zeros((self.num_rows, 4 * words), np.uint8)
            some = np.ascontiguousarray(leaf[begin : begin + count])
            flat = some.reshape(count, -1).view(np.uint8)
            rows[:count, : flat.shape[1]] = flat
            blob[place : place + rows.size // 4] = rows.view(np.int32).reshape(-1)
            place += rows.size // 4
        return blob


class DeviceBuffers:
    """What `Feature.buffers` declares, for all features that have some.

    Args:
        features: of the engine.
        mesh: devices that hold them.

    Attributes:
        arrays: by feature; `jax.ShapeDtypeStruct`s with their shardings until `make`.
    """

    def __init__(self, features: Sequence[Feature], mesh: Mesh):
        self._mesh = mesh
        declared = {feature.name: feature.buffers() for feature in features}
        self.arrays: dict[str, Any] = {
            name: jax.tree.map(self._placed, shapes)
            for name, shapes in declared.items()
            if shapes is not None
        }
        self._programs = {
            name: (RowsProgram(name, given, FEW_ROWS), RowsProgram(name, given))
            for name, given in self.arrays.items()
        }
        for name, given in self.arrays.items():
            leaves = jax.tree.leaves(given)
            if len({leaf.shape[0] for leaf in leaves}) != 1:
                raise ValueError(f"buffers of {name} have {[leaf.shape for leaf in leaves]}: rows")
        self._compiled: dict[str, tuple[str, Any]] = {}  # by program: the feature, the program

    def _placed(self, declared: Buffer) -> jax.ShapeDtypeStruct:
        kind = jnp.dtype(declared.dtype)
        if kind.itemsize not in WIDTHS or kind in (jnp.bool_, jnp.int4, jnp.uint4):
            raise ValueError(f"a buffer of {kind}: of numbers of 1, 2 or 4 bytes, and no bool")
        where = NamedSharding(self._mesh, declared.spec)
        return jax.ShapeDtypeStruct(declared.shape, kind, sharding=where)

    @property
    def device_bytes(self) -> int:
        """Of all arrays on each device, and of the operand of the largest call."""
        held = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.arrays)
        )
        return held + 4 * max((most.size for _, most in self._programs.values()), default=0)

    def make(self, compile_control: Callable[[Any, Any, int], Any]) -> None:
        """Zeros on the devices, and the programs that write them.

        Args:
            compile_control: compiles a function of donated arrays and an int32 operand.
        """
        for name, programs in self._programs.items():
            for program in programs:
                compiled = compile_control(program.run, program.shapes, program.size)
                self._compiled[program.name] = name, compiled
        self.arrays = jax.tree.map(
            lambda s: placed(np.zeros(s.shape, s.dtype), s.sharding), self.arrays
        )

    def pack(self, feature: str, start: int, arrays: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Programs and operands that write rows of a feature, see `RowsProgram.check`."""
        few, most = self._programs[feature]
        count, begin = few.check(start, arrays), 0
        while begin < count:
            program = few if count - begin <= few.num_rows else most
            now = min(program.num_rows, count - begin)
            yield program.name, program.pack(start, arrays, begin, now)
            begin += now

    def __contains__(self, program: str) -> bool:
        return program in self._compiled

    def run(self, program: str, placed: Any) -> None:
        """Write rows; steps that are dispatched read what was there before."""
        name, compiled = self._compiled[program]
        rest = dict(self.arrays)
        given = rest.pop(name)
        self.arrays = rest  # donated: must not be reachable if the call fails
        self.arrays = rest | {name: compiled(given, placed)}

    @property
    def is_whole(self) -> bool:
        """Whether no array was lost with a call that failed."""
        return self.arrays.keys() == self._programs.keys()

    def shapes(self) -> Mapping[str, Any]:
        """The arrays as operands of programs that are compiled."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self.arrays
        )

    def close(self) -> None:
        self.arrays, self._compiled = {}, {}


def _words(leaf: Any) -> int:
    """int32 words of a row."""
    return -(-math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // 4)


def _typed(flat: jax.Array, leaf: jax.Array) -> jax.Array:
    """Rows int32[N, words] as those of an array."""
    count, size = flat.shape[0], math.prod(leaf.shape[1:])
    if leaf.dtype.itemsize < 4:
        kind = {1: jnp.uint8, 2: jnp.uint16}[leaf.dtype.itemsize]
        flat = lax.bitcast_convert_type(flat, kind).reshape(count, -1)[:, :size]
    return lax.bitcast_convert_type(flat, leaf.dtype).reshape(count, *leaf.shape[1:])
