"""`jaxserve bench` serves prompts that no cache has, and holds its figures against the machine."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.model_shapes import write_config
from jaxserve.bench import commands, device_limits, measure, sweep
from jaxserve.bench.device_limits import Limits
from jaxserve.bench.workloads import WorkItem, bytes_moved, bytes_saved, flops_of_items
from jaxserve.loading.engine_build import Footprint
from jaxserve.models.config_reader import model_config_of, read_model_config
from jaxserve.models.cost import Row, flops_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.models.savings import weights_unread
from server.cli import build_parser, main

PHASES = {"device_idle": 0.0, "plan": 0.0}


@pytest.fixture
def config(tmp_path):
    return read_model_config(write_config("llama-125m", tmp_path))


def test_flops_of_requests(config):
    items = [WorkItem([1] * 10, 4)]
    alone = flops_of(config, [Row(0, 10), Row(10, 3)], 4)
    assert flops_of_items(items, 1, config, 0) == alone
    two = flops_of(config, [Row(0, 10), Row(10, 3), Row(10, 3)], 8)
    assert flops_of_items(items, 2, config, 0) == two  # a prompt is computed once
    assert flops_of_items(items, 1, config, 6) == flops_of(config, [Row(6, 4), Row(10, 3)], 4)
    assert flops_of_items(items, 1, config, 99) == flops_of(config, [Row(9, 1), Row(10, 3)], 4)


def test_bytes_of_requests():
    model, footprint = model_config_of(SHAPES["mixtral-8x7b"]), Footprint(10**6, 100)
    rest = [WorkItem([1] * 10, 4)] * 2, 2, 3, model, footprint
    # of each of four sequences three tokens are computed, in three steps
    saved = int(3 * 10**6 * weights_unread(model, 4))
    assert bytes_saved(*rest) == saved > 0
    assert bytes_moved(*rest) == 3 * 10**6 + 4 * (4 * 10 + 6) * 100 - saved
    windowed = replace(model_config_of(SHAPES["gemma-3-12b"]), attention_window=8)
    rest = [WorkItem([1] * 10, 4)], 2, 0, windowed, footprint
    assert bytes_moved(*rest) == 2 * 4 * (8 - 1) * 100, "a query sees itself beside these"


@pytest.fixture
def latency(config, monkeypatch, tmp_path):
    """Runs `bench latency` with an engine whose batches take given seconds."""
    batches = []

    def run(seconds):
        def served(llm, items, **how):
            batches.append(items)
            work = {"num_steps": 8, "bytes_read": 4e9, "flops": 3e9}
            work |= {"bytes_saved": 1e9, "flops_saved": 6e9}
            return measure.Measurement(seconds, 2, 64, 16, phase_seconds=PHASES, **work)

        llm = SimpleNamespace(
            model_config=config, footprint=Footprint(3 * 10**8, 100), close=lambda: None
        )
        monkeypatch.setattr(commands, "_make_llm", lambda *given: llm)
        monkeypatch.setattr(measure, "run_workload", served)
        found = Limits(1e10, 1e10, "a product")
        monkeypatch.setattr(device_limits, "measure_limits", lambda working_set: found)
        path = tmp_path / "latency.json"
        words = ["bench", "latency", "--num-iters-warmup", "1", "--num-iters", "3"]
        status = main([*words, "--batch-size", "2", "--output-json", str(path)])
        return status, json.loads(path.read_text()), batches

    return run


def test_no_prompt_is_served_twice_and_none_is_kept(latency):
    _, _, batches = latency(1.0)
    prompts = [tuple(item.prompt_token_ids) for items in batches for item in items]
    assert len(batches) == 4 and len(set(prompts)) == len(prompts)
    options = build_parser("bench").parse_args(["bench", "latency"])
    assert options.engine_config(options).enable_prefix_caching is False
    options = build_parser("bench").parse_args(["bench", "latency", "--enable-prefix-caching"])
    assert options.engine_config(options).enable_prefix_caching is True


def test_mfu_and_the_share_of_the_bandwidth_are_told(latency, capsys):
    status, report, _ = latency(1.0)
    assert status == 0 and report["impossible"] == []
    assert report["mfu"] == pytest.approx(0.3)
    assert report["bandwidth_utilisation"] == pytest.approx(0.4)
    out = capsys.readouterr().out
    assert "MFU 30.0% of 10 GFLOP/s (a product), 40.0% of 10.0 GB/s, both measured here" in out
    assert "3 of 9 GFLOP (saved: 66.7%) and 4 of 5 GB (saved: 20.0%)" in out
    assert report["median_run"]["flops_saved"] == 6e9


def test_an_impossible_figure_fails_the_benchmark(latency, capsys):
    status, report, _ = latency(0.2)
    assert status == 1 and len(report["impossible"]) == 2
    assert "IMPOSSIBLE: the run: 15.0 GFLOP/s at least" in capsys.readouterr().err


def test_every_load_of_a_sweep_has_prompts_of_its_own(monkeypatch):
    seeds = []

    async def measured(options):
        seeds.append(options.seed)
        return SimpleNamespace(times=[], duration=1.0)

    monkeypatch.setattr(sweep.serve, "measure", measured)
    monkeypatch.setattr(sweep, "serving_report", lambda *g, **h: defaultdict(int))
    monkeypatch.setattr(sweep.serve, "head", lambda *given: {})
    monkeypatch.setattr(sweep.serve, "show_errors", lambda times: None)
    words = ["bench", "sweep", "--concurrencies", "1", "2", "4", "--seed", "7"]
    assert main(words) == 0
    assert seeds == [7, 8, 9]
