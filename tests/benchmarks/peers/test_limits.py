"""The least work of a cell; a figure beyond the machine is told and fails the run."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.model_shapes import write_config
from benchmarks.peers import __main__ as command
from benchmarks.peers import limits as machine
from benchmarks.peers.report import impossible, make_report, markdown
from benchmarks.peers.rounds import EngineRecord
from benchmarks.peers.workload import Cell, fixed_batch, prefill
from checkpoints import bundled_model_path
from jaxserve.bench.device_limits import MARGIN, Limits, measure_limits
from jaxserve.models.config_reader import read_model_config

MACHINE = Limits(flops_per_second=100e9, bytes_per_second=10e9, product="a product")


@pytest.fixture
def config(tmp_path):
    return read_model_config(write_config("llama-125m", tmp_path))


def told(config, cell, seconds, bits=16):
    work = machine.least_work(cell, config, bits)
    return MACHINE.beyond("x", seconds, work.flops, work.read_bytes, bits)


def test_work_of_a_cell(config):
    layers, head = config.numbers_per_token, 32000 * 768
    work = machine.least_work(Cell("c", 1, [[1] * 5, [1] * 3], [1, 4]), config, 16)
    # 5 steps: one request at a time; 4 x 3 + 0 + 1 + 2 + 3 and 5 keys, of a byte a number
    kv = 2 * 4 * 64 * 12
    assert work.read_bytes == 5 * 2 * (layers + head) + (12 + 6 + 5) * kv
    tokens = 5 + 3 + 3
    pairs = sum(range(1, 6)) + sum(range(1, 7))
    assert work.flops == 2 * (tokens * layers + 5 * head + 12 * 2 * 12 * 64 * pairs)


def test_prompts_that_were_not_computed_are_told(config):
    cell = prefill(16, 32000)
    least = machine.least_work(cell, config, 16).flops / 100e9
    assert told(config, cell, least) == told(config, cell, least / MARGIN * 1.01) == []
    (line,) = told(config, cell, least / 10)
    assert line.startswith("x: 1000.0 GFLOP/s at least") and "100.0 GFLOP/s that this" in line


def test_weights_that_were_not_read_are_told(config):
    cell = fixed_batch(1, 32, 128, 32000)
    least = machine.least_work(cell, config, 16).read_bytes / 10e9
    assert told(config, cell, least) == []
    lines = told(config, cell, least / 2)
    assert len(lines) == 1 and "20.0 GB/s" in lines[0] and "10.0 GB/s" in lines[0]
    assert told(config, cell, least / 2, bits=8) == []  # half the bytes


def test_bits_of_the_weights_follow_from_the_settings():
    assert machine.weight_bits("bfloat16", {}) == 16
    assert machine.weight_bits("float32", {"quantization": None}) == 32
    assert machine.weight_bits("bfloat16", {"quantization": "int8"}) == 8
    assert machine.weight_bits("bfloat16", {"weights": "q4_0"}) == 4
    assert machine.weight_bits("bfloat16", {"quantization": "anything"}) == 4


def report_of(cells, seconds):
    answer = {"seconds": seconds, "first_tokens": [1], "figures": {}}
    record = EngineRecord("jaxserve", {"jaxserve": "1"}, 1.0, answers={0: [answer]})
    return make_report([record], cells, {"dtype": "bfloat16"}, {"prefix cache": "off"})


def test_the_report_names_figure_and_limit(config):
    cells = [prefill(4, 32000)]
    report = report_of(cells, 1e-3)
    report["impossible"] = impossible(report, cells, config, MACHINE, {"jaxserve": {}})
    assert any("jaxserve, prefill 4: " in line for line in report["impossible"])
    assert "IMPOSSIBLE on this machine" in markdown(report)
    slow = report_of(cells, 1e3)
    assert impossible(slow, cells, config, MACHINE, {"jaxserve": {}}) == []


def test_an_impossible_figure_fails_the_run(monkeypatch, capsys, tmp_path):
    probes = iter([MACHINE, dataclasses.replace(MACHINE, flops_per_second=1.0)])
    monkeypatch.setattr(command, "probe", lambda *asked: next(probes))

    def served(contestants, num_cells, repeats, say):
        answer = {"seconds": 1e-6, "first_tokens": [1] * 4, "figures": {}}
        return [EngineRecord("jaxserve", answers={0: [answer]})]

    monkeypatch.setattr(command, "alternate", served)
    words = ["--model", str(bundled_model_path()), "--peers", "", "--batch-sizes", "4"]
    words += ["--mixed", "0", "--prefill", "0", "--long", "0"]
    words += ["--output-json", str(tmp_path / "p.json")]
    assert command.main(words) == 1
    assert "IMPOSSIBLE: jaxserve, batch 4: " in capsys.readouterr().err
    report = json.loads((tmp_path / "p.json").read_text())
    assert "100 GFLOP/s (a product)" in report["environment"]["machine"]  # the larger of both
    assert report["rules"]["prefix cache"] == "off"


@pytest.mark.slow
def test_a_machine_has_limits():
    found = measure_limits(2**20, quick=True, more=lambda side: {})
    assert found.flops_per_second > 0 and found.bytes_per_second > 0 and found.product
