"""Rounding, calibration, AWQ and GPTQ on small matrices."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.quantize.awq import best_factors, clipped
from checkpoints.quantize.calibration import METHODS, activation_scale
from checkpoints.quantize.gptq import gptq, hessian
from checkpoints.quantize.rounding import (
    RoundedMatrix,
    round_fp8,
    round_integers,
    round_with_zeros,
)
from checkpoints.quantize.schemes import SCHEMES
from checkpoints.quantize.tensors import stored_tensors
from tests.checkpoints.quantize import decoding

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((24, 64)).astype(np.float32)


def correlated(rows: int, inputs: int) -> np.ndarray:
    """Activations of few directions, and some inputs much larger than others."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, 8)) @ rng.standard_normal((8, inputs))
    x += 0.3 * rng.standard_normal((rows, inputs))
    x[:, ::9] *= 12
    return x.astype(np.float32)


def output_error(rounded: RoundedMatrix, weight: np.ndarray, x: np.ndarray) -> float:
    return float(np.square(x @ (rounded.dequantized() - weight).T).mean())


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 16), (4, 16), (4, None)])
def test_numbers_are_rounded_to_the_nearest_step(bits: int, group: int | None) -> None:
    rounded = round_integers(WEIGHT, bits, group, F16)
    step = rounded.scales.repeat(64 // rounded.scales.shape[1], axis=1)
    assert (np.abs(rounded.dequantized() - WEIGHT) <= step * 0.52).all()
    assert np.abs(rounded.elements).max() == 2 ** (bits - 1) - 1
    assert (rounded.scales == rounded.scales.astype(F16)).all()


def test_a_row_of_zeros_stays_one() -> None:
    zeros = np.zeros((2, 32), np.float32)
    for rounded in (
        round_integers(zeros, 4, 16, F32),
        round_fp8(zeros, F32),
        round_with_zeros(zeros, 16, F32),
    ):
        assert (rounded.dequantized() == 0).all()


def test_unsigned_integers_reach_from_the_smallest_number_to_the_largest() -> None:
    shifted = np.abs(WEIGHT) + 0.01
    with_zeros, without = round_with_zeros(shifted, 16, F32), round_integers(shifted, 4, 16, F32)
    assert output_error(with_zeros, shifted, np.eye(64)) < 0.4 * output_error(
        without, shifted, np.eye(64)
    )


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_stored_tensors_mean_what_was_rounded(name: str, dtype: np.dtype) -> None:
    scheme, group = SCHEMES[name], 16
    if name == "int4-awq":
        rounded = round_with_zeros(WEIGHT, group, dtype)
    elif name == "int4-gptq":
        rounded = gptq(WEIGHT, hessian(correlated(99, 64)), group, dtype)
    elif name == "fp8":
        rounded = round_fp8(WEIGHT, dtype)
    else:
        rounded = round_integers(WEIGHT, scheme.bits, group if scheme.grouped else None, dtype)
    tensors = stored_tensors("m", scheme, rounded, dtype, 0.5 if "static" in name else None)
    if scheme.method == "awq":
        found = decoding.awq(tensors, "m", group)
    elif scheme.method == "gptq":
        found = decoding.gptq(tensors, "m")
    else:
        found = decoding.compressed(tensors, "m", {"num_bits": scheme.bits})
    assert np.array_equal(found.astype(np.float32), rounded.dequantized())
    assert ("m.input_scale" in tensors) == ("static" in name)


def test_gptq_of_independent_inputs_rounds_to_the_nearest() -> None:
    found = gptq(WEIGHT, np.eye(64, dtype=np.float32), 16, F32, act_order=False).dequantized()
    scales = np.abs(WEIGHT.reshape(24, 4, 16)).max(axis=-1) * 2 / 15
    steps = scales.repeat(16, axis=1)
    wanted = np.rint(WEIGHT / steps).clip(-8, 7) * steps
    assert np.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("inputs", [64, 192])
@pytest.mark.parametrize("group", [16, 64, None])
def test_gptq_errs_less_than_rounding(inputs: int, group: int | None) -> None:
    """Also with more inputs than are handled in one block."""
    weight = np.random.default_rng(2).standard_normal((40, inputs)).astype(np.float32)
    x = correlated(500, inputs)
    nearest = output_error(round_integers(weight, 4, group, F32), weight, x)
    plain = output_error(gptq(weight, hessian(x), group, F32, act_order=False), weight, x)
    ordered = output_error(gptq(weight, hessian(x), group, F32), weight, x)
    assert plain < 0.6 * nearest and ordered < 0.6 * nearest


def test_gptq_hands_errors_on_as_its_definition_does() -> None:
    """Against the definition: after each input the others are solved for again."""
    inputs = 12
    weight = np.random.default_rng(3).standard_normal((5, inputs)).astype(np.float64)
    second = hessian(correlated(60, inputs)).astype(np.float64)
    damped = second + np.eye(inputs) * 0.01 * np.diagonal(second).mean()
    work, left = weight.copy(), np.arange(inputs)
    scale = np.abs(weight).max(axis=1) * 2 / 15
    wanted = np.empty_like(weight)
    for column in range(inputs):
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        now = work[:, column]
        wanted[:, column] = np.rint(now / scale).clip(-8, 7) * scale
        error = (now - wanted[:, column]) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    found = gptq(weight.astype(np.float32), second.astype(np.float32), None, F32, act_order=False)
    assert np.allclose(found.dequantized(), wanted, atol=1e-4)


def test_awqs_factors_and_clipping_make_outputs_more_exact() -> None:
    x = correlated(256, 64)
    nearest = output_error(round_with_zeros(WEIGHT, 16, F32), WEIGHT, x)
    factors = best_factors([WEIGHT, WEIGHT[:7]], x, 16, np.abs(x).mean(axis=0))
    scaled = round_with_zeros(WEIGHT * factors, 16, F32)
    got = float(np.square((x / factors) @ scaled.dequantized().T - x @ WEIGHT.T).mean())
    assert got < 0.7 * nearest
    peaked = WEIGHT.copy()
    peaked[:, ::16] *= 3
    cut = clipped(peaked, x, 16)
    assert (np.abs(cut) <= np.abs(peaked)).all() and (cut != peaked).any()
    plain = round_with_zeros(peaked, 16, F32)
    assert output_error(round_with_zeros(cut, 16, F32), peaked, x) < output_error(plain, peaked, x)


def test_static_scales() -> None:
    x = np.random.default_rng(4).standard_normal((2000, 50)).astype(np.float32)
    x[0, 0] = 400
    found = {method: activation_scale(x, method) for method in METHODS}
    assert found["minmax"] == pytest.approx(400 / 127)
    assert 3 / 127 < found["percentile"] < 5 / 127
    rounded = {m: np.rint(x / s).clip(-128, 127) * s for m, s in found.items()}
    errors = {m: float(np.square(x - r).sum()) for m, r in rounded.items()}
    assert errors["mse"] <= errors["minmax"]
    without = {method: activation_scale(x[1:], method) for method in METHODS}
    assert without["mse"] <= without["minmax"] < 6 / 127
    assert activation_scale(np.zeros((3, 3), np.float32), "mse") == 1.0
    with pytest.raises(ValueError, match="finite"):
        activation_scale(np.full((2, 2), np.inf, np.float32), "minmax")
    with pytest.raises(ValueError, match="entropy"):
        activation_scale(x, "entropy")
