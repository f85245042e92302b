"""Scatter of new keys and values into the page pool."""

from pallas_kernels.write_kv.api import ScaledPages, write_kv, write_kv_scaled

__all__ = ["ScaledPages", "write_kv", "write_kv_scaled"]
