"""What callers see of a sequence's tokens, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import SamplingParams
from jaxserve.engine import StepOutput, TokenLogprobs
from jaxserve.inputs import PreparedRequest
from jaxserve.observability.metrics import Metrics
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import Logprob, RequestOutput
from jaxserve.request import Request, StopRule
from jaxserve.scheduling.plan import SeenTokens
from jaxserve.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model_path())


class Run:
    """One request of one sequence, whose tokens the test makes up."""

    def __init__(self, tokenizer: Tokenizer, **options: Any):
        self.outputs = OutputProcessor(tokenizer, Metrics("m"))
        params = SamplingParams(**options)
        rule = StopRule(frozenset(), frozenset(), 0, 9)
        self.request = Request("0.0", [5], params, rule, seed=0)
        self.outputs.add(PreparedRequest("r", None, [5], params, [self.request], 0.0))

    def step(self, token: int, logprobs: TokenLogprobs | None = None) -> RequestOutput:
        step = StepOutput(SeenTokens(requests=[self.request], tokens=[token], rows=[0]))
        if logprobs is not None:
            step.logprobs[0] = logprobs
        return self.outputs.process(step).outputs[0]


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
    scored = TokenLogprobs(b, -2.0, 3, [a, c, b], [-0.5, -1.0, -2.0])
    for count, expected in ((0, [b]), (1, [b, a]), (2, [b, a, c])):
        run = Run(tokenizer, logprobs=count, detokenize=detokenize)
        done = run.step(b, scored).outputs[0]
        assert done.logprobs is not None and list(done.logprobs[0]) == expected
        assert done.logprobs[0][b] == Logprob(-2.0, 3, "b" if detokenize else None)
        assert done.cumulative_logprob == -2.0
