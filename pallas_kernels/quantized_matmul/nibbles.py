"""4-bit weights in registers: words of four nibbles become 16-bit floating-point numbers.

The bits 0..255 of a bfloat16 are the numbers 0..255 times 2^-133: the subnormal numbers and the
first normal ones are spaced alike. So a nibble in one of the two lowest places of a word needs no
shift and no conversion, only a mask and one fused multiply-add that also subtracts the zero point.
The same holds for float16 with 2^-24.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.interpreter import scaled_subnormals
from pallas_kernels.quantized_matmul.formats import SYMMETRIC_ZERO

BFLOAT16, FLOAT16 = jnp.dtype("bfloat16"), jnp.dtype("float16")
SPACING = {BFLOAT16: -133, FLOAT16: -24}  # exponent of the least number above zero
LARGEST = {BFLOAT16: 127, FLOAT16: 15}  # exponent of the largest power of two
# what a converted nibble has to be multiplied with: it cannot be scaled to 1 in one step
NIBBLE_UNIT = {dtype: 2.0 ** -(SPACING[dtype] + LARGEST[dtype]) for dtype in SPACING}


def centred_nibbles(
    words: jax.Array,  # uint16[N, 64]
    nibble: int,
    zero: jax.Array | None,  # float32[N], or None for 8
    dtype: Any,
    emulate: bool,
) -> jax.Array:  # [N, 64]
    """(nibble - zero) / NIBBLE_UNIT of every word, exactly, in bfloat16 or float16.

    Args:
        words: packed weights.
        nibble: 0..3, which nibble of the words.
        zero: the zero point of every row.
        dtype: bfloat16 or float16.
        emulate: compute the same numbers without subnormal ones, which XLA:CPU takes for zeros.
    """
    kind = jnp.dtype(dtype)
    low = words if nibble < 2 else words >> 8
    place = 4 * (nibble % 2)
    bits = low & (15 << place)
    power = LARGEST[kind] - place
    value = scaled_subnormals(bits, kind, SPACING[kind], power, interpreted=emulate)
    if zero is None:
        return value - jnp.asarray(SYMMETRIC_ZERO / NIBBLE_UNIT[kind], kind)
    shift = (zero * (1 / NIBBLE_UNIT[kind])).astype(kind)
    return value - lax.broadcast_in_dim(shift, words.shape, [0])
