"""Residual stream and norm against float64, rounded where the model rounds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError
from pallas_kernels.linear import Norm
from pallas_kernels.quantized_matmul import Rounding
from pallas_kernels.residual_norm import residual_norm
from tests.pallas_kernels.lowering import A100, H200, lowered_for_cuda
from tests.pallas_kernels.strategies import SEEDS, examples

# columns, parts of the product, type of the stream, whether norms are Gemma's and one is behind
PROBLEMS = [
    (64, 1, "bfloat16", True),
    (72, 4, "bfloat16", False),
    (130, 3, "float32", True),
    (16, 2, "float16", False),
]
CASES = [(*one, backend) for one in PROBLEMS for backend in ("xla", "triton")]
QUICK = [(*PROBLEMS[1], "triton"), (*PROBLEMS[2], "xla"), (*PROBLEMS[2], "triton")]
TOLERANCE = {"bfloat16": 1.2e-2, "float32": 2e-6, "float16": 2e-3}


def call(backend: str, *given, eps: float, gemma: bool = False, rounding: Rounding | None = None):
    """With Gemma's norms the product is normed before it is added, by the weights in reverse."""
    residual, product, weight = given
    norm, behind = Norm(weight, eps, gemma), Norm(weight[::-1], 2 * eps, gemma) if gemma else None
    options = {"behind": behind, "rounding": rounding, "backend": backend}
    options["interpret"] = True if backend == "triton" else None
    return residual_norm(residual, product, norm, **options)


def problem(rows: int, columns: int, parts: int, dtype: str, seed: int):
    rng = np.random.default_rng(seed)
    residual = jnp.asarray(rng.standard_normal((rows, columns)) * 3, dtype)
    product = rng.standard_normal((parts, rows, columns))
    product = jnp.asarray(product, jnp.float32 if parts > 1 else dtype)
    return residual, product, jnp.asarray(rng.uniform(0.5, 2, columns), dtype)


def over_rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize(
    ("columns", "parts", "dtype", "gemma", "backend"),
    [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in CASES],
)
@examples(4)
@given(rows=st.sampled_from((1, 5)), eps=st.sampled_from((1e-6, 1e-1)), seed=SEEDS)
def test_against_float64(columns, parts, dtype, gemma, backend, rows, eps, seed):
    residual, product, weight = given = problem(rows, columns, parts, dtype, seed)
    normed, stream = jax.jit(functools.partial(call, backend, eps=eps, gemma=gemma))(*given)
    assert normed.dtype == stream.dtype == dtype
    factor = np.asarray(weight, np.float64) + gemma
    wide = np.asarray(product, np.float64).sum(axis=0)
    if gemma:
        wide = over_rms(wide, 2 * eps) * factor[::-1]
    wanted = np.asarray(residual, np.float64) + wide
    scale = np.abs(wanted).max()
    assert np.abs(np.asarray(stream, np.float64) - wanted).max() <= TOLERANCE[dtype] * scale
    # of the stream as it was rounded: its own error is judged above
    wanted = over_rms(np.asarray(stream, np.float64), eps) * factor
    difference = np.abs(np.asarray(normed, np.float64) - wanted).max()
    assert difference <= TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize(("parts", "gemma"), [(1, True), (4, False)])
def test_the_kernel_rounds_where_xla_does(parts, gemma):
    given = problem(9, 96, parts, "bfloat16", 5)
    kernel, plain = (call(backend, *given, eps=1e-5, gemma=gemma) for backend in ("triton", "xla"))
    for got, want in zip(kernel, plain, strict=True):
        # a float32 sum in another order may turn a tie
        assert np.mean(np.asarray(got) != np.asarray(want)) <= 0.01


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize(
    ("kind", "static"),
    [
        ("int8", False),
        pytest.param("int8", True, marks=pytest.mark.slow),
        pytest.param("fp8", False, marks=pytest.mark.slow),
        pytest.param("fp8", True, marks=pytest.mark.slow),
    ],
)
@examples(3)
@given(rows=st.just(9), columns=st.just(72), seed=SEEDS)
def test_rounded_rows_are_those_of_the_norm(kind, static, rows, columns, seed):
    given_values = problem(rows, columns, 1, "bfloat16", seed)
    scale = jnp.full(1, 0.02, jnp.float32) if static else None
    rounding = Rounding(kind, scale)
    want, want_stream = call("triton", *given_values, eps=1e-5)
    got, stream = call("triton", *given_values, eps=1e-5, rounding=rounding)
    np.testing.assert_array_equal(np.asarray(stream), np.asarray(want_stream))
    rounded = rounding.of(want)
    np.testing.assert_array_equal(np.asarray(got.values), np.asarray(rounded.values))
    np.testing.assert_array_equal(got.column, rounded.column)
    assert got.dtype == "bfloat16"


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.device_kind)
@pytest.mark.parametrize(("columns", "gemma"), [(4096, False), (3584, True)])
def test_lowers_for_cuda_without_a_gpu(columns, gemma, device):
    shape = jax.ShapeDtypeStruct
    operands = (
        shape((16, columns), jnp.bfloat16),
        shape((4, 16, columns), jnp.float32),
        shape((columns,), jnp.bfloat16),
    )

    def run(residual, product, weight):
        norm = Norm(weight, 1e-5, gemma)
        behind = norm if gemma else None
        return residual_norm(residual, product, norm, behind=behind, backend="triton")

    assert "residual_norm" in lowered_for_cuda(run, *operands, device=device).as_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": jnp.zeros((4, 8), "int8")}, "residual=int8"),
        ({"product": jnp.zeros((1, 4, 9), "bfloat16")}, r"product\.shape=\(1, 4, 9\)"),
        ({"product": jnp.zeros((4, 8), "bfloat16")}, r"product\.shape=\(4, 8\)"),
        ({"product": jnp.zeros((1, 4, 8), "float16")}, r"product\.dtype=float16"),
        ({"norm": Norm(jnp.zeros(8), 1e-5)}, r"norm\.weight=float32"),
        ({"behind": Norm(jnp.zeros(9, "bfloat16"), 1e-5)}, r"behind\.weight=bfloat16\(9,\)"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"backend": "xla", "interpret": True}, "interpret=True"),
    ],
)
def test_refusals(changes, message):
    given = {
        "residual": jnp.zeros((4, 8), "bfloat16"),
        "product": jnp.zeros((1, 4, 8), "bfloat16"),
        "norm": Norm(jnp.ones(8, "bfloat16"), 1e-5),
        "backend": "triton",
    }
    with pytest.raises(KernelError, match=message):
        residual_norm(**(given | changes))
