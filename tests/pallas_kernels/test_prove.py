"""The proof by compilation: passes for the kernels, and fails for what it must catch."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KernelError, gpu_targets, paged_decode_attention, prove, write_kv

ROOT = Path(__file__).parents[2]
try:
    gpu_targets.require_compiler()
    MISSING = ""
except gpu_targets.CompilerMissingError as error:
    MISSING = str(error)
needs_compiler = pytest.mark.skipif(
    bool(MISSING), reason=f"no kernel is COMPILED for a GPU here: {MISSING}"
)
OPERANDS = prove._operands(16, 8, 2, 64, 16, "bfloat16")


@needs_compiler
def test_the_decode_kernel_passes():
    proof = prove.prove(
        "decode",
        functools.partial(paged_decode_attention, scale=0.125, backend="mosaic_gpu"),
        *OPERANDS,
        mesh=prove.gpu_mesh("h200"),
        wgmma=True,
        max_temporaries=2**24,
    )
    assert proof.failures == ()
    (kernel,) = [kernel for kernel in proof.kernels if kernel.source == "mosaic"]
    assert 32 < kernel.registers <= 255
    assert 2 * 4 * 64 * 64 * 2 < kernel.shared < 232448
    assert kernel.wgmma > 0
    assert "| decode |" in prove.markdown([proof])
    json.dumps(prove.asdict(proof))


@needs_compiler
def test_a_function_without_matrix_instructions_or_in_place_update_fails():
    pool = OPERANDS[1]
    token = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((4,), jnp.int32)
    proof = prove.prove(
        "write without donation",
        functools.partial(write_kv, backend="xla"),
        pool,
        token,
        token,
        index,
        index,
        mesh=prove.gpu_mesh("h200"),
        wgmma=True,
        in_place=2**30,
        max_temporaries=-1,
    )
    assert len(proof.failures) == 3
    assert any("wgmma" in failure for failure in proof.failures)
    assert any("in place" in failure for failure in proof.failures)
    assert proof.kernels, "the GPU functions that XLA wrote are reported too"


def test_spills_of_our_kernels_fail(monkeypatch, tmp_path):
    """The assembler's report is parsed; a canned one stands for a kernel that spills."""
    report = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : Function properties for k\n"
        "    64 bytes stack frame, 40 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem\n"
    )
    ptx = tmp_path / "k.ptx"
    ptx.write_text(".entry k { wgmma.mma_async; wgmma.mma_async; }")
    monkeypatch.setattr(prove, "require_compiler", lambda: Path("ptxas"))
    monkeypatch.setattr(
        prove.subprocess,
        "run",
        lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout="", stderr=report),
    )
    (kernel,) = prove._assembler_report(ptx, "mosaic", "sm_90a", 1000)
    assert kernel == prove.KernelUse("k", "mosaic", 255, 64, 1001, 2)


def test_what_is_missing_is_said_with_its_own_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(gpu_targets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_targets.shutil, "which", lambda name: None)
    assert prove.main([]) == prove.EXIT_UNAVAILABLE == 3
    message = capsys.readouterr().err
    assert "CUDA plugin" in message
    assert "ptxas" in message


def test_a_failed_proof_exits_nonzero(monkeypatch, capsys):
    bad = prove.Proof("k", 0.1, 0, 0, (), ("k spills 64 bytes",))
    monkeypatch.setattr(prove, "kernel_proofs", lambda kind: iter([bad]))
    assert prove.main([]) == prove.EXIT_FAILED
    assert "k spills 64 bytes" in capsys.readouterr().out


def test_unknown_gpus_are_refused():
    with pytest.raises(KernelError, match="h200"):
        gpu_targets.gpu_mesh("rtx")


def test_the_command_starts():
    run = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.prove", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--device" in run.stdout
