"""The device under a backlog: the engine runs, and a host that is late is seen."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks import device_busy
from benchmarks.device_busy import measure_busy
from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.bench.workloads import uniform


@pytest.mark.slow
def test_a_line_for_each_number_of_slots_and_overlap(tmp_path, capsys):
    output = tmp_path / "busy.json"
    words = ["--rows", "2", "--seconds", "0.1", "--compile-ahead", "2", "--longest", "12"]
    assert device_busy.main([*words, "--output-json", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["rows"], row["overlap"]) for row in rows] == [(2, "on"), (2, "off")]
    for row in rows:
        assert 0 < row["device busy, %"] <= 100 and row["step, ms"] > 0
        assert 0 <= row["busy, % (host's bound)"] <= 100
        assert row["pauses_us"]
    assert capsys.readouterr().out.count("\n") == 4


@pytest.mark.slow
def test_a_late_host_leaves_the_device_idle(monkeypatch):
    monkeypatch.setattr(device_busy, "FILLED_STEPS", 3)
    llm = LLM(
        str(bundled_model_path()),
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_model_len=64,
        compile_ahead=2,
        compile_in_background=False,
    )
    plan = llm._engine.scheduler.plan

    def late():
        time.sleep(0.15)
        return plan()

    llm._engine.scheduler.plan = late
    busy = measure_busy(llm, uniform(8, 4, 16, llm.model_config.vocab_size, seed=0), 2, 0.6)
    assert not llm._engine.has_work
    llm.close()
    # a step of this model takes milliseconds
    assert busy.busy < 0.6 and busy.bound < 0.6
    assert max(busy.pauses_us) > 5e4
