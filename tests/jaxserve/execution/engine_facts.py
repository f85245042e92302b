"""A small engine's facts, and programs of its features, for tests of the step's inputs."""

from __future__ import annotations

from jaxserve.execution.features import FAST, FULL, FULL_DECODE, Facts, make_features
from jaxserve.execution.row_packer import RowPacker
from jaxserve.execution.step_inputs import BlobLayout, ResultLayout
from jaxserve.execution.step_shape import StepShape

VOCAB, SLOTS, PAGE_SIZE = 20, 4, 16
FACTS = Facts(vocab_size=VOCAB, num_logprobs=3)


def fast(rows: int, tokens: int = 0, lanes: int = 0) -> StepShape:
    return StepShape(rows, tokens, lanes, FAST, 0)


def full(rows: int, tokens: int = 0, lanes: int = 0, special: int | None = None) -> StepShape:
    special = rows + lanes if special is None else special
    return StepShape(rows, tokens, lanes, FULL if tokens else FULL_DECODE, special)


def blob_layout(shape: StepShape, facts: Facts = FACTS) -> BlobLayout:
    return BlobLayout(shape, make_features(facts), facts, PAGE_SIZE)


def result_layout(shape: StepShape, facts: Facts = FACTS) -> ResultLayout:
    return ResultLayout(shape, make_features(facts), facts)


def packer(facts: Facts = FACTS) -> RowPacker:
    return RowPacker(SLOTS, make_features(facts))
