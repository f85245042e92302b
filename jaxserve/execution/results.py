"""A step on its way: packed, dispatched, fetched."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.execution.programs import Program
from jaxserve.execution.row_packer import PackedRows, StepNeeds
from jaxserve.execution.step_inputs import Result
from jaxserve.request.request import Request
from jaxserve.scheduling.plan import StepPlan


class PackedStep(NamedTuple):
    """A plan as the operand of a program."""

    program: Program
    needs: StepNeeds
    packed: PackedRows


class StepInFlight(NamedTuple):
    """A step that the device works on.

    Attributes:
        plan: what it does.
        step: the plan as the operand of a program.
        result: see `ResultLayout`.
        aside: arrays that features have set aside, by "feature.name"; they need not be fetched.
    """

    plan: StepPlan
    step: PackedStep
    result: jax.Array
    aside: dict[str, jax.Array]

    def set_aside(self, feature: str, name: str) -> tuple[jax.Array, list[ComputedTokens]] | None:
        """An array [T, ...] that a feature has set aside, and whose tokens its rows are.

        None: the step's program does not contain the feature.
        """
        found = self.aside.get(f"{feature}.{name}")
        return None if found is None else (found, self._computed())

    def _computed(self) -> list[ComputedTokens]:
        shape, needs, rows = self.step.program.layout.shape, self.step.needs, self.plan.rows
        begin = shape.num_decode_tokens
        decoding = [*range(self.plan.num_decode), *needs.single]
        places = {row: place * shape.num_queries for place, row in enumerate(decoding)}
        for row in needs.lanes:
            places[row] = begin
            begin += rows.lengths[row]
        return [
            ComputedTokens(rows.requests[row], rows.starts[row], rows.lengths[row], place)
            for row, place in places.items()
        ]


class ComputedTokens(NamedTuple):
    """Tokens of a request that a step computes, and their place among the T of `Tokens`."""

    request: Request
    start: int
    length: int
    place: int


class StepResult(NamedTuple):
    """A fetched step.

    Attributes:
        tokens: sampled tokens in the order of the plan's samples.
        counts: how many of them each sample has; None: one each.
        outputs: what the features report, by their names.
        special: index of a sample -> its place among the special rows, which `outputs` are about.
    """

    tokens: list[int]
    counts: list[int] | None
    outputs: dict[str, Any]
    special: dict[int, int]


def step_result(dispatched: StepInFlight, fetched: np.ndarray) -> StepResult:
    """What the int32 array that came back from a step means for its plan."""
    program, needs, packed = dispatched.step
    shape = program.layout.shape
    found: Result = program.result.views(fetched)
    rows, decodes = packed.rows, dispatched.plan.num_decode
    special = {
        index: rows[index] if shape.all_special else place
        for place, (index, _) in enumerate(needs.special)
    }
    token = found.step.token
    if shape.num_queries == 1:
        tokens = token[:decodes].tolist() + [int(token[row]) for row in rows[decodes:]]
        return StepResult(tokens, None, found.features, special)
    counts = found.step.count[:decodes].tolist() + [1] * (len(rows) - decodes)
    tokens = [int(t) for row, count in zip(rows, counts) for t in token[row : row + count]]
    return StepResult(tokens, counts, found.features, special)
