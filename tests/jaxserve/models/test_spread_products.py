"""Quantised products over 2, 4 and 8 fake devices against float64, by each backend's kernel."""

from __future__ import annotations

import json

import pytest

from tests.fake_devices import said

# kernels multiply what is stored exactly; XLA rounds 4-bit weights to the type of x first
BOUND, ROUNDED = 1e-6, 8e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "interpreter"), [("xla", "none"), ("triton", "plain"), ("mosaic_tpu", "plain")]
)
def test_against_float64(backend: str, interpreter: str) -> None:
    """The interpreter of Mosaic GPU kernels has one shared memory for all devices that run at once,
    so theirs are only compiled for several (`prove_step`)."""
    lines = said(8, "-m", "tests.jaxserve.models.spread_products", backend, interpreter)
    found: dict[str, float] = json.loads(lines[-1])
    assert len(found) == 7 * 2 * 3
    for name, error in found.items():
        kind, used = name.split(", ")[0], name.split(", ")[-1]
        rounds = kind.startswith("int4") and "xla" in used
        assert error <= (ROUNDED if rounds else BOUND), f"{name}: {error}"
    of_kernel = [name for name in found if name.endswith(backend)]
    # a TPU has no product of e4m3 numbers, nor one with 384 inputs of 4 bits; Triton not the first
    assert len(of_kernel) == {"xla": 42, "triton": 36, "mosaic_tpu": 33}[backend]
