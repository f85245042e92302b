"""Results of several devices in one report; estimates are marked, absent values are told."""

from __future__ import annotations

import json

import pytest

from benchmarks import compare_devices
from benchmarks.devices import compare, report
from benchmarks.devices.energy import _rapl
from benchmarks.devices.report import Report
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench.rows import OURS, TOO_NOISY
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from tests.benchmarks.documented import documented

ENTRY = {
    "batch": 8, "dtype": "bfloat16", "tok_s": 5000.0, "ttft_ms": 2.0, "tpot_ms": 1.5,
    "roofline": 25.0, "limits": "4,000 GB/s read", "joules_per_token": 0.25, "remark": "",
}  # fmt: skip
ABOUT = {"estimated": False, "shape": "llama-125m", "length": 64}
GPU = ABOUT | {
    "name": "NVIDIA H200",
    "platform": "gpu",
    "engine": [ENTRY, {"batch": 32, "tok_s": None, "remark": "no answer"}],
    "workloads": [
        {"workload": "decode", "unit": "us", "value": None, "estimated": False, "remark": "hung"},
    ],
}
TPU = ABOUT | {
    "name": "TPU v5 lite (estimate)",
    "device_kind": "TPU v5 lite",
    "platform": "tpu",
    "estimated": True,
    "engine": [ENTRY | {"tok_s": 400.0, "joules_per_token": None}],
    "workloads": [
        {"workload": "decode", "unit": "us", "value": 12.5, "estimated": True, "remark": "bytes"}
    ],
}


def test_a_report_has_rates_cost_and_energy_and_marks_estimates():
    both = Report([GPU, TPU], {"cpu": "broken"}, {"h200": 3.6}, "EUR", "mine")
    (gpu, failed, tpu) = report.engine_rows(both)
    # 3.6 an hour at 5,000 tokens a second: 0.001 a second, a million take 200 s
    assert gpu[2:] == ["8", "5000", "2", "1.5", "25", "0.25", "0.2 EUR"]
    assert failed[2:] == ["32", *["-"] * 6]
    assert tpu[2:] == ["8", "~400", "~2", "~1.5", "~25", "-", "-"]
    columns, rows = report.kernel_rows([GPU, TPU])
    assert columns[2:] == [GPU["name"], TPU["name"]] and rows == [["decode", "us", "-", "~12.5"]]
    text, page = report.markdown(both), report.page(both)
    for told in (
        "~: an estimate, not measured.",
        "cpu: not here (broken)",
        "NVIDIA H200, decode: hung",
        "NVIDIA H200, 4,000 GB/s read",
        "NVIDIA H200, 32 requests: no answer",
        "Prices in EUR an hour (mine): h200 3.6.",
    ):
        assert told in text and told in page
    assert "0.2 EUR |" in text and "<td>0.2 EUR</td>" in page
    alone = report.markdown(Report([TPU | {"estimated": False}], {}, {}))
    assert "an estimate" not in alone and "no driver here tells it" in alone


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
    (engine,), (decode,) = found["engine"], found["workloads"]
    assert engine["tok_s"] is None and engine["remark"] == "no answer within 300 s"
    assert decode["value"] == 3.0 and decode["remark"] == "50 % of the ceiling"


def test_energy_is_a_sum_of_packages_where_it_may_be_read(tmp_path):
    assert _rapl(tmp_path) is None
    for package, microjoules in enumerate((1_500_000, 500_000)):
        folder = tmp_path / f"intel-rapl:{package}"
        folder.mkdir()
        (folder / "name").write_text(f"package-{package}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
    platform = tmp_path / "intel-rapl:2"
    platform.mkdir()
    (platform / "name").write_text("psys\n")
    (platform / "energy_uj").write_text("9000000\n")
    counter = _rapl(tmp_path)
    assert counter is not None and counter() == 2.0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--price", "h300=1"], "--price='h300' is not supported: one of h200"),
        (["--price", "h200=free"], "KIND=PRICE, a number above 0"),
        (["--include-results", "none.json"], "--include-results='none.json'"),
    ],
)
def test_what_is_refused_by_one_line(given, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare_devices.main(given) == 1
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_documented_commands_run_dry(tmp_path, monkeypatch):
    def missing():
        raise CompilerMissingError("libtpu is not installed: pip install libtpu")

    monkeypatch.setattr("benchmarks.verify.prove.tpu_targets.require_compiler", missing)
    monkeypatch.chdir(tmp_path)
    first, second, estimates = documented("python -m benchmarks.compare_devices")
    assert compare_devices.main([*first, "--dry-run", "--platform", "cpu"]) == 0
    (measured,) = json.loads((tmp_path / first[-1] / "devices.json").read_text())["devices"]
    monkeypatch.setattr(compare, "measure_device", lambda *arguments, **options: measured)
    folder = ["--output", str(tmp_path / "both")]
    assert compare_devices.main([*second, "--dry-run", "--platform", "cpu", *folder]) == 0
    both = json.loads((tmp_path / "both" / "devices.json").read_text())["devices"]
    assert both == [measured, measured]
    (entry,) = measured["engine"]
    assert entry["tok_s"] > 0 and entry["ttft_ms"] > 0 and entry["tpot_ms"] > 0
    (kernel,) = measured["workloads"]
    assert kernel["value"] or kernel["remark"] == TOO_NOISY
    folder = ["--output", str(tmp_path / "all")]
    assert compare_devices.main([*estimates, "--no-measure", "--dry-run", *folder]) == 0
    page = (tmp_path / "all" / "devices.html").read_text()
    assert page.count("(estimate)") > 4 and "TPU v6 lite" in page
    assert "libtpu is not installed" in page, "kernels of a TPU need its compiler"
    for name in ("devices.png", "kernels.png"):
        assert (tmp_path / "both" / name).stat().st_size > 1000
