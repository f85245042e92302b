"""Linear layers with what stands before and behind them in a transformer block."""

from pallas_kernels.linear.api import Norm, linear

__all__ = ["Norm", "linear"]
