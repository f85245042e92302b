"""Kernels of jaxserve: attention over paged keys and values, and the write into the pages.

Importing this package loads no GPU or TPU compiler: a backend is imported when it is first asked
for by name.
"""

from pallas_kernels.coverage import AttentionShape
from pallas_kernels.devices import Backends, choose_backends, require_backend
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import (
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.pages import storage_dtype
from pallas_kernels.tuning import ChipTuning, DecodeTuning, MatmulTuning, PrefillTuning, chip_tuning
from pallas_kernels.write_kv import ScaledPages, write_kv, write_kv_scaled

__all__ = [
    "AttentionShape",
    "Backends",
    "ChipTuning",
    "DecodeTuning",
    "KernelError",
    "MatmulTuning",
    "PrefillLanes",
    "PrefillTuning",
    "ScaledPages",
    "chip_tuning",
    "choose_backends",
    "paged_decode_attention",
    "paged_prefill_attention",
    "require_backend",
    "storage_dtype",
    "write_kv",
    "write_kv_scaled",
]
