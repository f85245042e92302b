"""The commands run dry from end to end."""

from __future__ import annotations

import json
import math
import sys

import pytest

from benchmarks import kernels, tune_kernels
from benchmarks.device_run import ROOT
from benchmarks.isolated import Worker
from benchmarks.kernel_bench.cases import DecodeCase, PrefillCase, as_request
from benchmarks.kernel_bench.rows import OURS, SDPA
from benchmarks.kernel_bench.run import kernel_process
from benchmarks.kernel_bench.tuning import KINDS
from tests.benchmarks.documented import documented

pytestmark = pytest.mark.slow
EXTENSIONS = ("json", "md", "png")


@pytest.mark.parametrize("arguments", documented("python benchmarks/kernels.py")[1:], ids=" ".join)
def test_the_other_documented_uses_of_kernels(arguments, tmp_path):
    assert kernels.main([*arguments, "--dry-run", "--output", str(tmp_path)]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    # on a busy machine nothing may be steady enough to be a rate, and then there is no plot
    assert {"kernels.json", "kernels.md"} <= written <= {f"kernels.{e}" for e in EXTENSIONS}


def test_kernels(tmp_path):
    arguments = documented("python benchmarks/kernels.py")[0]
    assert kernels.main([*arguments, "--dry-run", "--no-torch", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    found = {(row["case"]["operation"], row["candidate"]): row for row in rows}
    for key in [("matmul", "int4"), ("matmul", "int8")]:
        assert 0 < found[key]["difference"] < 0.2, key
    assert found["decode", OURS]["difference"] == 0
    assert "cuDNN" in found["decode", "cuDNN paged attention"]["reason"]
    assert found["decode", SDPA]["reason"] == "left out"
    assert "Prefill attention" in (tmp_path / "kernels.md").read_text()


@pytest.mark.parametrize("arguments", documented("python benchmarks/tune_kernels.py"), ids=" ".join)
def test_tune_kernels(arguments, tmp_path):
    assert tune_kernels.main([*arguments, "--dry-run", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "tuning.json").read_text())
    wanted = {"decode"} if "--only" in arguments else set(KINDS)
    assert set(found["operations"]) == wanted
    for entry in found["operations"].values():
        for results in entry["cases"].values():
            assert not [e for e in results if e["reason"].startswith(("WRONG", "FAILED"))]
    assert "ChipTuning(" in (tmp_path / "tuning.md").read_text()


def test_a_case_in_a_process_of_its_own():
    worker = kernel_process(with_torch=False)
    options = {"dry_run": True, "torch": False, "rounds": 1}
    try:
        device = worker.call({"do": "device", **options}, 120)
        case = as_request(PrefillCase(8, 4, 2, 1, head_dim=64))
        request = {"do": "case", "case": case, "ceilings": device["ceilings"], **options}
        rows = worker.call(request, 120)
    finally:
        worker.close()
    assert OURS in [row["candidate"] for row in rows]


def test_torch_in_a_process_of_its_own():
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "benchmarks.kernel_bench.torch_peer"]
    worker = Worker(command, {"PYTHONPATH": str(ROOT)})
    cases = [DecodeCase(2, 24, 4, 2, head_dim=64), PrefillCase(20, 10, 4, 2, 2, head_dim=64)]
    try:
        for case in cases:
            answer = worker.call({"do": "prepare", "case": as_request(case)}, 120)
            # it is only ready when its result agreed with float32
            assert SDPA in answer["ready"]
            value = worker.call({"do": "sample", "name": SDPA}, 60)
            assert value is None or math.isfinite(value)
            assert worker.call({"do": "drop"}, 60) is None
    finally:
        worker.close()
