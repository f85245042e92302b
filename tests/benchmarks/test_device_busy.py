"""The device under a backlog: the engine runs, and a host that is late is seen."""

from __future__ import annotations

import json
import time

import jax
import pytest

from benchmarks import device_busy, device_trace
from benchmarks.device_busy import Busy, measure_busy
from checkpoints import bundled_model_path
from jaxserve import LLM
from jaxserve.bench.workloads import uniform

LATE_S = 0.05  # of the host in each step


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
        assert row["busy, % (traced)"] == row["device busy, %"], "a CPU serves traced"
        assert row["pauses_us"]
    assert capsys.readouterr().out.count("\n") == 4


def test_a_gpu_is_judged_in_the_mode_that_serves(monkeypatch):
    """The profiler turns its graphs off, so the trace says how busy another mode would be."""
    known = {"traced": 0.7, "bound": 0.97, "step_ms": 5.0, "traced_ms": 7.0, "pauses_us": []}
    assert Busy(serves_traced=False, **known).busy == 0.97
    assert Busy(serves_traced=True, **known).busy == 0.7
    for platform, serves in (("gpu", False), ("cpu", True), ("tpu", True)):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert device_trace.serves_traced() is serves


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
    engine = llm.client.engine
    plan = engine.scheduler.plan

    def late():
        jax.block_until_ready(engine.runner.state)
        time.sleep(LATE_S)
        return plan()

    engine.scheduler.plan = late
    busy = measure_busy(llm, uniform(8, 4, 16, llm.model_config.vocab_size, seed=0), 2, 0.3)
    assert not engine.has_work
    llm.close()
    # however long a step takes, the device waits for the host in each
    late_ms = 0.9e3 * LATE_S
    assert busy.bound <= 1 - late_ms / busy.step_ms
    pauses = [pause for pause in busy.pauses_us if pause >= 1e3 * late_ms]
    assert len(pauses) >= device_busy.LEAST_STEPS - 1
    assert busy.busy <= 1 - 0.5 * late_ms / busy.traced_ms  # one pause less than steps
