"""What a feature of the step is: a part with a host side and a traced side, in one file.

A feature adjusts logits, draws tokens or reports on them for the rows whose requests ask for it.
Programs contain a set of features; a step runs on a program whose set holds what its rows need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax

from jaxserve.request import Request

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
    hidden_size: int = 0  # E
    max_prefill_tokens: int = 0  # of the largest prefill region


class Chunk(NamedTuple):
    """Known tokens of a request that a step computes: positions `start` .. `start + length - 1`."""

    request: Request
    start: int
    length: int


class SpecialRow(NamedTuple):
    """A sampling row that needs a costly feature: its place among the special rows, and whose."""

    place: int
    request: Request
    slot: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The traced side's view of sampling rows: all R of a step, or the M special ones.

    Attributes:
        slot: int32[R], rows of the device state that hold the tokens before the sample: those of
            the sequence itself, or of the one whose prompt it shares and samples its first from.
        position: int32[R], of the last computed token; the sampled one follows it.
        prompt_len: int32[R].
        history: int32[S + 1, L], the device state's token ids by slot and position; a sequence's
            own end at position.
        values: each feature's row values by its name, see `Feature.row`.
        adjusted: float32[M, V] logits that the tokens were drawn from; None before `after`.
    """

    slot: jax.Array
    position: jax.Array
    prompt_len: jax.Array
    history: jax.Array
    values: dict[str, Any]
    adjusted: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The traced side's view of the T tokens of a step: decode rows, then the prefill region.

    Attributes:
        token, position, slot: int32[T].
        values: the feature's row values of each token, see `Feature.token_row`.
        buffers: the feature's, see `Feature.buffers`.
        state: the feature's, see `Feature.state`.
        tap: (name, array): sets an array aside, to be fetched only if somebody asks for it.
        kept: what the feature's hooks hand on to one another and to `region`, by their own names.
    """

    token: jax.Array
    position: jax.Array
    slot: jax.Array
    values: Any
    buffers: Any
    state: Any
    tap: Callable[[str, jax.Array], None]
    kept: dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class NewestTokens:
    """The traced side's view of the decode rows before a step.

    Attributes:
        token, position, slot: int32[B] of each row's newest token.
        history: int32[S + 1, L], the device state's token ids by slot and position.
        buffers, state: the feature's, as for `Tokens`.
    """

    token: jax.Array
    position: jax.Array
    slot: jax.Array
    history: jax.Array
    buffers: Any
    state: Any


@dataclass(frozen=True, slots=True)
class Region:
    """The traced side's view of the prefill region.

    Attributes:
        hidden: [C, E] last hidden states.
        logits_of: hidden states [N, E] -> float32 logits [N, V].
        num_lanes: N, chunks that it may hold.
        kept: what the feature's hooks have kept of the region's tokens, see `Tokens.kept`.
    """

    hidden: jax.Array
    logits_of: Any
    num_lanes: int
    kept: dict[str, jax.Array]


class Feature:
    """A part of the step. The methods here are those of a feature that does nothing.

    Attributes:
        name: of the feature.
        setting: the switch of `EngineConfig` that engines with it have on; None: all have it.
        place: where it comes in the order in which logits are adjusted and reports are made: 0
            sampling, 10 bias, 20 mask (what is masked is -inf from there on), 30 penalties, 40
            epsilon_cutoff, 90 logprobs, 100 prompt_scores.
        row: dataclass of scalars that each sampling row has, or None. They are remembered by slot
            and travel with every row of a program that contains the feature.
        inputs: dataclass of arrays (see `layout.array`) in the blob, or None. Axes: R sampling
            rows, M special rows, C region tokens, W words of a bit a token of the vocabulary.
        outputs: dataclass of arrays in the result, or None. Axes as before, K, and N lanes, E.
        special: rows that need it are special: it sees those M rows only. One that is not may draw,
            draft, keep state and have hooks, but `logits` and `after` are for special ones.
        of_region: it works on the prefill region: decode programs do without it.
        token_row: as `row`, but of each token that is computed: what `embed`, `linear` and `layer`
            read.
        hooks: which of "embed", "linear" and "layer" it has. On GPUs the last two keep the residual
            stream out of fused kernels.
        num_drafts: tokens that it drafts for each decode row; 0 but for the one feature that does.
    """

    name: ClassVar[str]
    setting: ClassVar[str | None] = None
    place: ClassVar[int] = 1000
    row: ClassVar[type | None] = None
    inputs: ClassVar[type | None] = None
    outputs: ClassVar[type | None] = None
    special: ClassVar[bool] = True
    of_region: ClassVar[bool] = False
    token_row: ClassVar[type | None] = None
    hooks: ClassVar[frozenset[str]] = frozenset()
    num_drafts: int = 0

    # -- host --------------------------------------------------------------------------------

    def need(self, request: Request) -> Need:
        """Whether the request's sampling rows need the feature; asked once a request."""
        return Need.NEVER

    def needs_seen_tokens(self, request: Request) -> bool:
        """Whether what it does depends on tokens that the host must have seen."""
        return False

    def needed_now(self, request: Request) -> bool:
        """Whether the next sampling row needs it, of a request that needs it at times.

        Once it does not, it never does again.
        """
        return False

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        """Whether a chunk needs it, apart from its sampling row: then it lies in the region."""
        return False

    def row_of(self, request: Request, facts: Facts) -> Any:
        """The request's row values, an instance of `row`."""
        return None

    def token_row_of(self, request: Request) -> Any:
        """The request's values for its tokens, an instance of `token_row`."""
        return None

    def cache_key(self, request: Request) -> str:
        """What keys and values of its tokens depend on through the feature; "": on nothing.

        The prefix cache shares pages between requests for which it is the same.
        """
        return "" if self.token_row is None else repr(self.token_row_of(request))

    def buffers(self, facts: Facts) -> Any:
        """A pytree of shapes and types: arrays on the device that the host swaps between steps.

        They start as zeros, see `Runner.set_buffers`; None: it has none.
        """
        return None

    def step_buffers(self, chunks: list[Chunk], facts: Facts) -> Any:
        """The buffers, as NumPy arrays, of a step that computes these chunks and needs it.

        None: what it has stays. The chunks are those of the prefill region, in its order.
        """
        return None

    def state(self, facts: Facts) -> Any:
        """A pytree of shapes and types: what it keeps on the device from step to step.

        It starts as zeros, see `next_state`; None: it keeps nothing.
        """
        return None

    def bind(self, request: Request, slot: int, facts: Facts) -> None:
        """Prepare what stays the same while the request, which needs the feature, has the slot."""

    def pack(self, inputs: Any, rows: list[SpecialRow], chunks: list[Chunk], facts: Facts) -> None:
        """Write the inputs, NumPy views that hold zeros.

        Args:
            inputs: an instance of `inputs`.
            rows: those that need the feature.
            chunks: of the prefill region, in its order.
            facts: about the engine.
        """

    # -- inside the traced step ----------------------------------------------------------------

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        """Embeddings [T, E] in the place of x."""
        return x

    def linear(
        self, tokens: Tokens, name: str, layer: int, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """The result y [T, *out] of a product of x [T, in], see `models.protocol.Hooks`."""
        return y

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        """The residual stream [T, E] behind a layer."""
        return x

    def next_state(self, tokens: Tokens, hidden: jax.Array) -> Any:
        """What is kept for the next step; hidden [T, E] are the last hidden states."""
        return tokens.state

    def draft(self, newest: NewestTokens) -> jax.Array:
        """Of the one feature that drafts: guesses int32[B, num_drafts] of what follows."""
        raise TypeError(f"{self.name} has num_drafts={self.num_drafts} and does not draft")

    def logits(self, inputs: Any, rows: Rows, logits: jax.Array) -> jax.Array:
        """Adjusted logits float32[M, V], of all special rows.

        Those of requests that do not need the feature are among them: their row values must leave
        logits as they are. `rows.values` holds the row values of other features, too.
        """
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
