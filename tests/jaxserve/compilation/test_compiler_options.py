"""Options of XLA by platform."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from benchmarks.verify.prove import gpu_targets
from jaxserve.compilation.compiler_options import PINNED, accepted, compiler_options
from tests.absent_devices import needs_gpu_compiler


def test_only_gpus_have_options() -> None:
    assert compiler_options("cpu") == compiler_options("tpu") == {}
    for platform in ("gpu", "cuda"):
        options = compiler_options(platform)
        assert options["xla_disable_hlo_passes"] == "rematerialization"
        assert "CUSTOM_CALL" in options["xla_gpu_enable_command_buffer"].split(",")
        assert options["xla_gpu_enable_latency_hiding_scheduler"] is False


def test_collectives_are_in_graphs_where_that_is_asked_for() -> None:
    before, after = (
        compiler_options("gpu", graph_collectives=asked)["xla_gpu_enable_command_buffer"]
        for asked in (False, True)
    )
    assert after == f"{before},COLLECTIVES"


def test_xla_divides_no_product_where_the_linear_layers_do() -> None:
    options = compiler_options("gpu", divides_products=True)
    assert options["xla_disable_hlo_passes"] == "rematerialization,splitk-rewriter"


def test_xla_knows_the_options(caplog) -> None:
    """Of every version of JAX that the tests run with; the names are parsed on a CPU too."""
    every = {"divides_products": True, "graph_collectives": True, "one_program": True}
    options = compiler_options("gpu", **every)
    assert PINNED.items() <= options.items()
    with caplog.at_level(logging.WARNING):
        assert accepted(options) == options
    assert not caplog.records
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(2))
    assert lowered.compile(compiler_options=options)(jnp.zeros(2))[0] == 1


def test_an_option_that_xla_does_not_know_is_left_out_with_a_warning(caplog) -> None:
    options = {"xla_gpu_no_such_thing": "1", "xla_gpu_enable_command_buffer": "FUSION,NONSENSE"}
    with caplog.at_level(logging.WARNING):
        level = {"xla_gpu_autotune_level": "4"}
        assert accepted(options | level) == level
    assert len(caplog.records) == len(options)
    for name, record in zip(options, caplog.records, strict=True):
        assert name in record.getMessage()
    assert jax.__version__ in caplog.text


def test_a_value_of_the_wrong_type_is_an_error() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_autotune_level"):
        accepted({"xla_gpu_autotune_level": "much"})


def test_results_of_autotuning_are_kept_beside_the_compilation_cache() -> None:
    """JAX's default, and JAX leaves the folder out of the key of an entry."""
    kept = jax.config.values["jax_persistent_cache_enable_xla_caches"]
    assert kept == "xla_gpu_per_fusion_autotune_cache_dir"


@needs_gpu_compiler
def test_a_program_of_an_absent_gpu_compiles_with_the_options() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    options = compiler_options("gpu", divides_products=True)
    mesh = gpu_targets.gpu_mesh("h200")
    compiled = gpu_targets.compile_for(mesh, lambda x: x @ x, x, compiler_options=options)
    assert "gemm" in compiled.as_text()
