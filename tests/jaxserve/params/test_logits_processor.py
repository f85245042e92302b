"""What is a logits processor, of which kind, and which arguments it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve import EngineConfig, SamplingParams, logits_processor
from jaxserve.errors import ValidationError
from jaxserve.params.logits_processor import HostProcessor, JaxProcessor, as_processor


def traced(logits, rows, state):
    return logits, state


def of_output(output_token_ids, logits):
    return logits


def of_both(prompt_token_ids, output_token_ids, logits):
    return logits


class OfVllm:
    def apply(self, logits): ...
    def update_state(self, batch_update): ...
    def is_argmax_invariant(self): ...


@logits_processor(args={"ids": np.full(3, -1), "by": 2.0, "key": 7}, state=np.float32(0))
def boost(logits, rows, state):
    """Of the tests."""
    return logits, state


def test_the_kind_is_that_of_the_parameters() -> None:
    assert isinstance(as_processor(traced), JaxProcessor)
    found = as_processor(of_output), as_processor(of_both)
    assert all(isinstance(one, HostProcessor) for one in found)
    assert [one.reads_prompt for one in found if isinstance(one, HostProcessor)] == [False, True]
    assert as_processor(OfVllm) is OfVllm
    assert as_processor(boost) is boost and boost.name == "boost"
    assert (boost.__doc__, boost.__module__) == ("Of the tests.", __name__)
    assert as_processor(f"{__name__}:boost") is boost
    params = SamplingParams(logits_processors=[boost, of_output])
    assert params.clone().logits_processors == params.logits_processors
    assert params.for_engine().logits_processors is None


@pytest.mark.parametrize(
    "given",
    [
        5,
        "boost",
        "no_such_module:x",
        lambda x: x,
        lambda a, b, c, d: a,
        dict,
        object(),
        f"{__name__}:np",
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_what_is_none_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ValidationError, match="logits_processors"):
        SamplingParams(logits_processors=[given])


def test_a_class_is_given_to_the_engine_and_not_by_a_request() -> None:
    with pytest.raises(ValidationError, match="classes are given to the engine"):
        SamplingParams(logits_processors=[OfVllm])
    config = EngineConfig(model="m", logits_processors=[OfVllm, "a.b:c", boost])
    assert config.logits_processors == (OfVllm, "a.b:c", boost)
    for wrong in (["no name"], 5, [3]):
        with pytest.raises(ValidationError, match="logits_processors"):
            EngineConfig(model="m", logits_processors=wrong)  # type: ignore[arg-type]


def test_arguments_have_the_type_and_length_of_their_defaults() -> None:
    asked = boost.with_args(ids=[4, 5], by=3)
    assert asked.args["by"] == 3.0 and asked.args["key"] == 7
    np.testing.assert_array_equal(asked.args["ids"], [4, 5, -1])
    np.testing.assert_array_equal(boost.with_args(ids=[]).args["ids"], [-1, -1, -1])
    wrong: list[dict[str, Any]] = [
        {"ids": [1, 2, 3, 4]},
        {"ids": [0.5]},
        {"ids": 3},
        {"ids": [[1], [2, 3]]},
        {"by": "x"},
        {"by": True},
        {"by": float("nan")},
        {"key": 2.5},
        {"key": 2**31},
        {"other": 1},
    ]
    for given in wrong:
        (name,) = given
        with pytest.raises(ValidationError, match=rf"logits_processors\.boost\.{name}"):
            boost.with_args(**given)
    for default in ("x", np.zeros((2, 2)), np.zeros(0), True, np.zeros(300)):
        with pytest.raises(ValidationError, match="by"):
            logits_processor(traced, args={"by": default})
