"""Options of XLA by platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.execution.compiler_options import compiler_options


def test_rematerialisation_is_off_on_gpu_alone() -> None:
    for platform in ("gpu", "cuda"):
        assert compiler_options(platform) == {"xla_disable_hlo_passes": "rematerialization"}
    assert compiler_options("cpu") == compiler_options("tpu") == {}


def test_xla_knows_the_options() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(2))
    for platform in ("cpu", "gpu"):
        assert lowered.compile(compiler_options=compiler_options(platform))(jnp.zeros(2))[0] == 1
