"""gpu_check without a GPU: every section runs dry, and a failure is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.gpu import check
from benchmarks.gpu.setting import Section

ROOT = Path(__file__).parents[3]


SLOW = ("engine correctness", "host time", "engine speed")  # they compile whole engines
SECTIONS = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name, _ in check.SECTIONS
]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_runs_dry(name, tmp_path):
    # speeds are given as shares of the copy bandwidth, so that section comes along
    arguments = ["--dry-run", "--only", name, "--only", "bandwidth", "--output", str(tmp_path)]
    assert check.main(arguments) == 0
    results = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(results) == {name, "bandwidth"}
    assert results[name]["rows"]
    assert not results[name]["failures"]
    assert f"## {name}" in (tmp_path / "gpu_check.md").read_text()


def test_a_failing_section_is_reported_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    def broken(setting):
        raise ArithmeticError("no such luck")

    def wrong(setting):
        return Section(failures=["error 3 > 2"])

    def fine(setting):
        return Section(columns=("a",), rows=[(1,)])

    sections = [("broken", broken), ("wrong", wrong), ("fine", fine)]
    monkeypatch.setattr(check, "SECTIONS", sections)
    assert check.main(["--dry-run", "--output", str(tmp_path)]) == check.EXIT_FAILED
    report = (tmp_path / "gpu_check.md").read_text()
    assert "FAILED: ArithmeticError: no such luck" in report
    assert "FAILED: error 3 > 2" in report
    assert "| 1 |" in report
    assert "broken, wrong" in capsys.readouterr().err


def test_correctness_fails_when_the_kernel_is_wrong(monkeypatch, tmp_path):
    from pallas_kernels.paged_attention import xla

    right = xla.decode
    monkeypatch.setattr(xla, "decode", lambda *a, **k: right(*a, **k) * 1.1)
    arguments = ["--dry-run", "--only", "decode correctness", "--output", str(tmp_path)]
    assert check.main(arguments) == check.EXIT_FAILED


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_the_script_says_that_there_is_no_gpu():
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_check"], capture_output=True, text=True
    )
    assert run.returncode == check.EXIT_NO_GPU == 3
    assert "needs an NVIDIA GPU" in run.stderr
