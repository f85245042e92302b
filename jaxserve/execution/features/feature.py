"""What a feature is: all that happens for one thing that requests may ask for, in one file.

It has three sides. The engine's side is asked when a request comes, when its tokens were seen and
when it has ended. The packing side says which rows need the feature and writes its inputs. The
traced side adjusts logits, draws tokens or reports on them. Programs contain a set of features; a
step runs on a program whose set holds what its rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxserve.boundary.messages import AddGroup
from jaxserve.request.request import OwnState, Request
from jaxserve.sampling.sampler import PORTABLE, Threshold
from jaxserve.scheduling.plan import SeenTokens

if TYPE_CHECKING:
    from jaxserve.execution.results import StepInFlight
    from jaxserve.execution.step_shape import StepShape
    from jaxserve.grammars.compiler import GrammarCompiler
    from jaxserve.memory.page_keys import KeySpan
    from jaxserve.models.config import ModelConfig
    from jaxserve.scheduling.resources import StepResource


ON_EACH = PartitionSpec()
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Need(Enum):
    """In which steps a request's sampling row needs a feature."""

    NEVER = 0
    AT_TIMES = 1  # `Feature.needed_now` says when
    ALWAYS = 2


class Facts(NamedTuple):
    """What a feature may want to know of the engine.

    Attributes:
        vocab_size: V.
        num_logprobs: K, the most that a request may ask for.
        hidden_size: E.
        max_prefill_tokens: of the largest prefill region.
        model: the model's configuration; None where a program is compiled without a model.
        threshold: the search of the sampling filters, on these devices.
    """

    vocab_size: int
    num_logprobs: int
    hidden_size: int = 0
    max_prefill_tokens: int = 0
    model: ModelConfig | None = None
    threshold: Threshold = PORTABLE


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
class Buffer:
    """An array of a feature on the device; its first axis is of rows.

    Attributes:
        shape, dtype: of the array.
        spec: how it is spread over the mesh; on each device whole by default.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec = ON_EACH


class Host(NamedTuple):
    """What the engine's side of a feature may use.

    Attributes:
        grammars: compiles them; None: there is no tokenizer, so there are none.
        force: makes a request without tokens in flight go on with these tokens, see
            `Scheduler.force`.
        write_rows: replaces rows of the feature's buffers, from one on: `(feature, start, arrays)`.
        settle: asks the features again whether the next token of a request depends on tokens that
            the host must have seen.
    """

    grammars: GrammarCompiler | None
    force: Callable[[Request, list[int]], None]
    settle: Callable[[Request], None]
    write_rows: Callable[[str, int, Any], None]


class TakenStep(NamedTuple):
    """A step whose tokens the host has seen.

    Attributes:
        seen: the tokens. A feature may append what follows them, and say how they end.
        outputs: by feature, where the step's program contains it.
        special: index among the plan's samples -> place among the special rows.
        chunks: of the prefill region, in its order.
        step: with what features have set aside by `Tokens.tap`, see `Dispatched.set_aside`.
    """

    seen: SeenTokens
    outputs: dict[str, Any]
    special: dict[int, int]
    chunks: list[Chunk]
    step: StepInFlight


@dataclass(frozen=True, slots=True)
class Rows:
    """The traced side's view of sampling rows: all R of a step, or the M special ones.

    Attributes:
        slot: int32[R], rows of the device state that hold the tokens before the sample: those of
            the sequence itself, or of the one whose prompt it shares and samples its first from.
        position: int32[R], of the last computed token; the sampled one follows it.
        prompt_len: int32[R].
        history: int32[S + 1, L], the device state's token ids by slot and position, -1 where a
            prompt has an embedding; a sequence's own end at position.
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
        inputs: the feature's, see `Feature.inputs`; axis C is of the last tokens, and empty where
            the program has no prefill region.
        buffers: the feature's, see `Feature.buffers`.
        state: the feature's, see `Feature.state`.
        tap: (name, array): sets an array aside, to be fetched only if somebody asks for it.
        kept: what the feature's hooks hand on to one another and to `region`, by their own names.
    """

    token: jax.Array
    position: jax.Array
    slot: jax.Array
    values: Any
    inputs: Any
    buffers: Any
    state: Any
    tap: Callable[[str, jax.Array], None]
    kept: dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class NewestTokens:
    """The traced side's view of the decode rows before a step.

    Attributes:
        token, position, slot: int32[B] of each row's newest token.
        history: int32[S + 1, L], the device state's token ids by slot and position, -1 where a
            place has an embedding.
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
    """One thing that requests may ask for. The methods here are those of one that does nothing.

    A method that is not overridden costs nothing: it is not called.

    Args:
        facts: about the engine.
        options: of this feature, as `feature_config` of the engine has them.

    Attributes:
        name: of the feature.
        setting: of `EngineConfig`, that engines with it have on or have a value of, which is among
            its options; None: all have it.
        row: dataclass of scalars that each sampling row has, or None. They are remembered by slot
            and travel with every row of a program that contains the feature.
        inputs: dataclass of arrays (see `layout.array`) in the blob, or None. Axes: R sampling
            rows, M special rows, C region tokens, W words of a bit a token of the vocabulary. What
            is of region tokens the hooks read as well, see `Tokens.inputs`.
        outputs: dataclass of arrays in the result, or None. Axes as before, K, and N lanes, E. With
            them the tokens of rows that need the feature are all sampled: no grammar forces some.
        special: rows that need it are special: it works on the M special rows of a step, which are
            those that need some such feature. One that is not is in every program and may draw,
            draft, keep state and have hooks; `logits`, `after` and outputs are for special ones.
        token_row: as `row`, but of each token that is computed: what `embed`, `linear` and `layer`
            read.
        num_drafts: tokens that it drafts for each decode row; 0 but for the one feature that does.
        resource: what it has too little of for all requests of a step, or for all with a slot;
            None: nothing.
    """

    name: ClassVar[str]
    setting: ClassVar[str | None] = None
    row: ClassVar[type | None] = None
    inputs: ClassVar[type | None] = None
    outputs: ClassVar[type | None] = None
    special: ClassVar[bool] = True
    token_row: ClassVar[type | None] = None
    num_drafts: int = 0
    resource: StepResource | None = None

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS):
        self.facts, self.options = facts, options

    # -- the engine's side ----------------------------------------------------------------------

    def serve(self, host: Host) -> None:
        """The engine is there and takes requests from now on."""

    def asked_of(self, request: Request) -> Any:
        """What a request says to the feature in `extra_args`; None: nothing.

        A feature refuses what it cannot read with a ValidationError, which names the field as
        `extra_args.name`: its caller gets that error (over HTTP a 400), and others go on. Best from
        `begins` or `own`; `took`, `step_buffers`, `resource` and forks of beams cannot refuse.
        """
        return (request.params.extra_args or {}).get(self.name)

    def begins(self, asked: AddGroup) -> Future[Any] | None:
        """What a message has to wait for before it is queued; None: nothing.

        The result is `Request.shared[name]` of its sequences. An error ends the request. The client
        counts that wait as one in the queue, but for grammars and budgets of thoughts.
        """
        return None

    def own(self, request: Request) -> OwnState | None:
        """What the feature keeps of a sequence, `Request.own[name]`; None: nothing."""
        return None

    def needs_seen_tokens(self, request: Request) -> bool:
        """Whether what it does depends on tokens that the host must have seen."""
        return False

    def took(self, step: TakenStep) -> dict[str, Any] | None:
        """Take in a step's tokens; what is to be told of its sequences, by their ids.

        It is what JSON has (see `reports.plain`), and becomes `CompletionOutput.reports`, over HTTP
        a choice's `reports`. What `reports.REPORTS` names has a type and a field of its own. A
        beam's own token is replaced by another one afterwards.
        """
        return None

    def ended(self, sequence_id: str) -> None:
        """A sequence was aborted, or dropped by its search, perhaps before it had a step.

        `took` tells of the other ends.
        """

    def close(self) -> None:
        """The engine is closed."""

    def drafts_for(self, num_running: int) -> int:
        """Of the one feature that drafts: drafts that rows may have while so many requests run.

        Asked for each step. 0: the step takes a program without drafts, which costs less. Asked for
        each number before the first step, too: those with some get programs with drafts.
        """
        return self.num_drafts

    # -- the packing side -----------------------------------------------------------------------

    def need(self, request: Request) -> Need:
        """Whether the request's sampling rows need the feature; asked once a request."""
        return Need.NEVER

    def needed_now(self, request: Request) -> bool:
        """Whether the next sampling row needs it, of a request that needs it at times.

        Once it does not, it never does again.
        """
        return False

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        """Whether a chunk needs it, apart from its sampling row: then it lies in the region.

        A `special` feature that asks this works on the prefill region: decode programs do without
        it.
        """
        return False

    def row_of(self, request: Request) -> Any:
        """The request's row values, an instance of `row`."""
        return None

    def token_row_of(self, request: Request) -> Any:
        """The request's values for its tokens, an instance of `token_row`.

        Asked when a request gets a slot, and not again when it returns to the slot that it had.
        """
        return None

    def cache_key(self, request: Request) -> str:
        """What keys and values of its tokens depend on through the feature; "": on nothing.

        The prefix cache shares pages between requests for which it is the same. A feature whose
        hooks read a `token_row` or `inputs` has to say it, here or by `key_spans`: those may only
        name what the keys and values depend on.
        """
        return ""

    def key_spans(self, request: Request) -> Sequence[KeySpan]:
        """The same of some places of the prompt: what comes before them is shared.

        Their `content` says all that decides keys and values there, such as an array's shape, too.
        """
        return ()

    def buffers(self) -> Any:
        """A pytree of `Buffer`s: arrays on the device that the host writes to.

        All have as many rows, which are replaced between steps, see `Host.write_rows`; they start
        as zeros. None: the feature has none.
        """
        return None

    def step_buffers(self, chunks: list[Chunk]) -> Any:
        """The first rows of the buffers, as NumPy arrays, of a step with these chunks.

        None: they stay as they are. The chunks are those of the prefill region, in its order.
        """
        return None

    def state(self) -> Any:
        """A pytree of shapes and types: what it keeps on the device from step to step.

        It starts as zeros, see `next_state`; None: it keeps nothing.
        """
        return None

    def bind(self, request: Request, slot: int) -> None:
        """Prepare what stays the same while the request, which needs the feature, has the slot."""

    def pack(self, inputs: Any, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        """Write the inputs, NumPy views that hold zeros.

        Args:
            inputs: an instance of `inputs`.
            rows: those that need the feature.
            chunks: of the prefill region, in its order.
        """

    # -- the traced side ------------------------------------------------------------------------

    # `linear` and `layer` keep the residual stream out of fused kernels on GPUs

    def positions(self, tokens: Tokens, positions: jax.Array) -> jax.Array:
        """What the model takes for the tokens' positions: int32[A, T] in the place of int32[1, T].

        They change rotary angles alone, not which tokens are attended to. See
        `models.protocol.TokenRows`.
        """
        return positions

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

    def after(self, inputs: Any, rows: Rows, logits: jax.Array, tokens: jax.Array) -> Any:
        """The outputs of a feature of special rows: raw logits float32[M, V], tokens int32[M]."""
        return None

    def region(self, inputs: Any, region: Region) -> Any:
        """The outputs of a feature of the prefill region."""
        return None

    def cost(self, shape: StepShape) -> float:
        """float32 numbers read and written by a step of this shape, roughly."""
        return 0.0


def overrides(feature: Feature | type[Feature], method: str) -> bool:
    """Whether a feature does something where a method is called."""
    kind = feature if isinstance(feature, type) else type(feature)
    return getattr(kind, method) is not getattr(Feature, method)


def of_region(feature: Feature | type[Feature]) -> bool:
    """Whether a feature works on the prefill region alone."""
    return feature.special and overrides(feature, "needed_by_chunk")
