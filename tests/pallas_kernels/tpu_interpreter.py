"""JAX's TPU interpreter as the tests use it, and what it says of races."""

from __future__ import annotations

import pytest
from jax.experimental.pallas import tpu as pltpu

# Memory that nothing has written is NaN, and DMAs run when they are waited for. With clocks enough
# nearly every DMA has one of its own: of two that share a clock no race is seen.
INTERPRETER = pltpu.InterpretParams(detect_races=True, vector_clock_size=512)


def no_races(capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether the interpreter has reported none; it prints them."""
    return "RACE" not in "".join(capfd.readouterr())
