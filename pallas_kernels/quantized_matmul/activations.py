"""Quantisation of activations: a symmetric scale of each row's own, or one that is given.

The arithmetic is the same in XLA and in the kernels that round what they write, so a product gives
the same whoever rounded its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul.formats import FP8, FP8_MAX, INT8_MAX

SCALES_MULTIPLE = 8  # rows of the least tile


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=("dtype",))
@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows of 8 bits that stand for values * scale, and take the place of an array [M, K].

    Attributes:
        values: int8 or float8_e4m3fn[M, K].
        scale: float32[M]; of a kernel that rounds there are more, which mean nothing, so that a
            tile of a product is not short of them.
        dtype: type of the rows that were rounded.
    """

    values: jax.Array
    scale: jax.Array
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows, (M, K)."""
        return self.values.shape

    @property
    def column(self) -> jax.Array:
        """The scales, float32[M, 1]."""
        return self.scale[: len(self.values), None]

    @property
    def ndim(self) -> int:
        return self.values.ndim


Rows = jax.Array | RoundedRows


@partial(jax.tree_util.register_dataclass, data_fields=("scale",), meta_fields=("kind",))
@dataclass(frozen=True, slots=True)
class Rounding:
    """What rows are rounded to.

    Attributes:
        kind: "int8" or "fp8", which is float8_e4m3fn.
        scale: float32[1] of all rows, which are cut off at its ends; None: each row has its own.
    """

    kind: str
    scale: Any = None

    @property
    def dtype(self) -> np.dtype:
        """Of the rounded numbers."""
        return jnp.dtype(FP8 if self.kind == "fp8" else jnp.int8)

    @property
    def largest(self) -> float:
        """The largest of them."""
        return FP8_MAX if self.kind == "fp8" else float(INT8_MAX)

    def stretch(self, highest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What numbers are multiplied with before `cut`, and the scale that undoes it.

        By products: XLA may turn a quotient into one, and rounding must not depend on whether it
        does.

        Args:
            highest: the largest magnitude of each row's.
        """
        factor = jnp.where(highest > 0.0, self.largest / highest, 1.0)
        return factor, highest * jnp.float32(1.0 / self.largest)

    def cut(self, stretched: jax.Array) -> jax.Array:
        """float32 numbers rounded to nearest even and cut off at the ends."""
        if self.kind == "fp8":
            return jnp.clip(stretched, -FP8_MAX, FP8_MAX).astype(FP8)
        # Triton has no such rounding of its own
        up = jnp.floor(stretched + 0.5)
        over = up - stretched
        is_odd = jnp.floor(up * 0.5) * 2.0 != up
        nearest = jnp.where((over > 0.5) | ((over == 0.5) & is_odd), up - 1.0, up)
        return jnp.clip(nearest, -INT8_MAX - 1, INT8_MAX).astype(jnp.int8)

    def of(self, x: jax.Array) -> RoundedRows:
        """Rows [M, K] of any floating-point type, rounded."""
        wide = x.astype(jnp.float32)
        if self.scale is None:
            factor, scale = self.stretch(jnp.abs(wide).max(axis=1))
        else:
            # once, where XLA may do as it likes with a quotient
            factor, scale = 1.0 / self.scale, jnp.broadcast_to(self.scale, x.shape[:1])
        return RoundedRows(self.cut(wide * factor[:, None]), scale, jnp.dtype(x.dtype))


def rounded_rows(x: Rows, activations: str, scale: jax.Array | None) -> Rows:
    """x [M, K] as a product takes it: rounded already, or rounded here unless "float"."""
    if activations == "float" or isinstance(x, RoundedRows):
        return x
    return Rounding(activations, scale).of(x)


def split_rows(x: Rows) -> tuple[jax.Array, jax.Array | None]:
    """The numbers [M, K] that are multiplied, and the scales of rounded ones."""
    return (x.values, x.scale) if isinstance(x, RoundedRows) else (x, None)


def result_of(
    rounding: Rounding | None, like: Callable[..., Any], shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    """The type of a kernel's result [M, K] in `dtype`, or rounded; `like` makes one of a shape and
    an element type."""
    if rounding is None:
        return like(shape, dtype)
    scale = like((-(-shape[0] // SCALES_MULTIPLE) * SCALES_MULTIPLE,), jnp.dtype(jnp.float32))
    return RoundedRows(like(shape, rounding.dtype), scale, jnp.dtype(dtype))
