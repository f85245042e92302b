"""What a feature of the step is: a part with a host side and a traced side, in one file.

A feature adjusts logits, draws tokens or reports on them for the rows whose requests ask for it.
Programs contain a set of features; a step runs on a program whose set holds what its rows need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax

from jaxserve.request import Request
from jaxserve.scheduling.plan import PrefillLane, StepPlan

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape


class Need(Enum):
    """In which steps a request's sampling row needs a feature."""

    NEVER = 0
    AT_TIMES = 1  # `Feature.needed_now` says when
    ALWAYS = 2


class Facts(NamedTuple):
    """What every feature may want to know of the engine."""

    vocab_size: int
    num_logprobs: int  # K, the most that a request may ask for


class SpecialRow(NamedTuple):
    """A sampling row that needs a costly feature: its place among the special rows, and whose."""

    place: int
    request: Request
    slot: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The traced side's view of sampling rows: all R of a step, or the M special ones.

    Attributes:
        slot: int32[R], rows of the device state.
        position: int32[R], of the last computed token; the sampled one follows it.
        prompt_len: int32[R].
        history: int32[S + 1, L], the device state's token ids by slot and position; a sequence's
            own end at position.
        values: each feature's row values by its name, see `Feature.row`.
    """

    slot: jax.Array
    position: jax.Array
    prompt_len: jax.Array
    history: jax.Array
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Region:
    """The traced side's view of the prefill region.

    Attributes:
        hidden: [C, E] last hidden states.
        logits_of: hidden states [N, E] -> float32 logits [N, V].
    """

    hidden: jax.Array
    logits_of: Any


class Feature:
    """A part of the step. The methods here are those of a feature that does nothing.

    Attributes:
        name: of the feature.
        row: dataclass of scalars that each sampling row has, or None. They are remembered by slot
            and travel with every row of a program that contains the feature.
        inputs: dataclass of arrays (see `layout.array`) in the blob, or None. Axes: R sampling
            rows, M special rows, C region tokens, W words of a bit a token of the vocabulary.
        outputs: dataclass of arrays in the result, or None. Axes as before, and K.
        special: rows that need it are special: it sees those M rows only.
        of_region: it works on the prefill region: decode programs do without it.
    """

    name: ClassVar[str]
    row: ClassVar[type | None] = None
    inputs: ClassVar[type | None] = None
    outputs: ClassVar[type | None] = None
    special: ClassVar[bool] = True
    of_region: ClassVar[bool] = False

    # -- host --------------------------------------------------------------------------------

    def need(self, request: Request) -> Need:
        """Whether the request's sampling rows need the feature; asked once a request."""
        return Need.NEVER

    def needed_now(self, request: Request) -> bool:
        """Whether the next sampling row needs it, of a request that needs it at times.

        Once it does not, it never does again.
        """
        return False

    def needed_by_chunk(self, lane: PrefillLane) -> bool:
        """Whether a prefill chunk needs it, apart from its sampling row."""
        return False

    def row_of(self, request: Request, facts: Facts) -> Any:
        """The request's row values, an instance of `row`."""
        return None

    def bind(self, request: Request, slot: int, facts: Facts) -> None:
        """Prepare what stays the same while the request, which needs the feature, has the slot."""

    def pack(self, inputs: Any, rows: list[SpecialRow], plan: StepPlan, facts: Facts) -> None:
        """Write the inputs, NumPy views that hold zeros; `rows` are those that need the feature."""

    # -- inside the traced step ----------------------------------------------------------------

    def logits(self, inputs: Any, rows: Rows, logits: jax.Array) -> jax.Array:
        """Adjusted logits float32[M, V]."""
        return logits

    def sample(self, rows: Rows, logits: jax.Array) -> jax.Array | None:
        """Of the one feature that draws: the token int32[R] of each row of logits float32[R, V]."""
        return None

    def after(
        self, inputs: Any, rows: Rows, logits: jax.Array, tokens: jax.Array, facts: Facts
    ) -> Any:
        """The outputs of a feature of special rows: raw logits float32[M, V], tokens int32[M]."""
        return None

    def region(self, inputs: Any, region: Region, facts: Facts) -> Any:
        """The outputs of a feature of the prefill region."""
        return None

    def cost(self, shape: StepShape, facts: Facts) -> float:
        """float32 numbers read and written by a step of this shape, roughly."""
        return 0.0
