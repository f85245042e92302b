"""The requests that may get tokens without sampling: the features decide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.engine.features import EngineFeatures
from jaxserve.execution.features import Feature, Need
from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.layout import array, arrays
from jaxserve.grammars.forced_tokens import forced_tokens
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.request import RequestState
from tests.jaxserve.execution.engine_facts import FACTS
from tests.jaxserve.requests import make_request


@arrays
class Value:
    """A number of each special row."""

    value: Any = array("M", dtype="float32")


class Adjusts(Feature):
    name = "adjusts"

    def need(self, request: Any) -> Need:
        return Need.AT_TIMES if request.params.extra_args else Need.NEVER


class Tells(Adjusts):
    name = "tells"
    outputs = Value


ASKED = {"extra_args": {"tells": True}}


@pytest.mark.parametrize(
    ("kind", "params", "forced"),
    [
        (Logprobs, {}, [5, 6, 7]),
        (Logprobs, {"logprobs": 0}, []),
        (Tells, {}, [5, 6, 7]),
        (Tells, ASKED, []),
        (Adjusts, ASKED, [5, 6, 7]),
    ],
)
def test_what_a_feature_tells_of_is_sampled(
    kind: type[Feature], params: dict[str, Any], forced: list[int]
) -> None:
    request = make_request("r", [1], SamplingParams(**params))
    side = EngineFeatures([kind(FACTS)], [], None, *[lambda *a: None] * 3)
    side.prepare(request)
    request.state = RequestState.RUNNING
    grammar: Any = SimpleNamespace(forced=lambda output: [5, 6, 7])
    assert forced_tokens(request, grammar) == forced
