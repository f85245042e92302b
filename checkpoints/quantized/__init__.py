"""Quantised checkpoints: a file a format (table: `checkpoints/quantized_formats.py`)."""

from checkpoints.quantized.quantized_matrix import (
    ELEMENTS,
    INT4_ZERO,
    Encoding,
    Matrix,
    dequantized,
)
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.quantized.tensor_parts import Checkpoint, Part, TensorReader

__all__ = [
    "ELEMENTS",
    "INT4_ZERO",
    "Checkpoint",
    "Encoding",
    "Matrix",
    "Part",
    "QuantizedReader",
    "TensorReader",
    "dequantized",
]
