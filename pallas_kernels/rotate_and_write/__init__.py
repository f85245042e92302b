"""One operation that rotates queries and keys of the fused projection and writes the pages."""

from pallas_kernels.rotate_and_write.api import rotate_and_write

__all__ = ["rotate_and_write"]
