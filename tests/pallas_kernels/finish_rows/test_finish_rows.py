"""Rows of a product, added, gated and rounded, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError
from pallas_kernels.finish_rows import finish_rows, triton
from pallas_kernels.quantized_matmul import RoundedRows, Rounding
from tests.pallas_kernels.lowering import A100, H200, lowered_for_cuda
from tests.pallas_kernels.quantized_matmul import oracle
from tests.pallas_kernels.strategies import SEEDS, examples

# columns of the result, parts, type of the rows, what they are rounded to
PROBLEMS = [
    (72, 3, "bfloat16", "int8"),
    (72, 1, "bfloat16", "fp8"),
    (130, 2, "float32", "fp8 static"),
    (64, 4, "float16", "int8 static"),
    (40, 2, "bfloat16", "float"),
]
CASES = [(*one, backend) for one in PROBLEMS for backend in ("xla", "triton")]
QUICK = [(*PROBLEMS[0], "triton"), (*PROBLEMS[2], "triton"), (*PROBLEMS[1], "xla")]
# of the largest number of a row: of the rows' type, and of what they are rounded to
EXACT = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-6}
STEP = {"float": 0.0, "int8": 0.5 / 127, "fp8": 2**-4}
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
}


def rounding_of(kind: str) -> Rounding | None:
    name, *static = kind.split()
    if name == "float":
        return None
    return Rounding(name, jnp.full(1, 0.031, jnp.float32) if static else None)


def call(product: jax.Array, dtype: str, gate: str | None, kind: str, backend: str):
    interpret = True if backend == "triton" else None
    options = {"rounding": rounding_of(kind), "backend": backend, "interpret": interpret}
    return finish_rows(product, dtype=dtype, gate=gate, **options)


def problem(rows: int, columns: int, parts: int, dtype: str, seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    product = rng.standard_normal((parts, rows, columns)) * np.exp(rng.uniform(-2, 2, (rows, 1)))
    product[:, 0] = 0.0  # a row without a largest number
    return jnp.asarray(product, jnp.float32 if parts > 1 else dtype)


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize(
    ("columns", "parts", "dtype", "kind", "backend"),
    [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in CASES],
)
@pytest.mark.parametrize(
    "gate",
    ["silu", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gelu_tanh", None))],
)
@examples(3)
@given(rows=st.sampled_from((1, 5)), chunk=st.sampled_from((16, 1024)), seed=SEEDS)
def test_against_float64(columns, parts, dtype, kind, backend, gate, rows, chunk, seed):
    product = problem(rows, 2 * columns if gate else columns, parts, dtype, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton, "CHUNK", chunk)
        triton.finish_rows.clear_cache()
        got = call(product, dtype, gate, kind, backend)
    wanted = np.asarray(product, np.float64).sum(axis=0)
    if gate:
        wanted = ACTIVATIONS[gate](wanted[:, ::2]) * wanted[:, 1::2]
    assert got.shape == wanted.shape and got.dtype == dtype
    if not isinstance(got, RoundedRows):
        assert oracle.relative_error(got, wanted) <= 2 * EXACT[dtype]
        return
    name, *static = kind.split()
    scale = np.asarray(got.column, np.float64)
    held = np.asarray(got.values, np.float64)
    largest = {"int8": 127, "fp8": 448}[name]
    if static:
        np.testing.assert_array_equal(scale, np.float32(0.031))
        wanted = np.clip(wanted, -(largest + (name == "int8")) * scale, largest * scale)
    else:
        assert np.abs(held).max(axis=1)[1:].tolist() == [largest] * (rows - 1)
    # steps of integers are equal; those of floats grow with the number
    step = scale if name == "int8" else np.maximum(np.abs(wanted) / 8, scale * 2.0**-9)
    size = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(held * scale - wanted) <= 0.501 * step + 3 * EXACT[dtype] * size).all()


@pytest.mark.parametrize("kind", ["int8", "fp8", "int8 static", "fp8 static"])
def test_the_kernel_rounds_as_xla_does(kind):
    product = problem(9, 96, 1, "float32", 5)
    kernel, plain = (call(product, "float32", None, kind, name) for name in ("triton", "xla"))
    np.testing.assert_array_equal(np.asarray(kernel.values), np.asarray(plain.values))
    np.testing.assert_array_equal(kernel.column, plain.column)


def test_halves_are_rounded_to_even():
    numbers = np.arange(-300, 301, dtype=np.float32) / 2
    near = np.nextafter(numbers, np.float32(np.inf)), np.nextafter(numbers, np.float32(-np.inf))
    for given_numbers in (numbers, *near):
        got = Rounding("int8").cut(jnp.asarray(given_numbers))
        np.testing.assert_array_equal(got, np.clip(np.rint(given_numbers), -128, 127))


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.device_kind)
@pytest.mark.parametrize(("columns", "gate"), [(57344, "silu"), (30720, "gelu_tanh"), (4096, None)])
def test_lowers_for_cuda_without_a_gpu(columns, gate, device):
    run = functools.partial(
        finish_rows, dtype="bfloat16", gate=gate, rounding=Rounding("int8"), backend="triton"
    )
    operand = jax.ShapeDtypeStruct((2, 16, columns), jnp.float32)
    assert "finish_rows" in lowered_for_cuda(run, operand, device=device).as_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype=int8"),
        ({"product": jnp.zeros((4, 8), "bfloat16")}, r"product\.shape=\(4, 8\)"),
        ({"product": jnp.zeros((1, 4, 8), "float16")}, r"product\.dtype=float16"),
        ({"product": jnp.zeros((1, 4, 7), "bfloat16")}, "an even number of columns"),
        ({"gate": "gelu"}, "gate=gelu"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"backend": "xla", "interpret": True}, "interpret=True"),
    ],
)
def test_refusals(changes, message):
    given_values = {
        "product": jnp.zeros((1, 4, 8), "bfloat16"),
        "dtype": "bfloat16",
        "gate": "silu",
        "backend": "triton",
    }
    with pytest.raises(KernelError, match=message):
        finish_rows(**(given_values | changes))
