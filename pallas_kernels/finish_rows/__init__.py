"""What the rows of a product become before the next one: added, gated, rounded."""

from pallas_kernels.finish_rows.api import finish_rows

__all__ = ["finish_rows"]
