"""The token that ends a request, and the reason."""

from __future__ import annotations

from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.request.stop_rule import End, FinishReason, StopRule


def test_what_ends_a_request() -> None:
    eos, stop, other = 2, 5, 7
    rule = StopRule(frozenset({eos}), frozenset({stop}), min_tokens=2, max_tokens=4)
    assert rule.check(eos, 1) is None and rule.check(stop, 1) is None
    assert rule.check(eos, 2) == End(FinishReason.STOP, None)
    assert rule.check(stop, 2) == End(FinishReason.STOP, stop)
    assert rule.check(other, 3) is None
    assert rule.check(other, 4) == End(FinishReason.LENGTH, None)


def test_an_ignored_end_of_sequence_ends_nothing_unless_it_is_a_stop_token() -> None:
    rule = StopRule(frozenset({2, 3}), frozenset({3}), 0, max_tokens=4, ignore_eos=True)
    assert rule.check(2, 1) is None
    assert rule.check(3, 1) == End(FinishReason.STOP, 3)


def test_a_repetition_ends_a_request_that_has_its_tokens() -> None:
    asked = RepetitionDetectionParams(2, 1, 3)
    rule = StopRule(frozenset(), frozenset(), 4, 9, repetition=asked)
    assert rule.check_repetition([7, 7, 7]) is None, "min_tokens"
    assert rule.check_repetition([7, 7, 7, 7]) == End(FinishReason.REPETITION, None)
    assert rule.check_repetition([7, 7, 7, 8]) is None
    assert StopRule(frozenset(), frozenset(), 0, 9).check_repetition([7] * 8) is None
