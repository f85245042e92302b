"""Traces of load: what a server writes down, and what is refused of a file."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jaxserve.boundary.messages import AddGroup, EngineStats, FirstStep, StepOutput
from jaxserve.boundary.step_history import StepRecord
from jaxserve.boundary.step_times import StepTimes
from jaxserve.errors import ValidationError
from jaxserve.observability.load_trace import (
    KEY_PAGE,
    TracedRequest,
    block_tokens,
    read_trace,
    write_requests,
)
from jaxserve.observability.trace_recorder import TraceRecorder
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import StopRule

GOOD = '{"prompt_tokens": 3, "output_tokens": 2}'


def group(name: str, prompt: list[int], arrival: float, client: str = "", n: int = 1) -> AddGroup:
    names = [f"{name}-{index}" for index in range(n)]
    rule = StopRule(frozenset(), frozenset(), 0, 9)
    turn = Queueing(arrival, 2, None, client)
    return AddGroup(names, [0] * n, prompt, SamplingParams(), rule, [], turn)


def output(tokens: dict[str, int], number: int, fetched: float, first=()) -> StepOutput:
    record = StepRecord(
        number, fetched - 0.03, fetched - 0.02, fetched, *[0.001] * 5, 0.02, 1, 1, 1, 7, 2, 0, 5,
        num_decode_keys=11, num_prefill_keys=28,
    )  # fmt: skip
    return StepOutput(
        sequence_ids=[*tokens],
        tokens=[*tokens.values()],
        ends={},
        reports={},
        first_steps={name: FirstStep(at, 0.002, 0) for name, at in first},
        preempted={},
        stats=EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes()),
        step=record,
    )


def test_a_server_writes_lengths_times_and_keys_but_no_text(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    common, secret = [7777] * 20, "acme corporation"
    recorder.added("a", group("a", [*common, 8881], 100.0, secret))
    recorder.added("b", group("b", [*common, 8882], 100.5, secret, n=2))
    recorder.added("c", group("c", [9999] * 21, 101.0))
    recorder.took(output({"a-0": 8883}, 0, 101.2, [("a-0", 100.2), ("b-0", 101.0)]), 101.25)
    recorder.took(output({"a-0": 8884, "b-0": 1, "b-1": 2, "c-0": 3}, 1, 101.5), 101.6)
    recorder.ended("a")
    recorder.ended("b")
    recorder.ended("c")
    recorder.ended("unknown")
    recorder.close()
    text = path.read_text()
    for word in ("7777", "8881", "8883", "9999", "acme"):
        assert word not in text
    trace = read_trace(path)
    a, b, other, c = trace.requests
    assert (a.arrival, a.prompt_tokens, a.output_tokens, a.priority) == (0.0, 21, 2, 2)
    assert (b.arrival, b.output_tokens, other.output_tokens, c.output_tokens) == (0.5, 1, 1, 1)
    assert (a.queue, a.overhead, a.ttft, a.last) == pytest.approx((0.2, 0.002, 1.25, 1.6))
    assert a.delivery == pytest.approx(0.05) and c.queue is None
    assert len(a.keys) == 23 // KEY_PAGE == 1 and a.keys == b.keys == other.keys != c.keys
    assert a.client == b.client != c.client == ""
    first, _ = trace.steps
    assert first.fetched == pytest.approx(1.2) and first.dispatched == pytest.approx(1.18)
    assert (first.num_prefill_tokens, first.num_decode_keys, first.num_prefill_keys) == (7, 11, 28)
    assert path.stat().st_mode & 0o077 == 0, "it is nobody else's"


def test_keys_of_two_recordings_have_nothing_in_common(tmp_path):
    keys = []
    for name in ("one", "two"):
        recorder = TraceRecorder(tmp_path / name)
        recorder.added("a", group("a", [5] * 40, 0.0))
        recorder.took(output({"a-0": 1}, 0, 1.0), 1.0)
        recorder.ended("a")
        recorder.close()
        keys.append(set(read_trace(tmp_path / name).requests[0].keys))
    assert not keys[0] & keys[1]


def test_a_recording_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"--record-trace=.*can be written"):
        TraceRecorder(tmp_path / "none" / "trace.jsonl")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r":2='\{'.* is not supported: a JSON object"),
        ("[1]", ":2='.1.'.* is not supported: a JSON object"),
        ('{"prompt_tokens": 3}', ":2 output_tokens=None"),
        ('{"prompt_tokens": 0, "output_tokens": 1}', ":2 prompt_tokens=0"),
        ('{"prompt_tokens": true, "output_tokens": 1}', ":2 prompt_tokens=True"),
        (GOOD[:-1] + ', "arrival": -1}', ":2 arrival=-1"),
        (GOOD[:-1] + ', "arrival": NaN}', ":2 arrival=nan"),
        (GOOD[:-1] + ', "arival": 1}', ":2 arival=1.* is not supported: one of arrival"),
        (GOOD[:-1] + ', "priority": 1.5}', ":2 priority=1.5"),
        (GOOD[:-1] + ', "client": 3}', ":2 client=3"),
        (GOOD[:-1] + ', "keys": ["a"]}', ":2 keys='1 keys'.* is not supported: at most 0"),
        (GOOD[:-1] + ', "keys": [1]}', ":2 keys=.1."),
        (
            GOOD[:-1] + ', "adapter": "x"}',
            ":2 adapter='x'.*: left out: adapters and drafts",
        ),
        ('{"step": [1, 2]}', ":2 step=.1, 2..* is not supported: 18 numbers"),
        ('{"trace": 99}', ":2 trace=99.* is not supported: 1"),
    ],
)
def test_an_error_names_file_line_and_field(line, said, tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ValidationError, match=said) as told:
        read_trace(path)
    assert str(path) in str(told.value) and "\n" not in str(told.value)


def test_a_file_without_requests_is_none(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(ValidationError, match=name):
            read_trace(tmp_path / name)


def test_what_is_written_is_read(tmp_path):
    requests = [TracedRequest(0.5, 40, 3, 1, "c", ("x", "y")), TracedRequest(1.0, 2, 1)]
    write_requests(tmp_path / "w", requests)
    assert read_trace(tmp_path / "w").requests == requests
    assert json.loads((tmp_path / "w").read_text().splitlines()[1])["prompt_tokens"] == 2


def test_tokens_are_equal_where_keys_are():
    keys: dict[str, int] = {}
    one = block_tokens(keys, TracedRequest(0, 40, 8, keys=("a", "b")), 1000)
    two = block_tokens(keys, TracedRequest(0, 40, 8, keys=("a", "c")), 1001)
    assert one[:16] == two[:16] and one[16:32] != two[16:32]
    assert one[32:] == [1000] * 16 and len(one) == 48


def test_a_full_disk_ends_the_recording_and_not_the_server(tmp_path, caplog, monkeypatch):
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    monkeypatch.setattr("jaxserve.observability.trace_recorder.FLUSH_LINES", 1)

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "_file", SimpleNamespace(write=lambda text: None, flush=full))
    recorder.added("a", group("a", [5] * 40, 0.0))
    for number in range(3):
        recorder.took(output({"a-0": 1}, number, 1.0), 1.0)
    recorder.ended("a")
    recorder.close()
    assert caplog.text.count("No space left") == 1
