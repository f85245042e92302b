"""Linear layers with what stands before and behind them in a transformer block."""

from pallas_kernels.linear.api import (
    Norm,
    Weight,
    as_stored_weight,
    linear,
    linear_in_parts,
    rounding_of,
    stored_dtype,
)
from pallas_kernels.native.weights import NativeWeight

__all__ = [
    "NativeWeight",
    "Norm",
    "Weight",
    "as_stored_weight",
    "linear",
    "linear_in_parts",
    "rounding_of",
    "stored_dtype",
]
