"""Kernels of jaxserve: attention over paged keys and values, the write into the pages, products
with weights that stay quantised, and the bound of the tokens that a sampler's filters keep.

Importing this package loads no GPU or TPU compiler: a backend is imported when it is first asked
for by name.
"""

from pallas_kernels.backends.record import Tuning
from pallas_kernels.comparison import compare_attention
from pallas_kernels.coverage import AttentionShape, PageFacts
from pallas_kernels.devices import Backends, choose_backends, choose_matmul_backend, require_backend
from pallas_kernels.errors import KernelError
from pallas_kernels.kept_threshold import kept_threshold
from pallas_kernels.paged_attention import (
    PrefillLanes,
    paged_decode_and_write,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.pages import scales_shape, storage_dtype
from pallas_kernels.quantized_matmul import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantized_matmul,
)
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.tuning import ChipTuning, chip_tuning
from pallas_kernels.write_kv import ScaledPages, write_kv, write_kv_scaled

__all__ = [
    "AttentionShape",
    "Backends",
    "ChipTuning",
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "KernelError",
    "PageFacts",
    "PrefillLanes",
    "QuantizedWeight",
    "ScaledPages",
    "Tuning",
    "chip_tuning",
    "choose_backends",
    "choose_matmul_backend",
    "compare_attention",
    "kept_threshold",
    "paged_decode_and_write",
    "paged_decode_attention",
    "paged_prefill_attention",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "quantized_matmul",
    "require_backend",
    "residual_norm",
    "rotate_and_write",
    "scales_shape",
    "storage_dtype",
    "write_kv",
    "write_kv_scaled",
]
