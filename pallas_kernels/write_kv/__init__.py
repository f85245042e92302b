"""Scatter of new keys and values into the page pool."""

from pallas_kernels.write_kv.api import write_kv

__all__ = ["write_kv"]
