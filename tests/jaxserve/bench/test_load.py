"""Load tests: when requests are sent, what is in them, and what the report makes of their times."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxserve.bench import commands, datasets, serve, startup
from jaxserve.bench.arrivals import arrival_times
from jaxserve.bench.datasets import BenchPrompt
from jaxserve.bench.http_client import RequestTimes, Target, _take_event
from jaxserve.bench.percentiles import percentile
from jaxserve.bench.serving_report import (
    details,
    markdown,
    parse_goodput,
    plot,
    serving_report,
)
from jaxserve.errors import ValidationError
from server.cli import build_parser, main


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 10.0])
def test_gaps_have_the_rates_mean_and_the_shapes_spread(burstiness):
    between = gaps(arrival_times(20_000, 4.0, burstiness=burstiness, seed=1))
    assert statistics.fmean(between) == pytest.approx(0.25, rel=0.05)
    spread = statistics.pstdev(between) / statistics.fmean(between)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 505.0), ("exponential", 100.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp, middle):
    options = {"burstiness": 1e9, "ramp_up": ramp, "start_rate": 10.0, "end_rate": 1000.0}
    between = gaps(arrival_times(1001, math.inf, **options))
    assert 1 / between[0] == pytest.approx(10.0, rel=0.01)
    assert 1 / between[500] == pytest.approx(middle, rel=0.01)
    assert 1 / between[-1] == pytest.approx(1000.0, rel=0.02)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"ramp_up": "linear", "end_rate": 2.0}, "ramp_up_start_rps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_rates_are_named(change, field):
    with pytest.raises(ValidationError) as caught:
        arrival_times(3, **{"request_rate": 1.0, **change})
    assert caught.value.field == field


def test_random_prompts_have_the_asked_lengths():
    common = {"range_ratio": 0.5, "prefix_len": 3, "vocab_size": 100, "seed": 0}
    prompts = datasets.random_prompts(200, 20, 10, **common)
    assert {len(p.prompt) for p in prompts} == set(range(13, 34))
    assert {p.output_len for p in prompts} == set(range(5, 16))
    assert len({tuple(p.prompt[:3]) for p in prompts}) == 1
    assert prompts == datasets.random_prompts(200, 20, 10, **common)


def test_prefixes_are_repeated():
    prompts = datasets.prefix_repetition(
        12, prefix_len=5, suffix_len=4, num_prefixes=3, output_len=2, vocab_size=99, seed=0
    )
    assert len({tuple(p.prompt[:5]) for p in prompts}) == 3
    assert len({tuple(p.prompt[5:]) for p in prompts}) == 12
    assert all(p.prompt_len == 9 for p in prompts)


def test_prompts_of_a_trace_begin_alike_where_those_did(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival": 2.0, "prompt_tokens": 20, "output_tokens": 5, "keys": ["a"]},
        {"arrival": 1.0, "prompt_tokens": 40, "output_tokens": 4, "keys": ["a", "b"]},
        {
            "arrival": 3.5,
            "prompt_tokens": 40,
            "output_tokens": 3,
            "keys": ["a", "c"],
            "priority": 2,
        },
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = datasets.trace_file(path, 10, 1000, seed=0)
    assert [p.arrival for p in (first, second, third)] == [1.0, 2.0, 3.5]
    assert [(len(p.prompt), p.output_len) for p in (first, second, third)] == [
        (40, 4),
        (20, 5),
        (40, 3),
    ]
    assert first.prompt[:16] == second.prompt[:16] == third.prompt[:16]
    assert first.prompt[16:32] != third.prompt[16:32] and first.prompt[32:] != third.prompt[32:]
    assert third.priority == 2 and all(16 <= token < 1000 for token in first.prompt)
    assert len(datasets.trace_file(path, 2, 1000, seed=0)) == 2
    other = datasets.trace_file(path, 10, 1000, seed=1)[0]
    assert other.prompt[:16] != first.prompt[:16], "another seed finds nothing in a cache"


def test_a_trace_is_sent_at_its_own_times_unless_a_rate_is_asked_for():
    prompts = [BenchPrompt([1], 1, 1, arrival) for arrival in (1.0, 2.0, 4.5)]
    options = argparse.Namespace(
        request_rate=math.inf,
        burstiness=1.0,
        ramp_up_strategy=None,
        ramp_up_start_rps=1.0,
        ramp_up_end_rps=1.0,
        seed=0,
    )
    assert serve.send_times(options, prompts) == [0.0, 1.0, 3.5]
    options.request_rate = 100.0
    assert serve.send_times(options, prompts)[-1] < 1.0


def test_a_custom_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi", "output_tokens": 3}\n\n{"prompt": [5, 6, 7]}\n')
    hi, ids = BenchPrompt("Hi", None, 3), BenchPrompt([5, 6, 7], 3, 9)
    assert datasets.custom_file(path, 3, 9) == [hi, ids, hi]
    path.write_text('{"prompt": "Hi"}\n{"text": 1}\n')
    with pytest.raises(ValidationError, match=r"prompts\.jsonl:2"):
        datasets.custom_file(path, 3, 9)
    path.write_text("")
    with pytest.raises(ValidationError, match="at least one"):
        datasets.custom_file(path, 3, 9)


def test_a_sharegpt_file(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [["one two three four", "a b c d e"], ["short", "x"], ["only a question here"]]
    path.write_text(
        json.dumps([{"conversations": [{"value": text} for text in turn]} for turn in turns])
    )
    encode = lambda text: list(range(len(text.split())))  # noqa: E731
    prompt = BenchPrompt("one two three four", 4, 5)
    assert datasets.sharegpt_file(path, 2, None, encode, seed=0) == [prompt, prompt]
    assert datasets.sharegpt_file(path, 1, 7, encode, seed=0)[0].output_len == 7
    assert datasets.sharegpt_file(path, 1, None, encode, 0, longest=9) == [prompt]
    with pytest.raises(ValidationError, match="at least one"):
        datasets.sharegpt_file(path, 1, None, encode, 0, longest=8)
    path.write_text('[{"text": 1}]')
    with pytest.raises(ValidationError, match="ShareGPT"):
        datasets.sharegpt_file(path, 1, None, encode, seed=0)


def test_throughput_takes_every_dataset(tmp_path, monkeypatch):
    letters = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
    monkeypatch.setattr("jaxserve.tokenization.Tokenizer", lambda folder: letters)

    def items(words):
        words = ["bench", "throughput", "--num-prompts", "3", *words.split()]
        return commands._throughput_items(build_parser("bench").parse_args(words))

    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What is 12 + 30?"}\n{"prompt": [5, 6], "output_tokens": 9}\n')
    made, longest = items(f"--dataset-name custom --dataset-path {lines} --custom-output-len 4")
    assert [item.output_len for item in made] == [4, 9, 4]
    asked = letters.encode("What is 12 + 30?")
    assert [i.prompt_token_ids for i in made] == [asked, [5, 6], asked] and longest == 16 + 4

    turns = ["What is 12 + 30?", "It is 42, as everybody knows."]
    talks = [[{"value": text} for text in turns], [{"value": 9 * turns[0]}, {"value": turns[1]}]]
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    words = f"--dataset-name sharegpt --dataset-path {chats}"
    short, _ = items(f"{words} --max-model-len 60")
    assert [item.prompt_token_ids for item in short] == [asked] * 3
    assert len({len(item.prompt_token_ids) for item in items(words)[0]}) == 2

    made, longest = items("--dataset-name prefix-repetition --prefix-repetition-num-prefixes 1")
    assert len({tuple(item.prompt_token_ids[:256]) for item in made}) == 1
    assert len({tuple(item.prompt_token_ids) for item in made}) == 3 and longest == 256 + 256 + 128
    made, longest = items("--input-len 5 --output-len 7")
    assert {(len(i.prompt_token_ids), i.output_len) for i in made} == {(5, 7)} and longest == 12


def request(sent: float, chunks: list[float], tokens: int | None = None, error: str = ""):
    count = len(chunks) if tokens is None else tokens
    return RequestTimes(sent, 10, count, [sent + c for c in chunks], "text", error)


def test_the_report_of_known_times():
    times = [
        request(100.0, [0.1, 0.2, 0.4]),
        request(100.3, [0.5]),
        request(100.4, [0.2, 0.3], tokens=5),
        request(100.5, [], error="HTTP 503"),
    ]
    report = serving_report(
        times, 2.0, percentiles=[50, 99], goodput={"ttft": 200.1, "tpot": 100.0}
    )
    assert (report["completed"], report["failed"]) == (3, 1)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (30, 9)
    assert report["output_throughput"] == 4.5
    assert report["total_token_throughput"] == 19.5
    assert report["request_goodput"] == 0.5  # the first has a tpot of 150 ms, the second a late one
    assert report["median_ttft_ms"] == pytest.approx(200.0)
    assert report["p50_ttft_ms"] == report["median_ttft_ms"]
    assert report["mean_tpot_ms"] == pytest.approx((150 + 25) / 2)
    assert report["mean_itl_ms"] == pytest.approx((100 + 200 + 100) / 3)
    assert report["p99_e2el_ms"] == pytest.approx(498.0)
    assert report["max_concurrent_requests"] == 2
    assert report["max_output_tokens_per_s"] == pytest.approx(9)
    assert "3 requests in 2.00 s, 1 failed" in markdown(report, [50, 99])
    assert details(times)["errors"] == ["", "", "", "HTTP 503"]


def test_a_report_of_failures_alone():
    report = serving_report([request(0.0, [], error="no")], 1.0)
    assert report["completed"] == 0 and report["mean_ttft_ms"] == 0.0


def test_percentiles_interpolate():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0


def test_goodput_limits():
    assert parse_goodput(["ttft:500", "e2el:1.5"]) == {"ttft": 500.0, "e2el": 1.5}
    for bad in ("itl:3", "ttft:fast", "ttft"):
        with pytest.raises(ValidationError, match="goodput"):
            parse_goodput([bad])


@pytest.mark.slow
def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot([request(0.0, [0.1, 0.2])], tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


EVENTS = {
    "openai": [
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": None}]},
        {"choices": [{"text": "b", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
    ],
    "openai-chat": [
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ],
}


@pytest.mark.parametrize(("backend", "tokens"), [("openai", 3), ("openai-chat", 2)])
def test_tokens_of_a_stream(backend, tokens):
    times = RequestTimes(0.0)
    for event in EVENTS[backend]:
        _take_event(json.dumps(event).encode(), times)
    assert (len(times.chunks), times.output_tokens, times.text) == (tokens, tokens, "ab")
    assert times.ended and not times.counted
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}
    _take_event(json.dumps(usage).encode(), times)
    _take_event(b"[DONE]", times)
    assert (times.prompt_tokens, times.output_tokens) == (7, 4)


def test_an_error_event_is_kept():
    times = RequestTimes(0.0)
    _take_event(b'{"error": {"message": "out of pages"}}', times)
    assert "out of pages" in times.error


def test_what_is_sent():
    target = Target("http://x", "openai-chat", "m", body={"temperature": 0})
    body = target.request(BenchPrompt("Hi", None, 5))
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (body["max_completion_tokens"], body["temperature"]) == (5, 0)
    with pytest.raises(ValidationError, match="token ids"):
        target.request(BenchPrompt([1], 1, 5))
    with pytest.raises(ValidationError, match="backend"):
        Target("http://x", "grpc", "m")


def test_what_a_model_thinks_is_output():
    times = RequestTimes(0.0)
    for name in ("reasoning", "reasoning_content", "content"):
        delta = {"content": None, name: "x"}
        _take_event(json.dumps({"choices": [{"delta": delta}]}).encode(), times)
    assert (len(times.chunks), times.output_tokens, times.text) == (3, 3, "x")


def test_all_tokens_in_one_piece_have_no_time_per_token():
    assert request(0.0, [0.5], tokens=8).tpot is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("latency --batch-size 0", "batch_size=0"),
        ("latency --n 0", "n=0"),
        ("throughput --input-len 5", "input_len, output_len=(5, None)"),
        ("throughput --model nowhere", "model='nowhere'"),
        ("throughput --dataset-name sharegpt", "dataset_path=None"),
        ("throughput --dataset-path f", "dataset_path='f'"),
        ("throughput --dataset-name custom --dataset-path f --input-len 5", "input_len=5"),
        ("throughput --dataset-name prefix_repetition --output-len 1600", "'2112 tokens'"),
        (
            "throughput --max-len 1200",
            "'2400 tokens' is not supported: at most the context of 2048",
        ),
        ("latency --input-len 90 --max-model-len 100", "'218 tokens'"),
        ("throughput --output-json /dev/null/x.json", "/dev/null"),
        ("startup --num-iters-cold 0", "num_iters_warm=3"),
        ("startup --num-iters-warm -1", "num_iters_warm=-1"),
        ("startup --model nowhere", "ended: jaxserve: model='nowhere'"),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(words, named, capsys):
    assert main(["bench", *words.split()]) == 1
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_ctrl_c_ends_a_benchmark_that_compiles_at_once(name, monkeypatch):
    handlers = []

    def benchmark(options):
        handlers.append(signal.getsignal(signal.SIGINT))
        return 0

    monkeypatch.setattr(commands, f"run_{name}", benchmark)
    assert main(["bench", name]) == 0
    assert handlers == [signal.SIG_DFL] != [signal.getsignal(signal.SIGINT)]


def test_ctrl_c_ends_a_load_test_with_a_line(monkeypatch, capsys):
    def benchmark(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_serve", benchmark)
    assert main(["bench", "serve"]) == 130
    assert capsys.readouterr().err == "jaxserve: interrupted\n"


def test_the_engines_flags_are_those_of_a_server():
    words = ["bench", "latency", "--quantization", "int8", "--preset", "bulk", "MODEL"]
    args = build_parser("bench").parse_args(words)
    assert (args.quantization, args.preset, args.model_path) == ("int8", "bulk", "MODEL")
    assert not args.compile_in_background


def test_start_up_is_reported_under_vllms_names(monkeypatch, tmp_path, capsys):
    seconds = iter([9.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(startup, "seconds_to_healthy", lambda words, cache: next(seconds))
    path = tmp_path / "new" / "startup.json"
    words = ["bench", "startup", "--num-iters-warmup", "1", "--num-iters-warm", "2"]
    assert main([*words, "--output-json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["cold_startup_times"], report["warm_startup_times"]) == ([9.0], [2.0, 4.0])
    assert report["avg_warm_startup_time"] == report["warm_startup_percentiles"]["50"] == 3.0
    assert "warm: median 3.00 s of 2" in capsys.readouterr().out


def test_the_extra_is_named_where_it_is_missing(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "httpx" else find(n))
    assert main(["bench", "serve"]) == 1
    assert "'.[bench]'" in capsys.readouterr().err


def test_benchmarks_of_the_engine_do_without_the_extra():
    program = "import sys; sys.modules.update(httpx=None, matplotlib=None)\n"
    program += "from server.cli import build_parser; build_parser('bench')\n"
    program += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    def benchmark(options):
        raise OSError(28, "No space left on device", "out.json")

    monkeypatch.setattr(commands, "run_serve", benchmark)
    assert main(["bench", "serve"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxserve bench: ") and "out.json" in error and error.count("\n") == 1
