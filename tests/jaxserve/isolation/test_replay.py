"""Replay of a request: exactly its unfinished sequences, with the tokens that have come."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.client.output_processor import RequestProgress
from jaxserve.isolation.replay import resumed
from jaxserve.params.beam_search_params import BeamSearchParams
from tests.jaxserve.processes.test_wire import ADD

GROUP = replace(ADD, beams=None, pooling=None, spans=[], output_token_ids=[])


def test_a_request_that_waited_is_sent_as_it_was() -> None:
    assert resumed(RequestProgress(GROUP, {"7.0": [], "7.1": []}, False)) == [GROUP]


def test_a_sequence_with_tokens_goes_on_by_itself() -> None:
    first, second = resumed(RequestProgress(GROUP, {"7.0": [], "7.1": [4, 5]}, False))
    assert (first.sequence_ids, first.seeds, first.output_token_ids) == (["7.1"], [0], [4, 5])
    assert (second.sequence_ids, second.seeds) == (["7.0"], [2**64 - 1])
    assert second.output_token_ids == []
    for one in (first, second):
        assert one.stop_rule == GROUP.stop_rule and one.queueing == GROUP.queueing
    (left,) = resumed(RequestProgress(GROUP, {"7.1": [4]}, False))
    assert left.sequence_ids == ["7.1"], "the other one has ended"


def test_a_prompt_is_scored_once() -> None:
    scored = replace(GROUP, params=replace(GROUP.params, prompt_logprobs=2))
    for is_scored, wanted in ((True, None), (False, 2)):
        (again, *_) = resumed(RequestProgress(scored, {"7.0": [4], "7.1": []}, is_scored))
        assert again.params.prompt_logprobs == wanted and again.params.logprobs == 3
    assert scored.params.prompt_logprobs == 2, "what was sent is as it was"


def test_a_search_begins_again() -> None:
    beams = replace(GROUP, beams=BeamSearchParams(2, 7))
    assert resumed(RequestProgress(beams, {"7.0": [], "7.1": []}, False)) == [beams]
