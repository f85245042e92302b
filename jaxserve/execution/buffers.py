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

MOST_BYTES = 1 << 22  # of rows that one call writes, if one row is not longer
HEAD = 2  # words before the rows: the first row, and how many


class RowsProgram:
    """Writes some rows of one feature's arrays: a program beside the step.

    Args:
        feature: its name.
        shapes: of the arrays, which have an axis of rows first, with their shardings.
    """

    def __init__(self, feature: str, shapes: Any):
        self.name = f"rows of {feature}"
        self.shapes = shapes
        self._leaves = jax.tree.leaves(shapes)
        self._words = [_words(leaf) for leaf in self._leaves]  # of a row of each
        most = max(1, MOST_BYTES // (4 * sum(self._words)))
        self.num_rows = min(most, max(leaf.shape[0] for leaf in self._leaves))
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

    def pack(self, start: int, arrays: Any) -> Iterator[np.ndarray]:
        """As many operands as the rows need, from row `start` on; each is fresh memory.

        Raises:
            ValueError: other shapes or types than those of the arrays, or rows beyond their end.
        """
        given = [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]
        counts = {leaf.shape[0] for leaf in given if leaf.ndim}
        wanted = [(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in self._leaves]
        found = [(leaf.shape[1:], leaf.dtype) for leaf in given]
        trees: list[Any] = [jax.tree.structure(one) for one in (arrays, self.shapes)]
        end = start + max(counts, default=0)
        if trees[0] != trees[1] or wanted != found or len(counts) != 1 or start < 0:
            raise ValueError(f"{self.name} are {wanted}, not {found}")
        if end > min(leaf.shape[0] for leaf in self._leaves):
            raise ValueError(f"{self.name} end before row {end}")
        for begin in range(0, end - start, self.num_rows):
            count = min(self.num_rows, end - start - begin)
            blob = np.zeros(self.size, np.int32)
            blob[:HEAD] = start + begin, count
            place = HEAD
            for leaf, words in zip(given, self._words):
                rows = np.zeros((self.num_rows, 4 * words), np.uint8)
                some = np.ascontiguousarray(leaf[begin : begin + count])
                flat = some.reshape(count, -1).view(np.uint8)
                rows[:count, : flat.shape[1]] = flat
                blob[place : place + rows.size // 4] = rows.view(np.int32).reshape(-1)
                place += rows.size // 4
            yield blob


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
        self._programs = {name: RowsProgram(name, given) for name, given in self.arrays.items()}
        self._compiled: dict[str, tuple[str, Any]] = {}  # by program: the feature, the program

    def _placed(self, declared: Buffer) -> jax.ShapeDtypeStruct:
        where = NamedSharding(self._mesh, declared.spec)
        return jax.ShapeDtypeStruct(declared.shape, declared.dtype, sharding=where)

    @property
    def device_bytes(self) -> int:
        """Of all arrays on each device, and of the operand of the largest call."""
        held = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.arrays)
        )
        return held + 4 * max((one.size for one in self._programs.values()), default=0)

    def make(self, compile_control: Callable[[Any, Any, int], Any]) -> None:
        """Zeros on the devices, and the programs that write them.

        Args:
            compile_control: compiles a function of donated arrays and an int32 operand.
        """
        for name, program in self._programs.items():
            compiled = compile_control(program.run, program.shapes, program.size)
            self._compiled[program.name] = name, compiled
        self.arrays = jax.tree.map(
            lambda s: jax.device_put(jnp.zeros(s.shape, s.dtype), s.sharding), self.arrays
        )

    def pack(self, feature: str, start: int, arrays: Any) -> tuple[str, Iterator[np.ndarray]]:
        """The program that writes rows of a feature, and its operands; see `RowsProgram.pack`."""
        program = self._programs[feature]
        return program.name, program.pack(start, arrays)

    def __contains__(self, program: str) -> bool:
        return program in self._compiled

    def run(self, program: str, placed: Any) -> None:
        """Write rows; steps that are dispatched read what was there before."""
        name, compiled = self._compiled[program]
        self.arrays = {**self.arrays, name: compiled(self.arrays[name], placed)}

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
