"""Linear layers with what stands before and behind them in a transformer block."""

from pallas_kernels.linear.api import Norm, linear
from pallas_kernels.linear.int8 import quantize_rows

__all__ = ["Norm", "linear", "quantize_rows"]
