"""Of a step each front gets what concerns its own sequences."""

from __future__ import annotations

import time

from jaxserve.boundary.messages import FirstStep, Hypothesis, StepOutput
from jaxserve.boundary.reports import LOGPROBS, TokenLogprobs
from jaxserve.request.stop_rule import End, FinishReason
from server.fronts.step_slices import NO_STATS, slices


def test_a_step_is_divided_by_fronts() -> None:
    end, first = End(FinishReason.LENGTH, None), FirstStep(time.monotonic(), None, 2)
    told = TokenLogprobs([5], [-1.0], [1])
    hypothesis = Hypothesis([4], -1.0, end)
    step = StepOutput(
        ["7.0", "1:7.0", "2:7.0", "1:7.1", "1:7.0"],
        [1, 2, 3, 4, 5],
        {0: end, 2: end, 4: end},
        {LOGPROBS: {"1:7.0": told, "7.0": told}},
        {"2:8.0": first, "8.0": first},
        {"2:7.0": 1},
        NO_STATS._replace(num_running=4),
        beams={"1:9.0": [hypothesis]},
        failed={"3:1.0": None},
        queued=["1:7.0", "9.0"],
    )
    found = slices(step)
    assert found.keys() == {"1", "2", "3"}, "the server's own are none of a front's"
    one = found["1"]
    assert (one.sequence_ids, one.tokens) == (["1:7.0", "1:7.1", "1:7.0"], [2, 4, 5])
    assert one.ends == {2: end} and one.reports == {LOGPROBS: {"1:7.0": told}}
    assert one.beams == {"1:9.0": [hypothesis]} and one.queued == ["1:7.0"]
    two = found["2"]
    assert (two.tokens, two.ends, two.first_steps) == ([3], {0: end}, {"2:8.0": first})
    assert two.preempted == {"2:7.0": 1} and found["3"].failed == {"3:1.0": None}
    assert one.stats == two.stats == NO_STATS._replace(num_running=4) and one.step is None
