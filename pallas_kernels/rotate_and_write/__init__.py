"""From the fused projection to rotated queries and a written page pool, in one operation."""

from pallas_kernels.rotate_and_write.api import rotate_and_write

__all__ = ["rotate_and_write"]
