"""A backend of quantized_matmul against the float64 oracle, on weights and rows of one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from pallas_kernels.quantized_matmul import Fp8Weight, Int8Weight, quantized_matmul
from tests.pallas_kernels.quantized_matmul import oracle
from tests.pallas_kernels.strategies import SEEDS


@dataclass(frozen=True)
class Product:
    """The static facts of a product: kinds as in `oracle.random_weight`, the type of x."""

    rows: int
    outputs: int
    inputs: int
    kind: str
    dtype: str
    activations: str = "float"

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.outputs}x{self.inputs}"
        return f"{sizes}-{self.kind}-{self.dtype}-{self.activations}"


class Values(NamedTuple):
    """What a product is given.

    Attributes:
        any_bits: the stored numbers are any that the format has, not those of a rounded matrix.
        zero_row: whether the first row of x is zeros.
    """

    any_bits: bool
    zero_row: bool
    seed: int


VALUES = st.builds(Values, any_bits=st.booleans(), zero_row=st.booleans(), seed=SEEDS)


def check(product: Product, values: Values, bound: float = 1e-5, **call: Any) -> None:
    """Every row of a result, by the row's own magnitude.

    Args:
        bound: 1e-5 where weights are exact in the type of x and products are added in float32.
        call: the backend and its own options.
    """
    rng = np.random.default_rng(values.seed)
    make = oracle.weight_of_any_bits if values.any_bits else oracle.random_weight
    weight = make(rng, product.outputs, product.inputs, product.kind)
    x = oracle.random_rows(rng, product.rows, product.inputs, product.dtype)
    if values.zero_row:
        x = x.at[0].set(0.0)
    got = quantized_matmul(x, weight, activations=product.activations, out_dtype="float32", **call)
    assert got.dtype == np.float32
    if product.activations == "int8":
        assert isinstance(weight, Int8Weight)
        # the sums are exact integers, which are scaled twice in float32; parts of K may be added
        sums, row_scale = oracle.integer_product(x, weight)
        unit = row_scale[:, None] * np.asarray(weight.scale, np.float64)
        error = np.abs(np.asarray(got, np.float64) - sums.astype(np.float64) * unit)
        assert (error <= unit * (0.25 + 4e-7 * np.abs(sums))).all(), "an integer is off by one"
    elif product.activations == "fp8":
        assert isinstance(weight, Fp8Weight)
        assert oracle.rows_agree(got, oracle.fp8_product(x, weight), bound)
    else:
        assert oracle.rows_agree(got, oracle.product(x, weight), bound)
