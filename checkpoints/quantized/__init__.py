"""Quantised checkpoints: a file a format (the table of them is `checkpoints/quantized_formats.py`)."""

from checkpoints.quantized.tensor_parts import Checkpoint, Part, TensorReader
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.quantized.quantized_matrix import ELEMENTS, INT4_ZERO, Matrix, Stored, dequantized

__all__ = [
    "ELEMENTS",
    "INT4_ZERO",
    "Checkpoint",
    "Matrix",
    "Part",
    "QuantizedReader",
    "Stored",
    "TensorReader",
    "dequantized",
]
