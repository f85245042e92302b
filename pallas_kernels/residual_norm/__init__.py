"""A product added to the residual stream, and the norm of the sum."""

from pallas_kernels.residual_norm.api import residual_norm

__all__ = ["residual_norm"]
