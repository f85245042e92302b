"""Quantised checkpoints: a file a format (the table of them is `checkpoints/formats.py`)."""

from checkpoints.quantized.parts import Checkpoint, Part, TensorReader
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.quantized.stored import ELEMENTS, INT4_ZERO, Matrix, Stored, dequantized

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
