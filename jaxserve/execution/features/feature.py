"""The `Feature` base class: a feature is all code for one thing that requests may ask for.

It has three sides. The engine's side is called when a request comes, when the host has seen its
tokens and when it has ended. The packing side says which rows need the feature and writes its
inputs. The traced side adjusts logits, draws tokens or reports on them. A program contains a set
of features; a step runs on a program that contains all features its rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxserve.boundary.messages import AddGroup
from jaxserve.request.request import OwnState, Request
from jaxserve.sampling.sampler import Draws, sample
from jaxserve.scheduling.plan import SeenTokens

if TYPE_CHECKING:
    from jaxserve.execution.encoder import Encoder
    from jaxserve.execution.results import StepInFlight
    from jaxserve.execution.step_shape import StepShape
    from jaxserve.grammars.compiler import GrammarCompiler
    from jaxserve.memory.page_keys import KeySpan
    from jaxserve.models.config import ModelConfig
    from jaxserve.scheduling.resources import StepResource


ON_EACH = PartitionSpec()
NUM_LIMBS = 4  # of a number whose sums are exact, see `pooling.limbs`
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Need(Enum):
    """The steps in which a request's sampling row needs a feature."""

    NEVER = 0
    AT_TIMES = 1  # `Feature.needed_now` says when
    ALWAYS = 2


class Facts(NamedTuple):
    """The facts of the engine that features use.

    Attributes:
        vocab_size: V.
        num_logprobs: K, the most that a request may ask for.
        hidden_size: E.
        max_prefill_tokens: tokens of the largest prefill region.
        model: the model's configuration; None where a program is compiled without a model.
        draws: how tokens are drawn on these devices.
        deterministic: whether reports may not depend on what is computed beside a request.
        max_num_seqs: S, slots; 0 where a program is compiled without an engine.
    """

    vocab_size: int
    num_logprobs: int
    hidden_size: int = 0
    max_prefill_tokens: int = 0
    model: ModelConfig | None = None
    draws: Draws = Draws(sample, sample)
    deterministic: bool = False
    max_num_seqs: int = 0

    @property
    def pooled_size(self) -> int:
        """P, numbers of a pooled vector: a score a label, or a hidden state in its limbs."""
        labels = () if self.model is None else self.model.labels
        return len(labels) or self.hidden_size * (NUM_LIMBS if self.deterministic else 1)


class Chunk(NamedTuple):
    """Known tokens of a request that a step computes: positions `start` .. `start + length - 1`."""

    request: Request
    start: int
    length: int


class SpecialRow(NamedTuple):
    """A sampling row that needs a costly feature: its place among the special rows, its request."""

    place: int
    request: Request
    slot: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array of a feature on the device; its first axis is of rows.

    Attributes:
        shape, dtype: of the whole array.
        spec: how it is spread over the mesh; by default each device has all of it.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec = ON_EACH


class Host(NamedTuple):
    """The parts of the engine that the engine's side of a feature may use.

    Attributes:
        grammars: the compiler of grammars; None: there is no tokenizer, so no grammars.
        force: makes a request without tokens in flight go on with these tokens, see
            `Scheduler.force`.
        write_rows: replaces rows of the feature's buffers, from one on: `(feature, start, arrays)`.
        settle: asks the features again whether the next token of a request depends on tokens that
            the host must have seen.
        put_state: replaces the state of an `on_demand` feature: `(feature, tree of arrays)`. Steps
            that are dispatched read the old one.
        encoder: makes embeddings of what is no text; None: the model has none, or may not use it.
    """

    grammars: GrammarCompiler | None
    force: Callable[[Request, list[int]], None]
    settle: Callable[[Request], None]
    write_rows: Callable[[str, int, Any], None]
    put_state: Callable[[str, Any], None]
    encoder: Encoder | None = None


class TakenStep(NamedTuple):
    """A step with tokens that the host has seen.

    Attributes:
        seen: the tokens. A feature may append the tokens that follow, and say how they end.
        outputs: feature -> its outputs, of the features in the step's program.
        special: index among the plan's samples -> place among the special rows.
        chunks: of the prefill region, in its order.
        step: has the arrays that features set aside by `Tokens.tap`, see `StepInFlight.set_aside`.
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
            the sequence itself, or, for its first sample, of the one that computed its prompt.
        position: int32[R], of the last computed token; the sampled one follows it.
        prompt_len: int32[R].
        history: int32[S + 1, L], the device state's token ids by slot and position, -1 where a
            prompt has an embedding; a sequence's own end at position.
        values: each feature's row values by its name, see `Feature.row`.
        adjusted: float32[M, V] logits that the tokens were drawn from; None before `after`.
        kept: what hooks of features have kept of the tokens that are sampled behind: by feature,
            by name, arrays [M, ...], see `Tokens.kept`.
        logits_of: residual stream [N, E] behind a layer -> float32 logits [N, V], by the model's
            last norm and head.
        drawn_alone: the logits of these rows are read by nothing but the draw, and may be divided
            among devices.
    """

    slot: jax.Array
    position: jax.Array
    prompt_len: jax.Array
    history: jax.Array
    values: dict[str, Any]
    adjusted: jax.Array | None = None
    kept: Mapping[str, Mapping[str, jax.Array]] = field(default_factory=dict)
    logits_of: Callable[[jax.Array], jax.Array] | None = None
    drawn_alone: bool = False


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
        tap: (name, array): sets an array aside; it is fetched only if the host asks for it.
        kept: arrays that the feature's hooks hand on to one another, to `region` and to the
            methods that see `Rows`, by name.
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
        scores_of: hidden states [N, E] -> float32 scores of labels [N, L], see `Model.scores`.
        num_lanes: N, chunks that it may hold.
        kept: arrays that the feature's hooks kept of the region's tokens, see `Tokens.kept`.
    """

    hidden: jax.Array
    logits_of: Any
    scores_of: Any
    num_lanes: int
    kept: dict[str, jax.Array]


class Feature:
    """One thing that requests may ask for. The methods here do nothing; a feature overrides some.

    A method that is not overridden costs nothing: it is not called.

    Args:
        facts: sizes of the engine and its model.
        options: of this feature, from the engine's `feature_config`.

    Attributes:
        name: unique; the key of the feature's values, outputs, reports and `extra_args`.
        setting: field of `EngineConfig` that must be on, or have a value, in engines with the
            feature; its value is among the options. None: all engines have the feature.
        row: dataclass of scalars that each sampling row has, or None. They are remembered by slot
            and travel with every row of a program that contains the feature.
        inputs: dataclass of arrays (see `layout.array`) in the blob, or None. Axes: R sampling
            rows, M special rows, C region tokens, W words of one bit for each token of the
            vocabulary. The hooks read arrays of region tokens as well, see `Tokens.inputs`.
        outputs: dataclass of arrays in the result, or None. Axes as before, K, and N lanes, E, P
            numbers of a pooled vector. With outputs, all tokens of rows that need the feature are
            sampled: no grammar forces some.
        special: True: rows that need it are special: it works on the M special rows of a step,
            which are those that need such a feature. `logits`, `after` and outputs are for these.
            False: it is in every program and may draw, draft, keep state and have hooks.
        token_row: as `row`, but of each computed token; `embed`, `linear` and `layer` read it.
        num_drafts: tokens that it drafts for each decode row; 0 but for the one drafting feature.
        on_demand: no program of the engine's start contains it: `Runner.add_features` gives it to
            an engine that serves, and `Runner.compile_with` compiles programs of its own.
            It has no buffers. Where it is not `special`, all steps that compute tokens of a request
            that needs it run on those.
        resource: a resource too small for all requests of a step, or for all with a slot; None:
            there is none.
    """

    name: ClassVar[str]
    setting: ClassVar[str | None] = None
    row: ClassVar[type | None] = None
    inputs: ClassVar[type | None] = None
    outputs: ClassVar[type | None] = None
    special: ClassVar[bool] = True
    token_row: ClassVar[type | None] = None
    on_demand: ClassVar[bool] = False
    num_drafts: int = 0
    resource: StepResource | None = None

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS):
        self.facts, self.options = facts, options

    # -- the engine's side ----------------------------------------------------------------------

    @classmethod
    def suits(cls, facts: Facts) -> bool:
        """Whether engines of such a model have the feature, where its setting is on."""
        return True

    def serve(self, host: Host) -> None:
        """Called before the engine takes requests."""

    def asked_of(self, request: Request) -> Any:
        """The request's value for the feature in `extra_args`; None: it has none.

        A feature refuses a value that it cannot read with a ValidationError, which names the field
        as `extra_args.name`: the request's caller gets it (over HTTP a 400), other requests go on.
        Refuse in `begins` or `own`; `took`, `step_buffers`, `resource` and forks of beams cannot.
        """
        return (request.params.extra_args or {}).get(self.name)

    def begins(self, asked: AddGroup) -> Future[Any] | None:
        """Called when a request comes: work that must end before it is queued; None: nothing.

        The result is `Request.shared[name]` of its sequences. An error ends the request. The client
        counts that wait as one in the queue, but for grammars and budgets of thoughts.
        """
        return None

    def own(self, request: Request) -> OwnState | None:
        """The feature's state of a sequence, `Request.own[name]`; None: it has none."""
        return None

    def needs_seen_tokens(self, request: Request) -> bool:
        """Whether the feature needs the host to have seen all the request's tokens."""
        return False

    def took(self, step: TakenStep) -> dict[str, Any] | None:
        """Called with a step's tokens once the host has them. Returns reports by sequence id.

        A report consists of JSON types (see `reports.plain`), and becomes
        `CompletionOutput.reports`, over HTTP a choice's `reports`. Reports named in
        `reports.REPORTS` have a type and a field of their own. A beam's own token is replaced by
        another one afterwards.
        """
        return None

    def ended(self, sequence_id: str) -> None:
        """Called when a sequence was aborted or dropped by its search, perhaps before any step.

        `took` is told of the other ends.
        """

    def close(self) -> None:
        """Called when the engine is closed."""

    def drafts_for(self, num_running: int) -> int:
        """The most drafts of a row while `num_running` requests run; for the drafting feature.

        Called for each step. 0: the step takes a program without drafts, which costs less. Also
        called for each number before the first step: numbers with drafts get programs with drafts.
        """
        return self.num_drafts

    # -- the packing side -----------------------------------------------------------------------

    def need(self, request: Request) -> Need:
        """Whether the request's sampling rows need the feature; called once for each request."""
        return Need.NEVER

    def needed_now(self, request: Request) -> bool:
        """Whether the next sampling row needs the feature, for a request with `Need.AT_TIMES`.

        After False it stays False.
        """
        return False

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        """Whether a chunk needs the feature, apart from its sampling row: then it is in the region.

        A `special` feature that overrides this works on the prefill region: decode programs do not
        contain it.
        """
        return False

    def row_of(self, request: Request) -> Any:
        """The request's row values, an instance of `row`."""
        return None

    def token_row_of(self, request: Request) -> Any:
        """The request's values for its tokens, an instance of `token_row`.

        Called when a request gets a slot, and not again when it returns to the slot that it had.
        """
        return None

    def cache_key(self, request: Request) -> str:
        """A key of all that keys and values of its tokens depend on in the feature; "": nothing.

        The prefix cache shares pages between requests with the same key. A feature with hooks that
        read a `token_row` or `inputs` must override this or `key_spans`; both name only what the
        keys and values depend on.
        """
        return ""

    def key_spans(self, request: Request) -> Sequence[KeySpan]:
        """Like `cache_key`, for some places of the prompt: pages before them are shared.

        Their `content` has all that decides keys and values there, including an array's shape.
        """
        return ()

    def whole_spans(self, request: Request) -> Sequence[tuple[int, int]]:
        """Places of the prompt, from one to before another, whose ends lie in one step: no chunk
        ends between. The engine has room for them, see `EnginePlan`."""
        return ()

    def buffers(self) -> Any:
        """A pytree of `Buffer`s: arrays on the device that the host writes to.

        All have the same number of rows and start as zeros. The host replaces rows between steps,
        see `Host.write_rows`. None: the feature has none.
        """
        return None

    def step_buffers(self, chunks: list[Chunk]) -> Any:
        """The first rows of the buffers, as NumPy arrays, for a step with these chunks.

        None: the rows stay as they are. The chunks are those of the prefill region, in its order.
        """
        return None

    def state(self) -> Any:
        """A pytree of shapes and types of the state that it keeps on the device between steps.

        The state starts as zeros, see `next_state`. None: the feature has none.
        """
        return None

    def bind(self, request: Request, slot: int) -> None:
        """Called when a request that needs the feature gets a slot: prepare its constant values."""

    def pack(self, inputs: Any, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        """Write the inputs, NumPy views that hold zeros.

        Args:
            inputs: an instance of `self.inputs`.
            rows: the special rows that need the feature.
            chunks: of the prefill region, in its order.
        """

    # -- the traced side ------------------------------------------------------------------------

    # `linear` and `layer` keep the residual stream out of fused kernels on GPUs

    def positions(self, tokens: Tokens, positions: jax.Array) -> jax.Array:
        """Positions for the model: int32[A, T] in the place of int32[1, T].

        They change rotary angles alone, not which tokens are attended to. See
        `models.protocol.TokenRows`.
        """
        return positions

    def ahead(self, tokens: Tokens) -> jax.Array:
        """How many tokens behind itself each token of the region attends to, int32[C].

        They are of its own chunk, see `whole_spans`. For one feature of a program.
        """
        return jnp.zeros_like(tokens.token)

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        """Embeddings [T, E] in the place of x."""
        return x

    def linear(
        self, tokens: Tokens, name: str, layer: int, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """The result y [T, *out] of a product of x [T, in], see `models.protocol.Hooks`."""
        return y

    def operand(self, tokens: Tokens, name: str, layer: int, x: jax.Array) -> jax.Array:
        """What the product "output" or "down" takes, [T, in], see `models.protocol.Hooks`."""
        return x

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        """The residual stream [T, E] behind a layer."""
        return x

    def see_last(self, tokens: Tokens, hidden: jax.Array, logits: jax.Array) -> None:
        """Called with the last hidden states [T, E] and the raw logits float32[R, V] of samples.

        `Tokens.tap` may set them aside.
        """

    def next_state(self, tokens: Tokens, hidden: jax.Array) -> Any:
        """The state for the next step; hidden [T, E] are the last hidden states."""
        return tokens.state

    def draft(self, newest: NewestTokens) -> jax.Array:
        """Guesses int32[B, num_drafts] of the next tokens; for the drafting feature."""
        raise TypeError(f"{self.name} has num_drafts={self.num_drafts} and does not draft")

    def logits(self, inputs: Any, rows: Rows, logits: jax.Array) -> jax.Array:
        """Adjusted logits float32[M, V], of all special rows.

        Rows of requests that do not need the feature are among them: their row values must leave
        logits unchanged. `rows.values` holds the row values of other features, too.
        """
        return logits

    def adjust(
        self, inputs: Any, rows: Rows, logits: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        """As `logits`, with the feature's state and what becomes of it; behind all `logits`."""
        return logits, state

    def sample(self, rows: Rows, logits: jax.Array) -> jax.Array | None:
        """The token int32[R] of each row of logits float32[R, V]; for the drawing feature."""
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
    """Whether a feature overrides a method."""
    kind = feature if isinstance(feature, type) else type(feature)
    return getattr(kind, method) is not getattr(Feature, method)


def of_region(feature: Feature | type[Feature]) -> bool:
    """Whether a feature works on the prefill region alone."""
    return feature.special and overrides(feature, "needed_by_chunk")
