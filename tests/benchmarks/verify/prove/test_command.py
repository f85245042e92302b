"""The command: what it prints, writes and exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.verify import prove
from benchmarks.verify.prove import __main__ as command
from benchmarks.verify.prove import gpu_targets, tpu_targets
from pallas_kernels import KernelError

ROOT = Path(__file__).parents[4]
PASSED = prove.Proof("good", "h200", 0.1, prove.Memory(1, 1, 0, 0), (), (), ())


def test_what_is_missing_is_said_with_its_own_exit_code(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_targets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_targets.shutil, "which", lambda name: None)
    assert command.main(["--quick"]) == prove.EXIT_UNAVAILABLE == 3
    message = capsys.readouterr().err
    assert "CUDA plugin" in message
    assert "ptxas" in message
    assert "libtpu" in message


def test_one_failed_proof_exits_nonzero_and_the_others_are_reported(
    monkeypatch, capsys, tmp_path
) -> None:
    def proof(case, kind):
        if case.backend == "xla":
            return PASSED
        raise ValueError("\nthe tile is too large\n  by 4 bytes\nthird line")

    monkeypatch.setattr(command, "prove_case", proof)
    table, data = tmp_path / "table.md", tmp_path / "data.json"
    arguments = ["--device", "h200", "--markdown", str(table), "--json", str(data)]
    assert command.main(arguments) == prove.EXIT_FAILED
    captured = capsys.readouterr()
    assert "does not compile: ValueError: the tile is too large by 4 bytes\n" in captured.err
    assert "| good | h200 |" in captured.out
    assert "| good | h200 |" in table.read_text()
    assert len(json.loads(data.read_text())["proofs"]) == len(prove.cases_for("h200"))


def test_a_missing_compiler_does_not_hide_the_other_kinds(monkeypatch, capsys) -> None:
    def proof(case, kind):
        if kind in tpu_targets.TPU_TARGETS:
            raise gpu_targets.CompilerMissingError("no libtpu")
        return PASSED

    monkeypatch.setattr(command, "prove_case", proof)
    assert command.main(["--device", "v5e", "h200"]) == prove.EXIT_UNAVAILABLE
    captured = capsys.readouterr()
    assert "for v5e here: no libtpu" in captured.err
    assert "| good | h200 |" in captured.out
    assert command.main(["--device", "h200"]) == 0


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.parse(["--device", "rtx"])
    for mesh in (gpu_targets.gpu_mesh, tpu_targets.tpu_mesh, prove.absent_mesh):
        with pytest.raises(KernelError, match="one of"):
            mesh("rtx")


@pytest.mark.slow
def test_the_command_starts() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.verify.prove", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--device" in run.stdout
