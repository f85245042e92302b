"""Requests as an engine makes them of messages, for tests of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.boundary.messages import AddGroup
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.group import SequenceGroup

NOW = Queueing(0.0)
RULE = StopRule(frozenset(), frozenset(), 0, 16)


def make_request(
    name: str,
    prompt: list[int],
    params: SamplingParams | None = None,
    rule: StopRule = RULE,
    seed: int = 0,
    *,
    group: SequenceGroup | None = None,
    shared: Mapping[str, Any] = MappingProxyType({}),
    bad_words: list[list[int]] | None = None,
    queueing: Queueing = NOW,
    **asked: Any,
) -> Request:
    """A request and the message that asks for nothing else."""
    params = SamplingParams() if params is None else params
    message = AddGroup([name], [seed], prompt, params, rule, bad_words or [], queueing, **asked)
    return Request(name, message, seed, group, shared)
