"""Random weights without a checkpoint: each number is a hash of its place.

XLA makes one loop of it, so that nothing but the result is ever in memory, and each device makes
its own shard, so that the numbers are alike on every mesh. (`jax.random.normal` takes 25 times as
long on a CPU, and keeps its bits and float32 numbers beside the result.)
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel.placement import placed

STD = 0.02
# The sum of four bytes less its mean 4 * 127.5 has a variance of 4 * (256^2 - 1) / 12.
_SUM_STD = (4 * (256**2 - 1) / 12) ** 0.5
INT8_SCALE = np.float32(STD / (_SUM_STD / 4))
# uniform 0..15 have a variance of (16^2 - 1) / 12
INT4_SCALE = np.float32(STD / ((16**2 - 1) / 12) ** 0.5)
FP8_SCALE = np.float32(STD / 64)  # 448 is 7 standard deviations


def dummy_array(seed: int, place: Sequence[Any], like: Any, nibbles: bool = False) -> jax.Array:
    """Numbers of mean 0 and standard deviation `STD`, near to normally distributed.

    With a dtype of 8-bit integers they are of the weights / `INT8_SCALE`, with float8 of the
    weights / `FP8_SCALE`; with `nibbles` all bits are random.

    Args:
        seed: of all dummy weights.
        place: names of the parameter; others have other numbers.
        like: the parameter's abstract form: shape, dtype and sharding; uint8 holds the integers
            with 128 added.
        nibbles: whether the dtype's bits are 4-bit numbers.
    """
    # a stable number for the name, so that a parameter does not depend on the others
    name = zlib.crc32("/".join(map(str, place)).encode())
    keys = np.random.SeedSequence([seed % 2**64, name]).generate_state(2)
    return _filled(
        keys, shape=like.shape, dtype=like.dtype, sharding=like.sharding, nibbles=nibbles
    )


def dummy_quantized(seed: int, place: Sequence[Any], wanted: QuantArray) -> QuantArray:
    """A quantised weight of such numbers; its abstract form says how it is kept.

    The scale is that of all weights. Only formats without zeros, which are those that weights are
    rounded to, can be made so.
    """
    kind = wanted.format.stored.kind
    scale = {"int8": INT8_SCALE, "int4": INT4_SCALE, "fp8": FP8_SCALE}[kind]

    values = dummy_array(seed, place, wanted.values, nibbles=kind == "int4")
    return replace(wanted, values=values, scale=constant(scale, wanted.scale))


def constant(value: Any, like: Any) -> jax.Array:
    """An array that is one number everywhere, given its abstract form."""
    return placed(np.full(like.shape, value, like.dtype), like.sharding)


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding", "nibbles"))
def _filled(
    keys: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
    nibbles: bool,
) -> jax.Array:
    index = jnp.uint32(0)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _mixed(_mixed(index + keys[0]) ^ keys[1])
    if nibbles:
        width = dtype.itemsize * 8
        unsigned = (bits >> (32 - width)).astype(jnp.dtype(f"uint{width}"))
        return jax.lax.with_sharding_constraint(
            jax.lax.bitcast_convert_type(unsigned, dtype), sharding
        )
    # the sum of the bytes, 0 to 1020
    pairs = (bits & 0x00FF00FF) + ((bits >> 8) & 0x00FF00FF)
    total = ((pairs & 0xFFFF) + (pairs >> 16)).astype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.integer):
        eighths = (total >> 2) - 127  # -127 to 128, of which the last is one of 2^32
        numbers = jnp.minimum(eighths, 127) + (128 if dtype == jnp.uint8 else 0)
    else:
        numbers = (total - 510).astype(jnp.float32) * (STD / _SUM_STD)
        if dtype == jnp.float8_e4m3fn:
            numbers = numbers / FP8_SCALE
    return jax.lax.with_sharding_constraint(numbers.astype(dtype), sharding)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit integers in which each bit depends on all (C. Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
