"""Linear layers of which each group of rows has its own: the experts of a sparse model."""

from pallas_kernels.grouped_linear.api import (
    block_sizes,
    experts_rounding,
    grouped_linear,
    linear_in_blocks,
    refusal,
)
from pallas_kernels.grouped_linear.blocks import Blocks

__all__ = [
    "Blocks",
    "block_sizes",
    "experts_rounding",
    "grouped_linear",
    "linear_in_blocks",
    "refusal",
]
