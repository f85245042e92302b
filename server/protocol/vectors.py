"""Vectors as answers have them: lists of numbers, or bytes of a type and an order."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Literal, get_args

import ml_dtypes
import numpy as np

from server.protocol.requests import StrictModel

Dtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
_TYPES: dict[str, np.dtype] = dict(
    zip(
        get_args(Dtype),
        map(
            np.dtype,
            (
                np.float32,
                np.float16,
                ml_dtypes.bfloat16,
                ml_dtypes.float8_e4m3fn,
                ml_dtypes.float8_e5m2,
            ),
        ),
        strict=True,
    )
)


class VectorFields(StrictModel):
    """How vectors are told: numbers, base64, or the bytes alone (with or without a header)."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Dtype | None = None
    endianness: Literal["native", "little", "big"] | None = None

    @property
    def tells_bytes(self) -> bool:
        return self.encoding_format in ("bytes", "bytes_only")

    def packed(self, vector: Sequence[float]) -> bytes:
        """The bytes of a vector."""
        numbers = np.asarray(vector, np.float32).astype(_TYPES[self.embed_dtype or "float32"])
        if self.endianness not in (None, "native", sys.byteorder):
            numbers = numbers.view(f"u{numbers.itemsize}").byteswap()
        return numbers.tobytes()

    def told(self, vector: list[float]) -> list[float] | str:
        """A vector in JSON."""
        if self.encoding_format != "base64":
            return vector
        return base64.b64encode(self.packed(vector)).decode("ascii")
