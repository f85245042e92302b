"""Messages as bytes: what comes out is what went in, and nothing else comes in."""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
import typing
from typing import Any

import msgpack
import pytest

from jaxserve.boundary.engine_view import EngineView, QueueView, SlotView
from jaxserve.boundary.front_messages import (
    AboutModel,
    AddCall,
    Drain,
    EngineStanding,
    FrontClose,
    FrontReady,
    FrontStart,
    HttpAnswer,
    HttpRequest,
    HttpTaken,
    Left,
    RequestEnd,
    RequestFailure,
    Stopped,
)
from jaxserve.boundary.grammar_verdicts import GrammarTokens, SlowGrammar, TryGrammar, Verdict
from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.boundary.image_tiles import Tiling
from jaxserve.boundary.messages import (
    Abort,
    Action,
    AddGroup,
    Body,
    Control,
    EngineStats,
    FirstStep,
    FirstSteps,
    Hypothesis,
    PageStats,
    Refusal,
    StepEstimate,
    StepOutput,
    TierStats,
)
from jaxserve.boundary.process_messages import (
    Beat,
    EngineDecision,
    Join,
    Joined,
    RunCommand,
    WeightsFound,
)
from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.boundary.reports import LOGPROBS, POOLING, PROMPT_SCORES, TokenLogprobs
from jaxserve.boundary.step_history import StepRecord
from jaxserve.boundary.step_times import StepTimes
from jaxserve.boundary.work import Work
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import MessageError
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.params.structured_outputs_params import Thoughts
from jaxserve.processes import wire
from jaxserve.processes.wire import (
    BODIES,
    Channel,
    ModelSizes,
    Ready,
    Start,
    StartRefusal,
    Sync,
    decode,
    encode,
)
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from tests.resolved_config import resolved

PLAIN: dict[Any, Any] = {bool: True, int: 7, float: 0.5, str: "x"}


def filled(body: Any) -> Any:
    """Fields of plain types that have their defaults get other values."""
    hints = typing.get_type_hints(type(body))
    values = {}
    for field in dataclasses.fields(body):
        kind = next(iter(typing.get_args(hints[field.name])), hints[field.name])
        if getattr(body, field.name) == field.default and kind in PLAIN:
            values[field.name] = not field.default if kind is bool else PLAIN[kind]
    return dataclasses.replace(body, **values)


PARAMS = SamplingParams(
    logit_bias={5: -1.5},
    allowed_token_ids=[5, 6],
    stop_token_ids=[9],
    logprobs=3,
    top_p=0.25,
    seed=-7,
    output_kind=RequestOutputKind.DELTA,
)
ADD = AddGroup(
    ["7.0", "7.1"],
    [2**64 - 1, 0],
    [1, 2, 3],
    PARAMS,
    StopRule(frozenset({3}), frozenset({9}), 2, 40, True, RepetitionDetectionParams(3, 2, 4)),
    [[4, 5], [6]],
    Queueing(12.25, -3, 1.5, "key:k"),
    "salt",
    BeamSearchParams(3, 7, early_stopping="never", length_penalty=0.5),
    PoolingParams("mean", False, 2),
    [PromptSpan("a", 0, 2, (1, 4), b"\x00\xff\x80?", (3, 5)), PromptSpan("b", 2, 1, (), b"")],
    "start: x",
    [8, 9],
    Thoughts("<t>", "</t>", True, ("<s>", "")),
)
ADD = filled(ADD)
PAGES = PageStats(9, 8, 7, 6, 5, 4, 3, 2, TierStats(*range(11)))
OUTPUT = StepOutput(
    ["7.0", "8.0"],
    [11, 12],
    {1: End(FinishReason.STOP, 12), 0: End(FinishReason.LENGTH, None)},
    {
        LOGPROBS: {"7.0": TokenLogprobs([11, 5], [-0.5, -1.25], [1, None])},
        PROMPT_SCORES: {"7.0": [TokenLogprobs([1], [-2.0], [4]), None]},
        POOLING: {"8.0": [0.5, -0.25]},
    },
    {"8.0": FirstStep(3.5, None, 4)},
    {"7.0": 2},
    EngineStats(
        1, 2, 0.5, 3, 4, 5, StepTimes(plan=1.5, device_busy=2.5), PAGES, 1, work=Work(10**18, 5, 6)
    ),
    {"9.0": [Hypothesis([4, 3], -1.5, End(FinishReason.STOP, None))]},
    view=EngineView(
        4,
        [SlotView(0, "7.0", -1, 2, 3, 4, 5, 6, 7, True, 8, 1.5)],
        [QueueView(-1, 2, 0.5)],
        9,
        2,
        b"\x00\x01",
        0.25,
        3,
        2,
        b"\x01\x00",
    ),
    step=StepRecord(7, 1.0, 1.5, 2.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 6, 5, 4, 3, 2, 1, 8),
    page_waits=[0.0, 0.25],
    queued=["7.0"],
    failed={"7.0": Refusal("extra_args.a", "{1: 2}", "a number"), "8.0": None},
)
CONFIG = EngineConfig(model="m", hf_overrides={"a": [1, {"b": 2}]}, served_model_name=("x", "y"))
IMAGES = ImageFacts(9, (0, 3, 4, 4), 5, tiling=Tiling(((4, 8), (8, 4)), 4, 2))
ALL: list[Body] = [
    ADD,
    Abort(["7.0"]),
    Control(Action.CLOSE),
    OUTPUT,
    FirstSteps(["7.0"]),
    StepEstimate(20.5, True),
    Start(CONFIG, 20, "json"),
    Ready(resolved(CONFIG), ModelSizes(5, 6, 7, (3, 4), ("a",), (2, 4), IMAGES), "/m", "/t", 99),
    StartRefusal("no"),
    Sync(),
    GrammarTokens("{}", 9, [2, 3]),
    TryGrammar(7, "start: x"),
    SlowGrammar(7),
    Verdict(7, "what compiles", True, "start: x"),
    FrontStart([CONFIG, CONFIG], [{"port": 1}], [{"key": "k"}], "1", 2, 3, 4, 5, 6),
    FrontReady(),
    AboutModel("x", OUTPUT),
    EngineStanding("silent", "why", 3, 0.5),
    AddCall(["a"], [ADD], [[b"\x00"]]),
    Stopped(["1:7.0"]),
    Left("a"),
    RequestEnd("a", None),
    RequestFailure("a", "QueueFullError", "t", "limit", 1.5, "client", "f", "v", "w"),
    HttpRequest(1, {"headers": [[b"a", b"b"]]}, b"body"),
    HttpAnswer(1, {"type": "http.response.body", "body": b"x"}),
    HttpTaken(1, True),
    Drain(0.5),
    FrontClose(),
    Join(1, {"jax": "1"}, {"seed": "0"}),
    Joined("h:1"),
    WeightsFound("digest"),
    EngineDecision(resolved(CONFIG), "digest"),
    RunCommand("a program", b"\x00\xff"),
    Beat(),
]


@pytest.mark.parametrize("body", ALL, ids=lambda body: body.kind)
def test_what_comes_out_is_what_went_in(body: Body) -> None:
    data = encode(body)
    found = decode(data[4:])
    assert found == body and type(found) is type(body)
    assert struct.unpack(">I", data[:4]) == (len(data) - 4,)


def test_every_kind_of_message_is_tried_and_none_of_its_fields_has_its_default() -> None:
    assert {type(body) for body in ALL} == set(BODIES)
    for body in (ADD, OUTPUT):
        for field in dataclasses.fields(body):  # type: ignore[arg-type]
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if default is not dataclasses.MISSING:
                assert getattr(body, field.name) != default, field.name


def test_types_are_restored_within() -> None:
    added: Any = decode(encode(ADD)[4:])
    assert added.params.output_kind is RequestOutputKind.DELTA
    assert added.stop_rule.check(9, 2) == End(FinishReason.STOP, 9), "ends are made anew"
    output: Any = decode(encode(OUTPUT)[4:])
    assert output.ends[1].reason is FinishReason.STOP
    assert isinstance(output.reports[LOGPROBS]["7.0"], TokenLogprobs)
    assert isinstance(output.reports[PROMPT_SCORES]["7.0"][0], TokenLogprobs)
    assert isinstance(output.failed["7.0"], Refusal)
    assert isinstance(output.stats.times, StepTimes) and output.stats.pages.num_found == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"nonsense",
        msgpack.packb([0, "unknown", []]),
        msgpack.packb([0, "abort"]),
        msgpack.packb([0, "abort", [["1.0"], 5]]),
        msgpack.packb([0, "control", ["no such action"]]),
        msgpack.packb([0, "start", [["m"], 20]]),
        msgpack.packb([0, "about_model", ["x", ["unknown", []]]]),
        encode(ADD)[4:-9],
        encode(ADD)[4:] + b"\x00",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="are no message"):
        decode(data)


def test_only_plain_data_is_written() -> None:
    with pytest.raises(MessageError, match="cannot be written"):
        encode(Abort([object()]))  # type: ignore[list-item]


def test_a_channel_carries_messages_in_order_whole_or_in_pieces() -> None:
    one, other = socket.socketpair()
    sent, writer = list(ALL) * 50, Channel(one)
    frames = b"".join(map(writer.frame, sent))
    long = dataclasses.replace(ADD, prompt_token_ids=[*range(300_000)])

    def write() -> None:
        for begin in range(0, len(frames), 997):
            one.sendall(frames[begin : begin + 997])
        writer.send(long)
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    reader, found = Channel(other), []
    while (body := reader.receive()) is not None:
        found.append(body)
    thread.join()
    assert found == [*sent, long]


def test_a_message_that_is_lost_or_comes_twice_is_refused() -> None:
    one, other = socket.socketpair()
    writer, reader = Channel(one), Channel(other)
    with pytest.raises(MessageError):
        writer.frame(Abort([object()]))  # type: ignore[list-item]
    frames = [writer.frame(body) for body in (ADD, Sync(), Sync())]
    writer.send_frame(frames[0])
    assert reader.receive() == ADD, "what could not be written has no number"
    writer.send_frame(frames[2])
    with pytest.raises(MessageError, match="message 2 of kind sync instead of message 1"):
        reader.receive()


def test_what_has_arrived_is_taken_without_waiting() -> None:
    one, other = socket.socketpair()
    reader, writer = Channel(other), Channel(one)
    assert [*reader.arrived()] == []
    first, frame = writer.frame(Sync()), writer.frame(ADD)
    one.sendall(first + frame[:10])
    assert [*reader.arrived()] == [Sync()]
    one.sendall(frame[10:])
    assert [*reader.arrived()] == [ADD]
    one.close()
    with pytest.raises(EOFError):
        next(reader.arrived())
    assert reader.receive() is None


def test_messages_are_bounded(monkeypatch) -> None:
    one, other = socket.socketpair()
    one.sendall(struct.pack(">I", wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MessageError, match="bytes, 1073741824 may"):
        Channel(other).receive()
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 50)
    with pytest.raises(MessageError, match="kind add has"):
        encode(ADD)


@pytest.mark.parametrize("changes", [{"cache_salt": "\ud800"}, {"seeds": [2**70]}], ids=str)
def test_what_cannot_be_written_is_said_of_its_message(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="of kind add"):
        encode(dataclasses.replace(ADD, **changes))
