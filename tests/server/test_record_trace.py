"""A server that records its load, and what replays it."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from jaxserve.bench import serve, serve_options
from jaxserve.observability.load_trace import read_trace, write_requests
from jaxserve.simulation.workload import Workload
from server.cli import main
from tests.server.server_process import running_server

COUNT = 12


@pytest.mark.slow
def test_a_recording_is_replayed_by_the_load_test_and_by_the_simulator(tmp_path, capsys):
    load, trace = tmp_path / "load.jsonl", tmp_path / "trace.jsonl"
    made = Workload(
        COUNT, 30.0, input_len=20, output_len=9, prefix_len=32, num_priorities=2, seed=1
    )
    write_requests(load, made.requests())
    with running_server(
        "none", "--scheduling-policy", "priority", "--record-trace", str(trace)
    ) as server:
        parser = argparse.ArgumentParser()
        serve_options.add_options(parser)
        words = ["--base-url", server.url, "--dataset-name", "trace", "--dataset-path", str(load)]
        options = parser.parse_args([*words, "--ignore-eos", "--disable-tqdm"])
        test = asyncio.run(serve.measure(options))
        assert not [one.error for one in test.times if one.error]
        server.process.terminate()
        assert server.process.wait(60) == 0
    found = read_trace(trace)
    asked = sorted((one.prompt_tokens, one.output_tokens) for one in made.requests())
    assert sorted((one.prompt_tokens, one.output_tokens) for one in found.requests) == asked
    assert {one.keys[:2] for one in found.requests} == {found.requests[0].keys[:2]}
    assert {one.priority for one in found.requests} == {0, 1}
    for one in found.requests:
        assert 0 < one.queue < one.ttft < one.last and 0 <= one.delivery < one.ttft
    computed = sum(one.num_prefill_tokens for one in found.steps)
    assert computed <= sum(prompt for prompt, _ in asked) and len(found.steps) > 9
    assert found.about["max_num_seqs"] == 4 and found.about["model"] == "tiny"
    sent = [one.sent - test.times[0].sent for one in test.times]
    wanted = [one.arrival for one in made.requests()]
    assert sent == pytest.approx(wanted, abs=0.5)

    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
    result = tmp_path / "out.json"
    words = ["--workload", str(trace), "--rates", str(tmp_path / "rates.json")]
    rates = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    (tmp_path / "rates.json").write_text(json.dumps({"limits": rates}))
    assert main(["simulate", *words, *flags, "--output-json", str(result)]) == 0
    written = json.loads(result.read_text())
    assert written["completed"] == COUNT and written["prefix_tokens_found"] > 0
    assert "measured on" in capsys.readouterr().out
