"""Rotary position embedding of the output of a fused query, key and value projection."""

from pallas_kernels.rotary.api import split_rotate
from pallas_kernels.rotary.xla import apply_rope

__all__ = ["apply_rope", "split_rotate"]
