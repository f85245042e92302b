"""What callers see of a sequence's tokens, without an engine."""

from __future__ import annotations

from checkpoints import bundled_model_path
from jaxserve import SamplingParams
from jaxserve.engine import StepOutput
from jaxserve.inputs import PreparedRequest
from jaxserve.observability.metrics import Metrics
from jaxserve.output_processor import OutputProcessor
from jaxserve.request import Request, StopRule
from jaxserve.scheduling.plan import SeenTokens
from jaxserve.tokenization.tokenizer import Tokenizer


def test_an_abort_hands_out_the_text_that_waited_for_a_stop_string() -> None:
    tokenizer = Tokenizer(bundled_model_path())
    outputs = OutputProcessor(tokenizer, Metrics("m"))
    params = SamplingParams(stop=["bc"])
    request = Request("0.0", [5], params, StopRule(frozenset(), frozenset(), 0, 9), seed=0)
    outputs.add(PreparedRequest("r", None, [5], params, [request], 0.0))
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    for token in tokens:
        seen = SeenTokens(requests=[request], tokens=[token], rows=[0])
        last = outputs.process(StepOutput(seen)).outputs[0]
    assert last.outputs[0].text == "a"
    aborted, sequences = outputs.abort("r")
    assert aborted is not None and sequences == ["0.0"] and aborted.finished
    assert (aborted.outputs[0].text, aborted.outputs[0].finish_reason) == ("ab", "abort")
