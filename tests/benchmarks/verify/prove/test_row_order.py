"""What may sum a row in several orders is found in the text of compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.verify import prove_step
from benchmarks.verify.prove import KernelUse, Requirements, absent_mesh, prove
from benchmarks.verify.prove.row_order import atomics, out_of_order, tilings
from tests.absent_devices import needs_gpu_compiler, needs_tpu_compiler

PTX = """
  red.global.add.f32 [%rd1], %f1;
  atom.global.cas.b32 %r5, [%rd2], %r3, %r4;
  red.global.add.f32 [%rd3], %f2;
  fence.proxy.async; mbarrier.arrive.shared::cta.b64 _, [%r1]; redux.sync.add.s32 %r1, %r2, %r3;
"""


def test_atomics_and_libraries_are_found() -> None:
    assert atomics(PTX) == {"red.global.add.f32": 2, "atom.global.cas.b32": 1}
    kernels = [KernelUse("sum", "xla", atomics=atomics(PTX)), KernelUse("other", "triton")]
    hlo = '%a = f32[2] custom-call(%b), custom_call_target="__cublas$lt$matmul"'
    assert out_of_order(hlo, kernels) == (
        "sum has atomics: atom.global.cas.b32, red.global.add.f32",
        "__cublas$lt$matmul is a library's",
    )
    assert out_of_order("", kernels[1:]) == ()
    counted = [KernelUse("loop_fusion_3", "xla", atomics={"atom.global.add.u32": 1})]
    assert out_of_order("%loop_fusion.3 = s32[8]{0} fusion(%a), kind=kLoop", counted) == ()
    for kind in ("f32[8]{0}", "(s32[8]{0}, bf16[8]{0})"):
        (failure,) = out_of_order(f"ROOT %loop_fusion.3 = {kind} fusion(%a)", counted)
        assert failure == "loop_fusion_3 has atomics: atom.global.add.u32"


def test_the_tilings_of_products_are_read() -> None:
    def product(*sizes: int) -> str:
        tiles = ",".join(f'"{size}"' for size in sizes)
        kind = '"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":'
        return f'%a = f32[2] fusion(%b), {kind}{{"output_tiles":[{{"sizes":[{tiles}]}}]}}\n'

    same = product(1, 64, 128) + product(64, 128)
    assert tilings(same) == {"64x128"} and out_of_order(same, ()) == ()
    (failure,) = out_of_order(same + product(16, 8), ())
    assert failure == "products have several tilings: 16x8, 64x128"


@pytest.mark.slow
@needs_gpu_compiler
def test_sums_by_atomics_fail() -> None:
    """A scatter that adds, unless XLA is told to leave out atomics."""
    mesh = absent_mesh("h200")
    rows, index = (jax.ShapeDtypeStruct((64,), dtype) for dtype in (jnp.float32, jnp.int32))

    def proved(**options):
        return prove(
            "scatter",
            lambda x, i: jnp.zeros(8).at[i].add(x),
            rows,
            index,
            mesh=mesh,
            kind="h200",
            wanted=Requirements(one_order=True),
            compiler_options=options,
        )

    (failure,) = proved().failures
    assert "has atomics" in failure and ".f32" in failure
    assert not proved(xla_gpu_exclude_nondeterministic_ops=True).failures


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("h200", marks=needs_gpu_compiler),
        pytest.param("a100", marks=needs_gpu_compiler),
        pytest.param("v5e", marks=needs_tpu_compiler),
    ],
)
def test_the_program_of_a_deterministic_engine_passes(kind: str, capsys) -> None:
    words = ["--device", kind, "--shape", "llama-1b", "--layers", "1", "--deterministic"]
    assert prove_step.main(words) == 0
    assert "deterministic, mixed[64, 256] full[80]" in capsys.readouterr().out
