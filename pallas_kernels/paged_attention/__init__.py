"""Attention of query rows over the keys and values that a page table names."""

from pallas_kernels.paged_attention.api import paged_decode_attention, paged_prefill_attention
from pallas_kernels.paged_attention.decode_and_write import paged_decode_and_write
from pallas_kernels.paged_attention.lanes import PrefillLanes

__all__ = [
    "PrefillLanes",
    "paged_decode_and_write",
    "paged_decode_attention",
    "paged_prefill_attention",
]
