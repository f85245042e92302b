"""`jaxserve bench serve` against a server that is not ours, and against mistakes of its user."""

from __future__ import annotations

import json

import pytest

from jaxserve.bench import serve
from server.cli import main
from tests.jaxserve.bench.fake_server import KEY, FakeServer, fake_server


@pytest.fixture(scope="module")
def shared():
    with fake_server() as server:
        yield server


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.lists_models = True
    shared.seen.clear()
    return shared


@pytest.fixture
def bench(server, tmp_path, capsys):
    """Runs a load test of the given prompts; the exit status, what it printed, its JSON."""

    def run(prompts: list[str], *words: str, name: str = "serve") -> tuple[int, str, str]:
        path = tmp_path / "prompts.jsonl"
        lines = [json.dumps({"prompt": prompt, "output_tokens": 4}) for prompt in prompts]
        path.write_text("\n".join(lines) + "\n")
        given = ["bench", name, "--base-url", server.url, "--api-key", KEY]
        given += ["--dataset-name", "custom", "--dataset-path", str(path)]
        given += ["--num-prompts", str(len(prompts)), "--ready-check-timeout-sec", "0"]
        status = main([*given, *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_pieces_count_where_the_server_does_not(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "plot", lambda times, path: None)
    words = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "load.json"]
    status, out, err = bench(["other", "other"], *words, "--goodput", "e2el:60000")
    assert (status, err) == (0, "")
    assert "each piece of a stream counts" in out
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["generated_texts"] == ["one two\u2028three\u0085 "] * 2
    assert found["output_lens"] == [2, 2]
    assert (found["model_id"], found["request_rate"]) == ("fake", "inf")
    assert found["goodput"] == ["e2el:60000"]
    assert KEY not in (tmp_path / "load.json").read_text()
    report = (tmp_path / "load.md").read_text()
    assert report.startswith("# fake on http://127.0.0.1") and "custom dataset" in report


def test_the_servers_counts_are_taken(bench):
    status, out, _ = bench(["counted"])
    assert status == 0 and "3 of the 4 tokens that were asked for" in out
    assert bench(["bare"])[0] == 0


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("error", "out of\\nmemory"),
        ("cut", "the stream broke off"),
        ("garbage", "no JSON object: {oops"),
        ("list", "no JSON object: [1]"),
        ("silence", "no output in the stream (text/event-stream)"),
        ("whole", "no output in the stream (application/json)"),
        ("refused", "HTTP 400: "),
    ],
)
def test_a_failure_is_told_in_a_line(bench, prompt, reason):
    status, out, err = bench(["counted", prompt, prompt])
    assert status == 1
    assert "1 requests in" in out and "2 failed" in out
    assert err.startswith("failed: 2 x ") and reason in err and err.count("\n") == 1


def test_what_is_sent_to_the_server(bench, server):
    words = ["--header", "X-Team=a=b", "--top-p", "0.5", "--extra-body", '{"min_tokens": 2}']
    assert bench(["counted"], *words, "--endpoint", "/other")[0] == 0
    ((path, headers, body),) = server.seen
    assert (path, headers["X-Team"], headers["Authorization"]) == ("/other", "a=b", f"Bearer {KEY}")
    assert (body["top_p"], body["min_tokens"], body["max_tokens"]) == (0.5, 2, 4)
    assert "ignore_eos" not in body and "temperature" not in body


def test_a_base_url_may_end_in_v1(bench, server):
    assert bench(["counted"], "--base-url", f"{server.url}/v1/")[0] == 0
    assert server.seen[0][0] == "/v1/completions"


def test_a_server_without_a_list_of_models(bench, server):
    server.lists_models = False
    status, _, err = bench(["counted"])
    assert status == 1 and "model=None" in err and "HTTP 404" in err
    assert bench(["counted"], "--model", "m")[0] == 0
    assert server.seen[0][2]["model"] == "m"


def test_a_sweep_tells_failures_and_writes_a_report(bench, tmp_path):
    words = ["--request-rates", "100", "inf", "--metric-percentiles", "50,90", "--save-result"]
    words += ["--percentile-metrics", "e2el", "--result-dir", str(tmp_path)]
    status, out, err = bench(["counted", "cut"], *words, name="sweep")
    assert status == 1 and err == "failed: 1 x the stream broke off\n" * 2
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["request_rate"] for row in rows] == [100.0, "inf"]
    assert all(row["p90_e2el_ms"] > 0 for row in rows)
    report = (tmp_path / "sweep.md").read_text()
    assert report.startswith("# fake: request_rate") and "p90_e2el_ms" in report
    assert report.splitlines()[-1] in out
    assert (tmp_path / "sweep.png").is_file()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--base-url", "localhost:8000"], "base_url='localhost:8000'"),
        (["--base-url", "http://h:x"], "base_url="),
        (["--api-key", "wrong"], "api_key='***'"),
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--max-concurrency", "0"], "max_concurrency=0"),
        (["--num-warmups", "-1"], "num_warmups=-1"),
        (["--request-rate", "nan"], "request_rate=nan"),
        (["--burstiness", "nan", "--request-rate", "1"], "burstiness=nan"),
        (["--request-rate", "1", "--ramp-up-strategy", "linear"], "request_rate=1.0"),
        (["--metric-percentiles", "50,x"], "metric_percentiles='50,x'"),
        (["--percentile-metrics", "ttft,x"], "percentile_metrics='ttft,x'"),
        (["--goodput", "ttft:nan"], "goodput='ttft:nan'"),
        (["--header", "x"], "header='x'"),
        (["--tokenizer", "nowhere"], "tokenizer='nowhere'"),
        (["--dataset-path", "nowhere.jsonl"], "dataset_path='nowhere.jsonl'"),
        (["--dataset-name", "random"], "dataset_path="),
        (["--dataset-name", "sharegpt"], "tokenizer=None"),
        (["--port", "0"], "port=0"),
        (["--save-result", "--result-filename", "x.md"], "result_filename='x.md'"),
        (["--save-result", "--result-dir", "/dev/null/x"], "/dev/null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(bench, words, named):
    status, out, err = bench(["counted"], *words)
    assert (status, out) == (1, "")
    assert err.startswith("jaxserve bench: ") and named in err and err.count("\n") == 1, err


def test_what_is_no_tls_is_told_at_once(bench, server):
    words = ["--base-url", server.url.replace("http", "https")]
    status, _, err = bench(["counted"], *words, "--ready-check-timeout-sec", "60")
    assert status == 1 and "SSL" in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [["--extra-body", "[1]"], ["--extra-body", "{"], ["--seed", "x"]])
def test_a_mistake_in_a_flag_is_one_line(bench, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench(["counted"], *words)
    error = capsys.readouterr().err
    assert words[0] in error and error.count("\n") == 1
