"""Linear layers with what stands before and behind them in a transformer block."""

from pallas_kernels.linear.api import Norm, as_stored, linear, linear_in_parts, stored_dtype

__all__ = ["Norm", "as_stored", "linear", "linear_in_parts", "stored_dtype"]
