"""The formats that take matrices quantised already, and the files they write."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from checkpoints.quantize.quantized_matrices import KeptMatrix, config_of, method_of, written
from checkpoints.quantize.rounding import RoundedMatrix
from checkpoints.quantized import Encoding

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
INT4 = KeptMatrix(Encoding("int4", 16, "integer"), (24, 64))
INT8 = KeptMatrix(Encoding("int8", 16), (24, 64))
ROUNDED_ROWS = KeptMatrix(Encoding("int8", activations="int8"), (24, 64))
FP8 = KeptMatrix(Encoding("fp8", activations="fp8"), (24, 64))


def of(matrix: KeptMatrix, **changes: object) -> KeptMatrix:
    return replace(matrix, stored=replace(matrix.stored, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "matrices", "method"),
    [
        ("awq", [INT4, INT4], "awq"),
        ("awq", [INT4, of(INT4, zeros="none")], "awq"),
        ("awq", [of(INT4, ordered=True)], "compressed-tensors"),
        ("awq", [replace(INT4, shape=(20, 64))], "compressed-tensors"),
        ("awq", [INT4, of(INT4, group=32)], "compressed-tensors"),
        ("awq", [INT8], "compressed-tensors"),
        ("gptq", [INT4, of(INT4, ordered=True)], "gptq"),
        ("gptq", [INT8], "gptq"),
        # of a device without the product: 8-bit integers by row
        ("gptq", [INT4, of(INT8, group=None)], "compressed-tensors"),
        ("gptq", [ROUNDED_ROWS], "compressed-tensors"),
        ("gptq", [of(INT4, static=True, activations="int8")], "compressed-tensors"),
        ("fp8", [FP8], "compressed-tensors"),
        (None, [INT4], "compressed-tensors"),
    ],
)
def test_the_format_of_the_source_where_it_has_all(
    source: str | None, matrices: list[KeptMatrix], method: str
) -> None:
    assert method_of(matrices, source) == method


@pytest.mark.parametrize(
    ("scale", "method", "dtype"),
    [
        (0.5, "compressed-tensors", BF16),
        (1 + 2**-10, "compressed-tensors", F16),
        (1 + 2**-20, "compressed-tensors", np.dtype(np.float32)),
        (0.5, "awq", F16),
        (2.0**-30, "awq", BF16),  # too small for float16
    ],
)
def test_scales_are_written_in_a_type_that_holds_them(
    scale: float, method: str, dtype: np.dtype
) -> None:
    elements = np.zeros((24, 64), np.uint8)
    rounded = RoundedMatrix(elements, np.full((24, 4), scale, np.float32))
    made = written(method, of(INT4, zeros="none"), rounded, BF16, None).tensors
    found = made["scales" if method == "awq" else "weight_scale"]
    assert found.dtype == dtype and (found.astype(np.float32) == np.float32(scale)).all()


def test_schemes_that_differ_name_their_modules() -> None:
    matrices = {"a.up": INT8, "a.down": FP8, "b.up": INT8}
    groups = {
        module: written(
            "compressed-tensors",
            matrix,
            RoundedMatrix(np.zeros(matrix.shape, np.int8), np.ones((24, matrix.stored.groups(64)))),
            F16,
            None,
        ).group
        for module, matrix in matrices.items()
    }
    config = config_of("compressed-tensors", matrices, groups, ["lm_head"])
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert targets == [["a.up", "b.up"], ["a.down"]]
    assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
    alone = config_of("compressed-tensors", {"a.down": FP8}, {"a.down": groups["a.down"]}, [])
    assert alone["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.parametrize(
    ("matrix", "kind"),
    [
        (of(INT4, activations="fp8", static=True), "float"),
        (of(INT4, activations="int8", static=True), "int"),
        (of(INT8, group=None, activations="fp8", static=True), "float"),
        (ROUNDED_ROWS, "int"),
        (FP8, "float"),
    ],
)
def test_activations_keep_the_type_that_their_scale_is_for(matrix: KeptMatrix, kind: str) -> None:
    groups = matrix.stored.groups(64)
    rounded = RoundedMatrix(np.zeros(matrix.shape, np.int8), np.ones((24, groups), np.float32))
    if matrix.stored.zeros == "integer":
        rounded = rounded._replace(zeros=np.zeros((24, groups), np.int16))
    scale = 0.5 if matrix.stored.static else None
    made = written("compressed-tensors", matrix, rounded, F16, scale)
    assert made.group["input_activations"]["type"] == kind
    assert made.group["input_activations"]["dynamic"] == (scale is None)
