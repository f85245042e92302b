"""Kernels of jaxserve: attention over paged keys and values, and the write into the pages.

Importing this package loads no GPU or TPU compiler: a backend is imported when it is first asked
for by name.
"""

from pallas_kernels.devices import Backends, choose_backends
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import (
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.pages import storage_dtype
from pallas_kernels.write_kv import write_kv

__all__ = [
    "Backends",
    "KernelError",
    "PrefillLanes",
    "choose_backends",
    "paged_decode_attention",
    "paged_prefill_attention",
    "storage_dtype",
    "write_kv",
]
