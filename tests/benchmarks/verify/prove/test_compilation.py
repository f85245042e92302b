"""The proof by compilation: passes for the kernels, and fails for what it must catch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from benchmarks.verify.prove import (
    Attention,
    Case,
    Requirements,
    absent_mesh,
    attempt,
    prove,
    prove_case,
)
from benchmarks.verify.prove.compilation import count_recomputed
from pallas_kernels import write_kv
from tests.absent_devices import needs_gpu_compiler, needs_tpu_compiler

MATRIX = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)


@needs_gpu_compiler
def test_the_hopper_decode_kernel_passes():
    case = Case("decode", "mosaic_gpu", ("h200",), Attention(16, 8, 2, 64), "wgmma")
    proof = prove_case(case, "h200")
    assert proof.failures == ()
    ours = [kernel for kernel in proof.kernels if kernel.source == "mosaic_gpu"]
    kernel = max(ours, key=lambda kernel: kernel.shared)  # the other one merges the splits
    assert 32 < kernel.registers <= 255
    assert 2 * 4 * 64 * 64 * 2 < kernel.shared < 232448
    assert kernel.instructions["wgmma"] > 0
    assert kernel.instructions["tma"] > 0
    assert any(kernel.source == "xla" for kernel in proof.kernels)


def write(donated: bool, kind: str):
    pool = jax.ShapeDtypeStruct((1024, 16, 2, 2, 128), jnp.bfloat16)
    token = jax.ShapeDtypeStruct((4, 2, 128), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((4,), jnp.int32)
    size = pool.size * 2
    return prove(
        "write",
        functools.partial(write_kv, backend="xla"),
        *(pool, token, token, index, index),
        mesh=absent_mesh(kind),
        kind=kind,
        wanted=Requirements(in_place=size, max_temporaries=size // 2, capacity=2 * size),
        **({"donate_argnums": 0} if donated else {}),
    )


def judged(kind: str) -> None:
    assert write(True, kind).failures == ()
    copied = write(False, kind).failures
    assert any("bytes are in place" in failure for failure in copied)
    assert any("bytes of device memory" in failure for failure in copied)


@needs_gpu_compiler
def test_a_copied_pool_fails_on_a_gpu():
    judged("a100")


@needs_tpu_compiler
def test_a_copied_pool_fails_on_a_tpu():
    judged("v5e")


def product(warps: int, rows: int):
    """x @ x by a Triton kernel: with few warps and many rows its accumulator cannot fit."""

    def kernel(a, b, out):
        def body(i, total):
            return total + plt.dot(a[:, pl.ds(i * 32, 32)], b[pl.ds(i * 32, 32), :])

        total = jnp.zeros(out.shape, jnp.float32)
        out[...] = lax.fori_loop(0, 256 // 32, body, total).astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid=(256 // rows, 256 // rows),
        in_specs=[
            pl.BlockSpec((rows, 256), lambda i, j: (i, 0)),
            pl.BlockSpec((256, rows), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((rows, rows), lambda i, j: (i, j)),
        out_shape=MATRIX,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=2),
        name="product",
    )


@needs_gpu_compiler
@pytest.mark.parametrize("spilling", [False, True])
def test_a_triton_kernel_that_spills_fails(spilling: bool):
    proof = prove(
        "product",
        lambda x: product(1 if spilling else 8, 128 if spilling else 64)(x, x),
        MATRIX,
        mesh=absent_mesh("a100"),
        kind="a100",
        wanted=Requirements(instructions={"product": "mma"}, own_kernel=True),
    )
    (kernel,) = [kernel for kernel in proof.kernels if kernel.source == "triton"]
    assert kernel.registers is not None
    assert kernel.shared
    assert [failure for failure in proof.failures if "spills" in failure] == list(proof.failures)
    assert bool(proof.failures) == spilling


@needs_gpu_compiler
def test_a_kernel_without_matrix_instructions_fails():
    def double(x, out):
        out[...] = x[...] * 2

    vector = jax.ShapeDtypeStruct((1024,), jnp.float32)
    call = pl.pallas_call(
        double, out_shape=vector, compiler_params=plt.CompilerParams(), name="double"
    )
    wanted = Requirements(instructions={"double": "mma"})
    proof = prove("double", call, vector, mesh=absent_mesh("a100"), kind="a100", wanted=wanted)
    assert proof.failures == ("no kernel named double uses mma",)


@needs_gpu_compiler
def test_a_kernel_that_does_not_compile_fails_alone():
    # 8-bit pages without scales
    case = Case("decode", "mosaic_gpu", ("h200",), Attention(pages="int4"), "wgmma")
    proof = attempt(case.name, "h200", lambda: prove_case(case, "h200"))
    (failure,) = proof.failures
    assert failure.startswith("does not compile: KernelError: kv_pages.dtype")
    assert proof.memory is None


@needs_tpu_compiler
def test_a_tpu_kernel_shows_its_vector_memory_and_xla_its_cost():
    def kernel(a, b, out):
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32).astype(out.dtype)

    call = pl.pallas_call(
        kernel, out_shape=MATRIX, compiler_params=pltpu.CompilerParams(), name="product"
    )
    wanted = Requirements(instructions={"product": "matmul"}, own_kernel=True)
    mesh = absent_mesh("v6e")
    proof = prove("product", lambda x: call(x, x) @ x, MATRIX, mesh=mesh, kind="v6e", wanted=wanted)
    assert proof.failures == ()
    (kernel,) = proof.kernels
    assert kernel.source == "mosaic_tpu"
    assert kernel.vmem is not None
    (cost,) = proof.costs
    assert cost.source == "XLA"
    assert cost.flops >= 2 * 256**3
    plain = prove("plain", lambda x: x @ x, MATRIX, mesh=mesh, kind="v6e", wanted=wanted)
    assert len(plain.failures) == 2


def test_what_is_computed_again_is_counted_without_free_sources() -> None:
    hlo = """
  %dot.1.remat = bf16[8,8]{1,0} dot(%a, %b)
  ROOT %gather.remat2.1 = bf16[8,8]{1,0} gather(%dot.1.remat, %c)
  %loop_broadcast_fusion.rematerialized = bf16[8,8]{1,0} fusion(), calls=%fused
"""
    assert count_recomputed(hlo) == 2
