"""The product of activations and a weight that stays quantised in memory."""

from pallas_kernels.quantized_matmul.activations import RoundedRows, Rounding, Rows
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.formats import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

__all__ = [
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "QuantizedWeight",
    "RoundedRows",
    "Rounding",
    "Rows",
    "dequantize",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "quantized_matmul",
]
