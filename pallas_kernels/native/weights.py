"""The weights with scales by groups that the native linear layers multiply.

16 outputs are the lanes of a vector of 64 bytes, 4 bytes a lane: neighbouring inputs of one output.
A block of 16 outputs is all of its vectors one after the other, so that a thread reads memory as it
lies, every product is one lane's, and nothing is added across lanes. With 4 bits byte j of a lane
holds the inputs 8 c + j and 8 c + 4 + j in its low and its high nibble. Outputs and inputs that
fill up the last block and the last vector are zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LANES = 16  # outputs a block
BYTES = 4  # of a lane


class NativeWeight(NamedTuple):
    """A weight [N, K] in groups of K / groups inputs: value = (element - middle) * scale - offset.

    The middle is 8 for nibbles without offset and 0 for those with one, 128 for bytes, 0 for e4m3.
    """

    values: jax.Array  # `native_shape`: int8 of two nibbles, uint8, or float8_e4m3fn
    scale: jax.Array  # float32[groups, N]
    offset: jax.Array | None = None  # float32[groups, N]

    def scaled(self, factor: jax.Array) -> NativeWeight:
        """The weight times a number float32[1]."""
        offset = None if self.offset is None else self.offset * factor
        return NativeWeight(self.values, self.scale * factor, offset)


def inputs_of_vector(nibbles: bool) -> int:
    """Neighbouring inputs of one output that a vector has."""
    return 2 * BYTES if nibbles else BYTES


def native_shape(outputs: int, inputs: int, nibbles: bool) -> tuple[int, int]:
    """Blocks, and stored elements of a block."""
    in_vector = inputs_of_vector(nibbles)
    return -(-outputs // LANES), -(-inputs // in_vector) * LANES * BYTES


def pack_native(elements: np.ndarray, nibbles: bool) -> np.ndarray:
    """Elements [N, K] of one byte, of 0..15 with `nibbles`, in the order of `NativeWeight`."""
    outputs, inputs = elements.shape
    blocks, columns = native_shape(outputs, inputs, nibbles)
    vectors = columns // (LANES * BYTES)
    wide = vectors * BYTES * (2 if nibbles else 1)
    padded: np.ndarray = np.zeros((blocks * LANES, wide), np.uint8)
    padded[:outputs, :inputs] = elements.view(np.uint8)
    if nibbles:
        halves = padded.reshape(-1, vectors, 2, BYTES)
        padded = halves[:, :, 0] | halves[:, :, 1] << 4
    lanes = np.ascontiguousarray(padded).reshape(blocks, LANES, -1).view(np.uint32)
    ordered = np.ascontiguousarray(lanes.swapaxes(1, 2)).view(np.uint8)
    return ordered.reshape(blocks, columns).view(np.int8 if nibbles else elements.dtype)


def unpack_native(values: Any, outputs: int, inputs: int) -> jax.Array:
    """The inverse of `pack_native`: [N, K], uint8 of nibbles."""
    blocks, nibbles = values.shape[0], values.dtype == jnp.int8
    lanes = values.reshape(blocks, -1, LANES, BYTES).swapaxes(1, 2)
    if nibbles:
        unsigned = lanes.astype(jnp.uint8)
        lanes = jnp.stack([unsigned & 15, unsigned >> 4], axis=3)
    return lanes.reshape(blocks * LANES, -1)[:outputs, :inputs]
