"""Steps of a recorded engine: what the fit finds, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.errors import ValidationError
from jaxserve.observability.load_trace import read_trace
from jaxserve.simulation.calibration import Fitted
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.workload import Workload
from tests.load_traces import DELIVERY_S, HOST_S, Recording, plain, small_setting, write_trace


def compared(trace, setting, load, formula=plain, seed=None):
    """Samples by the formula itself, and by the fit of a trace of another load."""
    known = Recording(setting, formula)
    known.simulation = Simulation(setting, known)
    exact = known.simulation.run(load.requests())
    fitted = Simulation(setting, Fitted(setting, trace, seed)).run(load.requests())
    return exact, fitted


def by_rows(shape, plan):
    """An odd number of decode rows takes half as long again."""
    return plain(shape, plan) * (1.5 if plan.num_decode % 2 and not shape.num_prefill else 1.0)


@pytest.mark.parametrize("formula", [plain, by_rows])
def test_a_fit_finds_the_formula_that_steps_follow(tmp_path, formula):
    setting = small_setting()
    trace = read_trace(write_trace(tmp_path / "trace.jsonl", setting, formula))
    load = Workload(60, 5.0, input_len=60, output_len=30, range_ratio=0.5, seed=7)
    exact, fitted = compared(trace, setting, load, formula)
    for name, shift in (("ttft", DELIVERY_S), ("tpot", 0.0), ("queue", 0.0)):
        for percent in (50, 99):
            wanted = float(np.percentile(exact.samples()[name], percent)) + shift
            found = float(np.percentile(fitted.samples()[name], percent))
            assert found == pytest.approx(wanted, rel=0.05, abs=2 * HOST_S), (name, percent)
    assert fitted.duration == pytest.approx(exact.duration, rel=0.01)


def test_deviations_are_those_of_the_recording(tmp_path):
    """Every tenth step takes five times as long: the mean is kept, and so is the tail."""
    count = [0]

    def disturbed(shape, plan):
        count[0] += 1
        return plain(shape, plan) * (5.0 if count[0] % 10 == 0 else 1.0)

    setting = small_setting()
    trace = read_trace(write_trace(tmp_path / "trace.jsonl", setting, disturbed))
    load = Workload(100, 8.0, input_len=100, output_len=12, range_ratio=0.9, seed=8)
    exact, fitted = compared(trace, setting, load, disturbed, seed=3)
    assert fitted.busy / fitted.num_steps == pytest.approx(exact.busy / exact.num_steps, rel=0.15)
    assert fitted.gaps.percentile(99) == pytest.approx(exact.gaps.percentile(99), rel=0.3)
    _, smooth = compared(trace, setting, load, disturbed)
    assert smooth.gaps.percentile(99) < 0.7 * exact.gaps.percentile(99)


def test_long_steps_that_deviate_do_not_spoil_short_ones(tmp_path):
    """Steps with prompts take longer beside many keys; decode steps are as the formula says."""

    def uneven(shape, plan):
        keys = sum(plan.rows.starts[: plan.num_decode])
        return plain(shape, plan) * (1.0 + 0.005 * keys if shape.num_prefill else 1.0)

    setting = small_setting()
    trace = read_trace(write_trace(tmp_path / "trace.jsonl", setting, uneven))
    load = Workload(60, 5.0, input_len=60, output_len=30, range_ratio=0.5, seed=7)
    exact, fitted = compared(trace, setting, load)
    for percent in (10, 50):
        wanted = exact.gaps.percentile(percent)
        assert fitted.gaps.percentile(percent) == pytest.approx(wanted, rel=0.03)


def test_what_was_not_seen_is_judged_by_its_size(tmp_path):
    trace = read_trace(write_trace(tmp_path / "trace.jsonl"))
    larger = small_setting(max_num_seqs=32, max_num_batched_tokens=256)
    load = Workload(60, 1000.0, input_len=30, output_len=30, seed=7)
    exact, fitted = compared(trace, larger, load)
    assert fitted.busy == pytest.approx(exact.busy, rel=0.25)


def test_a_workload_is_no_calibration(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 3, "output_tokens": 2}\n')
    with pytest.raises(ValidationError, match=r"load.jsonl='0 steps'.*--record-trace"):
        Fitted.of_file(small_setting(), path)
