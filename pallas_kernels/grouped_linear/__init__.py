"""Linear layers of which each group of rows has its own: the experts of a sparse model."""

from pallas_kernels.grouped_linear.api import grouped_linear

__all__ = ["grouped_linear"]
