"""`jaxserve simulate` and `jaxserve plan`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.cli import main
from tests.load_traces import write_trace

SMALL = ["--num-prompts", "30", "--input-len", "64", "--output-len", "8"]
H200 = ["simulate", "llama-3-8b", "--device", "h200"]


def test_a_simulation_prints_a_table_and_says_what_is_estimated(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    words = [*H200, *SMALL, "--save-result", "--result-dir", str(tmp_path), "--request-rate", "20"]
    assert main([*words, "--metric-percentiles", "90"]) == 0
    text = capsys.readouterr().out
    assert (
        "| time to first token (ttft) |" in text and "(queue)" in text and "| p90 | p99 |" in text
    )
    assert "Simulated, not measured:" in text and "data sheet of NVIDIA H200" in text
    (file,) = tmp_path.glob("*.json")
    written = json.loads(file.read_text())
    assert written["completed"] == 30 and written["estimated"]
    assert written["engine"]["weights"] == 16_060_522_496
    assert written["p99_ttft_ms"] >= written["median_ttft_ms"] > 0
    (picture,) = tmp_path.glob("*.engine.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_latency_over_the_rate_has_a_knee(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    words = [*H200, *SMALL, "--request-rates", "50", "110", "80", "140", "--max-num-seqs", "4"]
    assert main([*words, "--save-result", "--result-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    written = json.loads(file.read_text())
    assert [run["request_rate"] for run in written["runs"]] == [50, 80, 110, 140]
    waits = [run["p99_ttft_ms"] for run in written["runs"]]
    assert waits == sorted(waits) and written["knee"] in (50, 80, 110)
    assert "knee of the p99 of ttft" in capsys.readouterr().out
    assert list(tmp_path.glob("*.rates.png"))


def test_a_recorded_engine_is_replayed_with_its_own_steps(tmp_path, capsys):
    trace = str(write_trace(tmp_path / "trace.jsonl"))
    flags = ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--num-pages", "513"]
    flags += ["--max-model-len", "1024", "--output-json", str(tmp_path / "out.json")]
    assert main(["simulate", "llama-125m", "--workload", trace, "--calibrate", trace, *flags]) == 0
    text = capsys.readouterr().out
    assert "fitted from" in text and "(made up)" in text and "80 requests" in text
    written = json.loads((tmp_path / "out.json").read_text())
    recorded = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    ttft = sorted(1e3 * one["ttft"] for one in recorded if "ttft" in one)
    assert written["median_ttft_ms"] == pytest.approx(ttft[40], rel=0.1, abs=1.5)


POLICY = """
from jaxserve.scheduling.policies import FirstComeFirstServed


class ShortestFirst(FirstComeFirstServed):
    def key(self, request):
        return request.num_prompt, request.order
"""


@pytest.mark.slow
def test_a_policy_of_a_file_is_compared_on_the_same_requests(tmp_path, capsys):
    (tmp_path / "shortest_of_a_test.py").write_text(POLICY)
    words = [*H200, "--workload", "backlog", "--num-prompts", "80", "--random-range-ratio", "0.9"]
    words += ["--policy", str(tmp_path / "shortest_of_a_test.py"), "--max-num-seqs", "8"]
    assert main([*words, "--output-json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["policies"]
    by_name = {row["scheduling_policy"]: row for row in rows}
    assert [*by_name] == ["fcfs", "priority", "length", "shortest_of_a_test:ShortestFirst"]
    own, first = by_name["shortest_of_a_test:ShortestFirst"], by_name["fcfs"]
    assert own["short_p99_ttft_ms"] < 0.8 * first["short_p99_ttft_ms"]
    assert own["completed"] == first["completed"] == 80
    assert "| shortest_of_a_test:ShortestFirst |" in capsys.readouterr().out


PLAN = ["plan", "--model", "llama-3-8b", "--qps", "2", "--input", "200", "--output", "50"]


@pytest.mark.slow
def test_a_plan_is_text_or_json(tmp_path, capsys):
    offer = {"offer": "one", "device": "a100", "devices": 1, "memory_gb": 80, "per_hour": 2}
    (tmp_path / "prices").write_text(json.dumps(offer))
    words = [*PLAN, "--quantization", "int8", "--prices", str(tmp_path / "prices")]
    words += ["--device", "a100", "--scaling"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "| one | int8 | 1 | 1 | 1 |" in told
    steps = [line for line in told.splitlines() if line.startswith("| llama-3-8b | a100 |")]
    assert steps[3].startswith("| llama-3-8b | a100 | 8 | 1.1 | 65 |") and len(steps) == 6
    assert main([*words, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["candidates"][0]["offer"] == "one"
    assert [one["devices"] for one in written["scaling"]] == [1, 2, 4, 8, 16, 32]
    assert {one["quantization"] for one in written["scaling"]} == {"int8"}
    assert main([*words, "--tpot-p99", "0.1ms"]) == 1
    assert "Nothing serves this load" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*H200[:2], "--device", "h900"], "--device='h900' is not supported: one of h200"),
        (["simulate", "nobody"], "model='nobody'"),
        ([*H200, "--workload", "none"], "--workload='none' is not supported: a file, or one of"),
        ([*H200, "--workload", "FILE"], "FILE:1='no json' is not supported: a JSON object"),
        ([*H200, "--rates", "FILE"], "FILE='not read'"),
        ([*H200, "--calibrate", "FILE"], "FILE:1='no json'"),
        ([*H200, "--policy", "FILE"], "--policy="),
        ([*H200, "--request-rates", "-1"], "request_rates="),
        ([*H200, "--num-prompts", "0"], "num_prompts=0"),
        ([*H200, "--max-concurrency", "0"], "max_concurrency=0"),
        ([*H200, "--device-memory-gb", "10"], "gpu_memory_utilization=0.9"),
        ([*PLAN, "--prices", "FILE"], "FILE:1='no json'"),
        ([*PLAN, "--device", "cpu"], "--device='cpu'"),
        ([*PLAN[:-1], "0"], "--output=0"),
        (["plan", "nobody/none.json", *PLAN[3:]], "nobody/none.json"),
    ],
)
def test_a_mistake_is_one_line(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "FILE"
    file.write_text("no json\n")
    assert main([str(file) if word == "FILE" else word for word in words]) == 1
    told = capsys.readouterr().err.replace(str(file), "FILE")
    assert said in told and told.count("\n") == 1 and "Traceback" not in told


def test_a_config_json_alone_is_enough(tmp_path, capsys):
    from benchmarks.model_shapes import write_config

    folder = write_config("llama-125m", tmp_path)
    for name in (folder, folder / "config.json"):
        assert main(["simulate", str(name), "--device", "a100", *SMALL]) == 0
        assert "30 requests in" in capsys.readouterr().out
