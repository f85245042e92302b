"""A sequence's tokens become a caller's outputs, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import SamplingParams
from jaxserve.boundary.messages import AddGroup, EngineStats, FirstStep, Refusal, StepOutput
from jaxserve.boundary.reports import LOGPROBS, PROMPT_SCORES, TokenLogprobs
from jaxserve.boundary.step_times import StepTimes
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.client.output_processor import OutputProcessor
from jaxserve.errors import ValidationError
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import FlatLogprobs, Logprob, RequestOutput
from jaxserve.params.sampling_params import RequestOutputKind
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from jaxserve.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model_path())


NO_STATS = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())
NOTHING: dict[str, Any] = {
    "sequence_ids": [],
    "tokens": [],
    "ends": {},
    "reports": {},
    "first_steps": {},
    "preempted": {},
    "stats": NO_STATS,
}


class Run:
    """One request, whose tokens the test makes up."""

    def __init__(self, tokenizer: Tokenizer | None, **options: Any):
        self.outputs = OutputProcessor(tokenizer, Metrics("m"), ClientClock(), keeps_groups=True)
        params = SamplingParams(**options)
        rule = StopRule(frozenset(), frozenset(), 0, 9)
        ids = [f"0.{index}" for index in range(params.n)]
        group = AddGroup(ids, [0] * params.n, [5], params, rule, [], Queueing(0.0))
        self.outputs.add(PreparedRequest("r", None, params, group))

    def step(self, token: int, logprobs: TokenLogprobs | None = None) -> RequestOutput:
        return self.take(
            {"0.0": [token]}, reports={} if logprobs is None else {LOGPROBS: {"0.0": logprobs}}
        )[0]

    def take(self, tokens: dict[str, list[int]], **more: Any) -> list[RequestOutput]:
        pairs = [(name, token) for name, several in tokens.items() for token in several]
        entries = {"sequence_ids": [n for n, _ in pairs], "tokens": [t for _, t in pairs]}
        return self.outputs.process(StepOutput(**(NOTHING | entries | more))).outputs


def test_an_abort_hands_out_the_text_that_waited_for_a_stop_string(tokenizer) -> None:
    run = Run(tokenizer, stop=["bc"])
    for token in tokenizer.encode("ab", add_special_tokens=False):
        last = run.step(token)
    assert last.outputs[0].text == "a"
    aborted, sequences = run.outputs.abort("r")
    assert aborted is not None and sequences == ["0.0"] and aborted.finished
    assert (aborted.outputs[0].text, aborted.outputs[0].finish_reason) == ("ab", "abort")


@pytest.mark.parametrize("detokenize", [True, False])
def test_the_token_itself_is_first_among_its_logprobs(tokenizer, detokenize: bool) -> None:
    a, b, c = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
    scored = TokenLogprobs([b, a, b, c], [-2.0, -0.5, -2.0, -9.0], [2, 1, 2, None])
    run = Run(tokenizer, logprobs=2, detokenize=detokenize)
    done = run.step(b, scored).outputs[0]
    assert done.logprobs is not None and list(done.logprobs[0]) == [b, a, c]
    assert done.logprobs[0][b] == Logprob(-2.0, 2, "b" if detokenize else None)
    assert done.logprobs[0][c] == Logprob(-9.0, None, "c" if detokenize else None)
    assert done.cumulative_logprob == -2.0


def test_tokens_reach_the_sequences_that_they_are_named_for() -> None:
    run = Run(None, n=3, temperature=1.0)
    run.take({"0.2": [7], "0.0": [8, 9], "7.1": [1]})
    (last,) = run.take({"0.1": [6]})
    assert [one.token_ids for one in last.outputs] == [[8, 9], [6], [7]]


def test_what_the_engine_says_of_the_schedule_is_in_the_metrics() -> None:
    run = Run(None, n=2, temperature=1.0)
    run.take({}, first_steps={"0.0": FirstStep(3.0, 0.5, 8), "9.0": FirstStep(1.0, None, 0)})
    run.take({}, first_steps={"0.1": FirstStep(4.0, None, 24)}, preempted={"0.1": 2, "9.0": 1})
    aborted, sequences = run.outputs.abort("r")
    assert sequences == ["0.0", "0.1"] and not run.outputs.has_live
    assert aborted is not None and aborted.metrics is not None
    assert (aborted.metrics.first_scheduled_time, aborted.metrics.queue_overhead) == (3.0, 0.5)
    assert aborted.metrics.num_preemptions == 2
    assert aborted.num_cached_tokens == 8, "of the sequence that went ahead"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_stream_tells_by_intervals_but_for_its_ends(kind: RequestOutputKind) -> None:
    run = Run(None, stream_interval=3, output_kind=kind, max_tokens=9, detokenize=False)
    told = []
    for token in range(9):
        ends = {0: End(FinishReason.LENGTH, None)} if token == 8 else {}
        told += [(token, out) for out in run.take({"0.0": [token]}, ends=ends)]
    assert [token for token, _ in told] == [0, 3, 6, 8]
    heard = [out.outputs[0].token_ids for _, out in told]
    if kind is RequestOutputKind.DELTA:
        heard = [[*range(9)][: sum(map(len, heard[: n + 1]))] for n in range(len(heard))]
    assert heard == [[0], [0, 1, 2, 3], [*range(7)], [*range(9)]]
    assert told[-1][1].finished


@pytest.mark.parametrize(
    ("reason", "told"),
    [(FinishReason.ERROR, "grammar"), (FinishReason.NOT_COMPILED, "grammar_not_compiled")],
)
def test_whose_fault_it_is_that_a_grammar_ends_a_text(reason: FinishReason, told: str) -> None:
    run = Run(None, detokenize=False)
    (output,) = run.take({"0.0": [3]}, ends={0: End(reason, None)})
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", told)


def test_a_request_that_a_feature_refuses_ends_with_that_error() -> None:
    run = Run(None, n=2, temperature=1.0)
    refusal = Refusal.of(ValidationError("extra_args.a.b", {"c": "d"}, "a number"))
    assert Refusal.of(RuntimeError("a bug")) is None
    processed = run.outputs.process(StepOutput(**NOTHING, failed={"0.0": refusal}))
    assert processed.outputs == [] and processed.stopped == {"0.0": "r", "0.1": "r"}
    error: Any = processed.refused["r"]
    assert str(error) == "extra_args.a.b={'c': 'd'} is not supported: a number"
    assert (error.field, error.allowed) == ("extra_args.a.b", "a number")
    assert not run.outputs.has_live


def test_the_last_delta_has_the_reports_of_all_steps() -> None:
    run = Run(None, output_kind=RequestOutputKind.DELTA, detokenize=False)
    told = [
        run.take({"0.0": [token]}, ends=ends, reports={"own": {"0.0": token}})[0].outputs[0]
        for token, ends in ((3, {}), (4, {}), (5, {0: End(FinishReason.LENGTH, None)}))
    ]
    assert [one.token_ids for one in told] == [[3], [4], [5]]
    assert [one.reports for one in told] == [None, None, {"own": [3, 4, 5]}]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_logprobs_in_few_lists(kind: RequestOutputKind) -> None:
    asked: dict[str, Any] = {"logprob_token_ids": [9], "output_kind": kind, "prompt_logprobs": 0}
    runs = Run(None, **asked), Run(None, **asked, flat_logprobs=True)
    for token in (7, 8):
        told = TokenLogprobs([token, 9], [-0.5, -1.5], [1, None])
        plain, flat = (run.step(token, told).outputs[0] for run in runs)
        assert isinstance(flat.logprobs, FlatLogprobs) and [*flat.logprobs] == plain.logprobs
        assert set(plain.logprobs[-1]) == {token, 9}
        assert flat.cumulative_logprob == plain.cumulative_logprob
    assert runs[1].step(7, told).prompt_logprobs == FlatLogprobs.of([None])


def test_scores_of_a_prompt_are_told_where_they_were_asked_for() -> None:
    """As in a server behind fronts; a replay does not ask for them again."""
    run = Run(None)
    scores = {PROMPT_SCORES: {"0.0": [TokenLogprobs([9], [-1.0], [1])]}}
    assert run.take({"0.0": [7]}, reports=scores)[0].prompt_logprobs is None
    assert run.outputs.unfinished("r").is_scored


def test_a_repetition_is_told() -> None:
    ends = {0: End(FinishReason.REPETITION, None)}
    (output,) = Run(None).take({"0.0": [7]}, ends=ends)
    one = output.outputs[0]
    assert (one.finish_reason, one.stop_reason) == ("repetition", "repetition_detected")
