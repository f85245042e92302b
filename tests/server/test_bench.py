"""`jaxserve bench serve` and `bench sweep` against a real server on the bundled model."""

from __future__ import annotations

import json

import pytest

from checkpoints import bundled_model_path
from server.cli import main
from tests.server.server_process import Server, running_server

SMALL = ["--num-prompts", "6", "--random-input-len", "20"]
SMALL += ["--random-output-len", "5", "--ignore-eos"]


@pytest.fixture(scope="module")
def server() -> Server:
    with running_server() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_load_test_writes_its_results(server, backend, tmp_path, capsys):
    words = ["bench", "serve", "--base-url", server.url, "--backend", backend, *SMALL]
    words += ["--tokenizer", str(bundled_model_path()), "--max-concurrency", "2"]
    words += ["--goodput", "ttft:60000", "--save-result", "--save-detailed", "--num-warmups", "1"]
    assert main([*words, "--result-dir", str(tmp_path), "--result-filename", "load.json"]) == 0
    result = json.loads((tmp_path / "load.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_output_tokens"] == 6 * 5
    assert 1 <= result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
    assert len(result["ttfts"]) == 6 and "api_key" not in result
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    assert result["num_queue"] == 6 and result["num_queue_overhead"] <= 6
    assert 0 < result["mean_queue_ms"] < result["mean_ttft_ms"]
    report = (tmp_path / "load.md").read_text()
    assert "6 requests" in report and "arrival to dispatch of the first step" in report
    assert "time to first token" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_has_a_row_a_load(server, tmp_path, capsys):
    words = ["bench", "sweep", "--base-url", server.url, *SMALL, "--concurrencies", "1", "3"]
    assert main([*words, "--save-result", "--result-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["max_concurrency"] for row in rows] == [1, 3]
    assert all(row["completed"] == 6 for row in rows)
    assert (tmp_path / "sweep.png").is_file()
    assert main(words[:-3]) == 1
    assert "--concurrencies" in capsys.readouterr().err


@pytest.mark.slow
def test_failures_are_counted_and_told(server, capsys):
    words = ["bench", "serve", "--base-url", server.url, "--num-prompts", "2"]
    assert main([*words, "--random-input-len", "5000"]) == 1
    captured = capsys.readouterr()
    assert "2 failed" in captured.out and "HTTP 400" in captured.err


@pytest.mark.slow
def test_a_server_that_is_not_there(capsys):
    words = ["bench", "serve", "--base-url", "http://127.0.0.1:9"]
    words += ["--ready-check-timeout-sec", "0.3"]
    assert main(words) == 1
    assert "is not ready" in capsys.readouterr().err
