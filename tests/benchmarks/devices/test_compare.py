"""Results of several devices in one table; estimates are marked, absent values are told."""

from __future__ import annotations

import json

import pytest

from benchmarks import compare_devices
from benchmarks.devices import compare
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench.rows import OURS, TOO_NOISY
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from tests.benchmarks.documented import documented

GPU = {
    "name": "NVIDIA X",
    "platform": "gpu",
    "workloads": [
        {"workload": "engine", "unit": "tok/s", "value": 5000.0, "estimated": False, "remark": ""},
        {"workload": "decode", "unit": "us", "value": None, "estimated": False, "remark": "hung"},
    ],
}
TPU = {
    "name": "TPU v5e (estimate)",
    "platform": "tpu",
    "workloads": [
        {"workload": "decode", "unit": "us", "value": 12.5, "estimated": True, "remark": "bytes"}
    ],
}


def test_devices_are_columns_and_estimates_are_marked():
    columns, rows = compare.merged([GPU, TPU])
    assert columns == ["workload", "unit", "NVIDIA X", "TPU v5e (estimate)"]
    assert rows == [["engine", "tok/s", "5000", "-"], ["decode", "us", "-", "~12.5"]]
    text = compare.markdown([GPU, TPU], {"cpu": "broken"})
    assert "~: estimated from the compiled executable, not measured." in text
    assert "- NVIDIA X, decode: hung" in text and "- cpu: not here (broken)" in text
    assert "estimated" not in compare.markdown([GPU], {})


def test_a_workload_that_fails_is_told_and_the_others_are_measured():
    class Device:
        def call(self, request, limit_s):
            if request["do"] == "device":
                return {"device_kind": "X", "platform": "cpu", "jax": "1", "ceilings": {}}
            if request["do"] == "engine":
                raise WorkerError("no answer within 300 s")
            row = {"us": 3.0, "percent": 50.0, "reason": "", "candidate": OURS}
            return [row, row | {"candidate": "torch SDPA", "us": 1.0}]

    found = compare.measure_device(Device(), "llama-125m", 16, dry_run=True)
    engine, decode = found["workloads"]
    assert engine["value"] is None and engine["remark"] == "no answer within 300 s"
    assert decode["value"] == 3.0 and decode["remark"] == "50 % of the ceiling"


@pytest.mark.slow
def test_the_documented_commands_run_dry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = documented("python benchmarks/compare_devices.py")
    assert compare_devices.main([*first, "--dry-run", "--platform", "cpu"]) == 0
    (measured,) = json.loads((tmp_path / first[-1] / "devices.json").read_text())["devices"]
    monkeypatch.setattr(compare, "measure_device", lambda *arguments, **options: measured)
    folder = ["--output", str(tmp_path / "both")]
    assert compare_devices.main([*second, "--dry-run", "--platform", "cpu", *folder]) == 0
    both = json.loads((tmp_path / "both" / "devices.json").read_text())["devices"]
    assert [device["name"] for device in both] == ["cpu", "cpu"]
    assert both == [measured, measured]
    assert len(measured["workloads"]) == 2
    for entry in measured["workloads"]:
        assert entry["value"] or entry["remark"] == TOO_NOISY, entry
    assert (tmp_path / "both" / "devices.png").stat().st_size > 1000


def test_an_estimate_without_its_compiler_is_one_line(monkeypatch, capsys, tmp_path):
    def missing():
        raise CompilerMissingError("libtpu is not installed: pip install libtpu")

    monkeypatch.setattr("benchmarks.verify.prove.tpu_targets.require_compiler", missing)
    monkeypatch.setattr(compare, "installed", lambda platform: pytest.fail("it went on"))
    assert compare_devices.main(["--estimate", "v5e", "--output", str(tmp_path / "here")]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "compare_devices.py: --estimate v5e: libtpu is not installed: pip install libtpu\n"
    )
    assert not captured.out and not (tmp_path / "here").exists()
