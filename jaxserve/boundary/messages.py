"""The messages between a client and its engine, as plain data.

A client sends `AddGroup`, `Abort` and `Control`; the engine answers each step with one
`StepOutput`, by sequence id. Nothing in a message is alive: it could cross a process, and the same
messages sent to a second engine give the same tokens. Lists in a message are not changed once it
is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxserve.boundary.engine_view import EngineView
from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.boundary.step_history import StepRecord
from jaxserve.boundary.step_times import StepTimes
from jaxserve.boundary.work import Work
from jaxserve.errors import ValidationError, Verbatim, shown
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.params.structured_outputs_params import Thoughts
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import End, StopRule


@dataclass(frozen=True, slots=True)
class AddGroup:
    """Queue the sequences that continue one prompt; it is computed once.

    Attributes:
        sequence_ids: one for each completion, unique for the life of the engine.
        seeds: 64-bit seeds of their random numbers.
        prompt_token_ids: the prompt, checked: not empty, tokens of the model, room for one more;
            NO_ID in the places of `spans`.
        params: how tokens are chosen; fields that concern the client alone are left out.
        stop_rule: which tokens end a sequence.
        bad_words: token sequences that must not be generated.
        queueing: the facts that decide its turn; the client keeps deadlines.
        cache_salt: the prefix cache shares pages only between requests with the same salt.
        beams: search for the most likely sequences, as many as there are ids; the first id stands
            for all, and `stop_rule` has no other ends than end-of-sequence tokens and `max_tokens`.
        pooling: how to pool the prompt's hidden states, beside one token; None: not at all.
        spans: the parts in the places of token ids, in the order of the places.
        grammar: the grammar of the output, in llguidance's notation, with the end-of-sequence
            tokens of `stop_rule`; None: any output.
        output_token_ids: tokens that a dead engine had generated for the only sequence, with the
            same seed and parameters: it goes on from there.
        thoughts: the thoughts before the text of the grammar, of `thinking_token_budget` tokens at
            most; None: none.
    """

    kind: ClassVar[str] = "add"
    sequence_ids: list[str]
    seeds: list[int]
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_rule: StopRule
    bad_words: list[list[int]]
    queueing: Queueing
    cache_salt: str | None = None
    beams: BeamSearchParams | None = None
    pooling: PoolingParams | None = None
    spans: list[PromptSpan] = field(default_factory=list)
    grammar: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    thoughts: Thoughts | None = None

    @property
    def num_output_asked(self) -> int:
        """Tokens that its caller asks for: `n` times `max_tokens`, or `n` if that is not given."""
        return len(self.sequence_ids) * (self.params.max_tokens or 1)


@dataclass(frozen=True, slots=True)
class Abort:
    """End sequences now; ids of sequences that have ended are skipped."""

    kind: ClassVar[str] = "abort"
    sequence_ids: list[str]


class Action(StrEnum):
    """A client's requests to the engine as a whole."""

    CLOSE = "close"  # end every sequence, give back the device
    RESET_PREFIX_CACHE = "reset_prefix_cache"  # nothing computed so far is found any more
    RESET_ENCODER_CACHE = "reset_encoder_cache"  # images that come again are encoded again
    LOOK = "look"  # the next output brings a view of the engine
    PAUSE = "pause"  # no step begins; requests are taken and wait
    RESUME = "resume"
    SLEEP = "sleep"  # free pages and weights, which host memory keeps; nothing may run
    DEEP_SLEEP = "deep_sleep"  # the same, but the weights are read again
    RELEASE_KV_CACHE = "release_kv_cache"  # free the pages alone; nothing may run
    WAKE_WEIGHTS = "wake_weights"
    WAKE_KV_CACHE = "wake_kv_cache"
    START_PROFILE = "start_profile"  # record the work of host and device into a folder
    STOP_PROFILE = "stop_profile"  # requests go on while the files are written


_MEMORY = frozenset({Action.WAKE_WEIGHTS, Action.WAKE_KV_CACHE})
# what frees memory: what takes it back, one after the other
WOKEN_BY = {
    Action.SLEEP: _MEMORY,
    Action.DEEP_SLEEP: _MEMORY,
    Action.RELEASE_KV_CACHE: frozenset({Action.WAKE_KV_CACHE}),
}


@dataclass(frozen=True, slots=True)
class Control:
    """A request to the engine as a whole, not about a sequence.

    Attributes:
        action: what is asked for.
        folder: of START_PROFILE, where the record goes.
    """

    kind: ClassVar[str] = "control"
    action: Action
    folder: str = ""


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """The sequences of the next step that may be in a step for the first time.

    An engine in a process of its own sends it before each such step: if the process dies, its
    client knows the sequences of the last steps.
    """

    kind: ClassVar[str] = "begun"
    sequence_ids: list[str]


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The expected time of the steps in flight; it holds until the next estimate.

    An engine in a process of its own sends it before a step that changes it. So its client can
    tell long steps from an engine that hangs.

    Attributes:
        seconds: of the longest step in flight; 0.0: too short to matter.
        compiles: a program is compiled at the same time.
    """

    kind: ClassVar[str] = "expected"
    seconds: float
    compiles: bool


class Hypothesis(NamedTuple):
    """A finished sequence of a beam search.

    Attributes:
        token_ids: the generated tokens, an end-of-sequence token included.
        cum_logprob: sum of the tokens' raw log-probabilities.
        end: how its last token ended it.
    """

    token_ids: list[int]
    cum_logprob: float
    end: End


class FirstStep(NamedTuple):
    """How a sequence came to its first step.

    Attributes:
        time: when the step was handed to the device, by `time.monotonic()`.
        queue_overhead: seconds from arrival to then, without those in which the engine waited for
            the step in flight; None for a sequence that was not in the first step planned after it
            had come, because no slot or too few pages were free.
        num_cached_tokens: prompt tokens that the prefix cache had.
    """

    time: float
    queue_overhead: float | None
    num_cached_tokens: int


class Refusal(NamedTuple):
    """A value of a request that a feature does not take, see `ValidationError`.

    Attributes:
        field, allowed: as in the error.
        value: as the error shows it.
    """

    field: str
    value: str
    allowed: str

    @classmethod
    def of(cls, error: BaseException | None) -> Refusal | None:
        """The refusal that an error states; None: the request is not at fault."""
        if not isinstance(error, ValidationError):
            return None
        return cls(error.field, shown(error.value), error.allowed)

    def error(self) -> ValidationError:
        """The error, made again."""
        return ValidationError(self.field, Verbatim(self.value), self.allowed)


class TierStats(NamedTuple):
    """The tiers below the device's pages at one moment, and what has moved since the start.

    Attributes:
        num_host_pages: pages of the host's memory.
        num_held: those that hold what a key names, or will hold it.
        num_arriving: those of them that a copy is on its way to.
        num_out, num_back: pages that were moved out of the device, and back into it.
        num_lost: pages that were dropped, because no host page could take them.
        num_recomputed: pages that the host had, and that were sooner computed than moved.
        num_files, file_bytes: of pages in files.
        num_read: pages that were read of files.
        num_unwritten: pages that no file was written for, see `ColdStore`.
    """

    num_host_pages: int = 0
    num_held: int = 0
    num_arriving: int = 0
    num_out: int = 0
    num_back: int = 0
    num_lost: int = 0
    num_recomputed: int = 0
    num_files: int = 0
    file_bytes: int = 0
    num_read: int = 0
    num_unwritten: int = 0

    def after(self, earlier: TierStats) -> TierStats:
        """These counts plus those of an earlier engine, which has died."""
        counts = "num_out", "num_back", "num_lost", "num_recomputed", "num_read", "num_unwritten"
        sums = {name: getattr(self, name) + getattr(earlier, name) for name in counts}
        return self._replace(**sums)


class PageStats(NamedTuple):
    """The KV pages at one moment, and the prefix cache's counts since the engine started.

    Attributes:
        num_pages: pages that can be given to requests.
        num_active: pages that requests own.
        num_reclaimable: cached pages without an owner.
        num_cached: pages that the prefix cache can find, owned or not.
        page_size: tokens that a page has room for.
        num_tokens: tokens with keys and values in owned pages, now or after the step; counted for
            each group of layers that has pages of its own.
        num_queried, num_found: prompt tokens that the prefix cache looked for, and found.
        tiers: what lies below the device's pages.
    """

    num_pages: int = 0
    num_active: int = 0
    num_reclaimable: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    page_size: int = 1
    num_queried: int = 0
    num_found: int = 0
    tiers: TierStats = TierStats()


class EngineStats(NamedTuple):
    """A snapshot for metrics."""

    num_running: int
    num_waiting: int
    page_usage: float  # share of KV pages that requests own, 0 to 1
    num_preemptions: int  # since the engine started
    num_steps: int  # dispatched since the engine started
    num_programs: int  # compiled so far; grows only while the background thread compiles
    times: StepTimes  # seconds by phase since the engine started
    pages: PageStats = PageStats()
    num_integrity_failures: int = 0  # checks of pages and slots that found something wrong
    num_beam_shrinks: int = 0  # beams that searches gave up for want of pages
    work: Work | None = None  # of a device since the engine started; None: it is not counted
    num_images: int = 0  # that the encoder was asked for since the engine started
    num_known_images: int = 0  # those of them that it had not to encode

    def after(self, earlier: EngineStats) -> EngineStats:
        """These counts plus those of an earlier engine, which has died."""
        pages, before = self.pages, earlier.pages
        work = self.work
        if work is not None and earlier.work is not None:
            work = work.plus(earlier.work)
        return self._replace(
            num_preemptions=self.num_preemptions + earlier.num_preemptions,
            num_steps=self.num_steps + earlier.num_steps,
            times=self.times.plus(earlier.times),
            pages=pages._replace(
                num_queried=pages.num_queried + before.num_queried,
                num_found=pages.num_found + before.num_found,
                tiers=pages.tiers.after(before.tiers),
            ),
            num_integrity_failures=self.num_integrity_failures + earlier.num_integrity_failures,
            num_beam_shrinks=self.num_beam_shrinks + earlier.num_beam_shrinks,
            work=work,
            num_images=self.num_images + earlier.num_images,
            num_known_images=self.num_known_images + earlier.num_known_images,
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step, with parallel lists of one entry for each token.

    Attributes:
        sequence_ids, tokens: a token and its sequence; the tokens of a sequence are in order.
        ends: entry -> how its token ended its sequence; most tokens end none.
        reports: feature -> sequence -> the feature's report on it, see `reports`.
        first_steps: of sequences with a first step dispatched since the last output; of a group
            its first sequence.
        preempted: sequences that lost their slots since then, and how often each has so far.
        stats: counts of the engine after the step.
        beams: first sequence -> the results of its search, which is over, best first. The tokens
            of a search are not sent before.
        failed: sequences that an error of their own has ended, and the refusal of a feature; None:
            the log has the error.
        step: the step that made the tokens; None where none has run.
        page_waits: of sequences that got a slot in the step dispatched last, the seconds that each
            waited for KV pages.
        view: the engine after the step; None unless a client sent `Action.LOOK`.
        queued: sequences that were queued since the last output, after a feature had prepared
            something for them, such as a grammar; of a group its first.
    """

    kind: ClassVar[str] = "output"
    sequence_ids: list[str]
    tokens: list[int]
    ends: dict[int, End]
    reports: dict[str, dict[str, Any]]
    first_steps: dict[str, FirstStep]
    preempted: dict[str, int]
    stats: EngineStats
    beams: dict[str, list[Hypothesis]] = field(default_factory=dict)
    failed: dict[str, Refusal | None] = field(default_factory=dict)
    step: StepRecord | None = None
    page_waits: list[float] = field(default_factory=list)
    view: EngineView | None = None
    queued: list[str] = field(default_factory=list)


class Body(Protocol):
    """A message: a dataclass of plain data."""

    @property
    def kind(self) -> str: ...
