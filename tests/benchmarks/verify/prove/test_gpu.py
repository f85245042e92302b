"""Reading PTX, the assembler's report and XLA's dump folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.verify.prove import KernelUse, gpu

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode' for 'sm_90a'
ptxas info    : Function properties for paged_decode
    64 bytes stack frame, 40 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, 400 bytes cmem[0]
"""
PTX = """\
.visible .entry paged_decode(
) .reqntid 128, 1, 1 {
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
  wgmma.wait_group.sync.aligned 0;
  @%p1 cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1];
  cp.async.bulk.commit_group;
}
.visible .entry merge(
) {
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
  cp.async.cg.shared.global [%r1], [%rd1], 16;
  cp.async.commit_group;
}
"""


def test_instructions_are_told_apart() -> None:
    assert gpu.instruction_mix(PTX) == {"wgmma": 2, "mma": 1, "tma": 1, "cp_async": 1}
    assert gpu.instruction_mix("add.f32 %f1, %f2, %f3; cp.async.wait_group 0;") == {}


def test_the_assembler_report_is_read_by_function() -> None:
    assert gpu.assembler_report(REPORT) == {"paged_decode": (255, 64, 1), "merge": (30, 0, 0)}


IGNORED = "ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored, as it is 168"
SERIALIZED = (
    "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized "
    "due to insufficient register resources for the function '{}'"
)


def test_remarks_belong_to_the_function_that_they_name() -> None:
    report = "\n".join((REPORT, SERIALIZED.format("merge"), IGNORED))
    assert gpu.remarks(REPORT, "paged_decode") == ()
    assert gpu.remarks(report, "paged_decode") == (IGNORED,)
    assert gpu.remarks(report, "merge") == (SERIALIZED.format("merge"), IGNORED)


def test_a_mosaic_dump_is_read(tmp_path: Path) -> None:
    (tmp_path / "paged_decode_0.ptx").write_text(PTX)
    (tmp_path / "paged_decode_0.ptxas").write_text(
        REPORT[: REPORT.index("'merge'")] + f"\n{IGNORED}\n"
    )
    (tmp_path / "paged_decode_0.resources.txt").write_text(
        "Resources(smem_scratch_bytes=1000, x=1)"
    )
    (kernel,) = gpu.mosaic_uses(tmp_path)
    assert (kernel.name, kernel.source) == ("paged_decode", "mosaic_gpu")
    assert (kernel.registers, kernel.spilled, kernel.shared) == (255, 64, 1001)
    assert kernel.instructions["wgmma"] == 2
    assert kernel.remarks == (IGNORED,)


def test_dumped_files_of_a_kernel_need_not_have_one_number(tmp_path: Path) -> None:
    """JAX 0.12 numbers lowered and assembled kernels apart, each in its own order."""
    for name, number, size in (("paged_decode", 0, 1000), ("merge", 1, 20), ("merge", 3, 30)):
        (tmp_path / f"{name}_{number}.resources.txt").write_text(f"smem_scratch_bytes={size}, x=1")
    (tmp_path / "paged_decode_1.ptx").write_text(PTX)
    (tmp_path / "paged_decode_1.ptxas").write_text(REPORT[: REPORT.index("'merge'")])
    (tmp_path / "merge_0.ptx").write_text(PTX)
    (tmp_path / "merge_0.ptxas").write_text(
        REPORT[REPORT.index("ptxas info    : Compiling entry function 'merge'") :]
    )
    shared = {kernel.name: kernel.shared for kernel in gpu.mosaic_uses(tmp_path)}
    assert shared == {"paged_decode": 1001, "merge": 30}


def test_triton_kernels_are_found_among_those_of_xla(monkeypatch, tmp_path: Path) -> None:
    hlo = (
        '%a = f32[2] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
        'backend_config={grid_x = 1, name = "paged_decode", num_warps = 4}\n'
        '%b = f32[2] custom-call(%x), custom_call_target="other", backend_config={name = "merge"}\n'
    )
    names = gpu.triton_kernels(hlo)
    assert names == {"paged_decode"}
    (tmp_path / "module.ptx").write_text(PTX)
    (tmp_path / "module.thunk_sequence.txt").write_text(
        "001: kCustomKernel paged_decode grid: [1, 1, 1] threads: [128, 1, 1]  "
        "shared_memory: 49152 bytes\n"
        "002: kCustomKernel merge grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 7 bytes\n"
    )
    monkeypatch.setattr(gpu, "require_compiler", lambda: Path("ptxas"))
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "", REPORT)
    )
    ours, theirs = gpu.xla_uses(tmp_path, names, "sm_90a")
    assert (ours.name, ours.source, ours.spilled) == ("paged_decode", "triton", 64)
    assert ours.shared == 49152 + 1
    assert ours.instructions == {"wgmma": 2, "tma": 1}
    assert (theirs.name, theirs.source, theirs.registers) == ("merge", "xla", None)
    assert (theirs.shared, theirs.instructions) == (7, {"mma": 1, "cp_async": 1})


def test_a_numbered_function_keeps_its_name() -> None:
    names = {"paged_decode", "paged_decode_merge"}
    assert gpu.is_named("paged_decode_1", names)
    assert gpu.is_named("paged_decode_merge__2", names)
    assert not gpu.is_named("loop_fusion_1", names)


def test_a_kernel_that_was_assembled_for_an_earlier_program_is_named() -> None:
    call = '%a = f32[2] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={PLACE}\n'
    hlo = "".join(
        call.replace("PLACE", f'op_name="jit(step)/jit(_attend)/{name}/mpmd_map"')
        for name in ("paged_decode", "paged_decode_merge", "paged_decode")
    )
    merge = KernelUse("paged_decode_merge_mosaic_gpu_kernel", "mosaic_gpu", 40)
    (reused,) = gpu.reused_uses(hlo, [merge])
    assert (reused.name, reused.reused, reused.registers) == ("paged_decode", True, None)
    decode = KernelUse("paged_decode_mosaic_gpu_kernel", "mosaic_gpu", 80)
    assert list(gpu.reused_uses(hlo, [merge, decode])) == []
