"""A fake engine that notes constraints and does not hold to them: it has no tokens to mask."""

from __future__ import annotations

from typing import Any

from jaxserve.client.input_processor import PreparedRequest
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams
from tests.server.fake_engine import FakeEngine


class UnconstrainedEngine(FakeEngine):
    """
    Attributes:
        constraint: that of the newest request.
    """

    constraint: StructuredOutputsParams | None = None

    async def prepare(self, prompt: Any, params: Any, *more: Any) -> PreparedRequest:
        if isinstance(params, SamplingParams):
            self.constraint, params.structured_outputs = params.structured_outputs, None
        return await super().prepare(prompt, params, *more)
