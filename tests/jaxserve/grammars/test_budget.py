"""Thoughts end when they have as many tokens as they may."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from jaxserve.engine.features import EngineFeatures
from jaxserve.execution.features.feature import Facts, Need, SpecialRow, TakenStep
from jaxserve.execution.features.mask import Mask, MaskInputs
from jaxserve.grammars.budget import ThoughtBudget
from jaxserve.grammars.constraint import Constraint
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.params.structured_outputs_params import Thoughts
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.plan import SeenTokens
from tests.jaxserve.requests import make_request

PIECES = [b"<t>", b"</t>", b"<", b"t>", b"/t", b">", b"a", b" ", b"b</t>c"]
BEGIN, END, A, SPACE, BOTH = 0, 1, 6, 7, 8
PARTS = [2, 4, 5]  # of the closing tag
NO_STEP: Any = None


def budget(most: int, is_open: bool, end: list[int] = PARTS) -> ThoughtBudget:
    return ThoughtBudget(Thoughts("<t>", "</t>", is_open), most, end, PIECES.__getitem__)


def run(made: ThoughtBudget, wanted: list[int]) -> list[int]:
    """The output of a model that samples `wanted`, unless something else is forced."""
    output: list[int] = []
    for token in wanted:
        forced = made.forced(output)
        output.append(token if forced is None else forced)
    return output


def test_the_closing_tag_is_forced_behind_so_many_tokens() -> None:
    for most in range(5):
        found = run(budget(most, is_open=True), [A] * 9)
        assert found == [*[A] * most, *PARTS, *[A] * (6 - most)]
    found = run(budget(2, is_open=False, end=[END]), [SPACE, BEGIN, *[A] * 5])
    assert found == [SPACE, BEGIN, A, A, END, A, A]


def test_a_closing_tag_that_has_begun_is_completed() -> None:
    for num_begun in range(1, len(PARTS)):
        made = budget(3, is_open=True)
        begun = [*[A] * (3 - num_begun), *PARTS[:num_begun]]
        assert run(made, [*begun, *[A] * 5]) == [*begun, *PARTS[num_begun:], *[A] * (2 + num_begun)]
        made.take([*begun, *PARTS[num_begun:]])
        assert made.is_over
    # what looked like one and went on, or one that begins twice
    assert run(budget(2, is_open=True), [2, A, A, A, A, A]) == [2, A, *PARTS, A]
    twice = [2, 4, 2, 5]
    found = run(budget(3, is_open=True, end=twice), [2, 4, 2, *[A] * 3])
    assert found == [*twice, A, A]
    found = run(budget(4, is_open=True, end=twice), [2, 4, 2, 4, *[A] * 3])
    assert found == [2, 4, *twice, A]
    # the opening tag's last token is none of the closing one's
    assert run(budget(0, is_open=False, end=[3, 4]), [2, 3, A, A, A]) == [2, 3, 3, 4, A]


def test_an_opening_tag_may_have_several_tokens() -> None:
    assert run(budget(1, is_open=False), [2, 3, *[A] * 5]) == [2, 3, A, *PARTS, A]


def test_an_answer_without_thoughts_is_left_alone() -> None:
    made = budget(0, is_open=False)
    assert run(made, [A] * 5) == [A] * 5 and made.is_over


def test_thoughts_that_end_themselves() -> None:
    for end in ([END], PARTS, [BOTH]):
        made = budget(4, is_open=True)
        wanted = [A, *end, *[A] * 6]
        assert run(made, wanted) == wanted
        made.take(wanted)
        assert made.is_over and not made.waits(1)


def test_thoughts_may_end_in_several_ways() -> None:
    tags = Thoughts("<t>", "</t>", True, ("<a",))
    made = ThoughtBudget(tags, 4, PARTS, PIECES.__getitem__)
    wanted = [A, 2, *[A] * 6]
    assert run(made, wanted) == wanted
    made.take(wanted)
    assert made.is_over


def test_tokens_are_waited_for_when_one_may_be_too_many() -> None:
    made = budget(3, is_open=True)
    assert not made.waits(1) and made.waits(3)
    made.take([A, A])
    assert not made.waits(0) and made.waits(1)
    copied = copy.copy(made)
    copied.take([A, A, END])
    assert copied.is_over and not made.is_over


def test_the_mask_leaves_the_closing_tag_alone_and_then_nothing_of_it() -> None:
    params = SamplingParams(thinking_token_budget=1)
    rule = StopRule(frozenset(), frozenset(), 0, 20)
    request, mask = make_request("r", [A], params, rule), Mask(Facts(9, 1))
    request.own, request.slot = {Mask.name: Constraint(None, budget(1, is_open=True))}, 0
    EngineFeatures([mask], [], None, *[lambda *given: None] * 3)
    assert mask.need(request) is Need.AT_TIMES
    mask.bind(request, 0)
    waited, masks = [], []
    for output in ([], [A], [A, 2], [A, 2, 4], [A, *PARTS], [A, *PARTS, A]):
        request.output_token_ids, request.pending = [*output], 0
        if mask.needed_now(request):
            inputs = MaskInputs(forbidden=np.zeros((1, 1), np.uint32))
            mask.pack(inputs, [SpecialRow(0, request, 0)], [])
            masks.append(int(~inputs.forbidden[0, 0]))
        mask.took(TakenStep(SeenTokens([request], [A], [0]), {}, {}, [], NO_STEP))
        waited.append(request.needs_seen_tokens)
    assert masks[:4] == [0xFFFFFFFF, 1 << 2, 1 << 4, 1 << 5] and masks[-1] == 0xFFFFFFFF
    assert waited == [False, True, True, True, False, False]
    assert not mask.needed_now(request)
