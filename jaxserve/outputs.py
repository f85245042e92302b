"""What a request returns: the same fields as vLLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np

Vector = TypeVar("Vector")

ERROR = "error"  # the finish_reason of what an error of its own has ended
GRAMMAR = "grammar"  # the stop_reason of it where its grammar allows no token
NOT_COMPILED = "grammar_not_compiled"  # where the engine did not compile in time what is no mistake
REPEATED = "repetition_detected"  # the stop_reason of a text that repeats itself
TIMEOUT = "timeout"  # the stop_reason of what was aborted because its time was over


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the model's probability.
        rank: 1 for the most likely token, 2 for the next, and so on; None for a token that is there
            because `logprob_token_ids` names it.
        decoded_token: the token as text, or None when detokenisation is off.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None = None


# One position: token id -> Logprob. The first prompt position has no logprobs and is None.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[PositionLogprobs]):
    """Positions of a text as a few long lists, which the garbage collector need not walk.

    It reads as a list of one dict a position; one without log-probabilities is an empty dict.

    Attributes:
        start_indices, end_indices: of each position, where its entries lie in the other lists.
        token_ids, logprobs, ranks, decoded_tokens: of the entries of all positions.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Iterable[PositionLogprobs | None]) -> Self:
        """The same positions."""
        made = cls()
        made.extend(positions)
        return made

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position behind the others."""
        self.start_indices.append(len(self.token_ids))
        for token, entry in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[PositionLogprobs | None]) -> None:
        """Add positions behind the others."""
        for position in positions:
            self.append(position)

    def copy(self) -> FlatLogprobs:
        """The same, in lists of its own."""
        return FlatLogprobs(*(getattr(self, item.name).copy() for item in fields(self)))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[place] for place in range(*index.indices(len(self))))
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(self.start_indices[index], self.end_indices[index])
        }


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`; None until the event has happened.

    `first_scheduled_time` and `queue_overhead` are those of `FirstStep`.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    queue_overhead: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: position among the `n` completions.
        text: generated text (the new part only when `output_kind` is DELTA).
        token_ids: generated token ids (the new ones only when `output_kind` is DELTA).
        cumulative_logprob: sum of the tokens' logprobs, None unless logprobs were asked for or
            beams were searched.
        logprobs: one dict a generated token, None unless logprobs were asked for.
        finish_reason: None while running, then "stop", "length", "repetition", "abort" or "error":
            one of this request alone, which the log tells.
        stop_reason: the stop string or stop token id that ended it, None for EOS; "timeout" where
            finish_reason is "abort" because the request's time was over; "repetition_detected" by
            `repetition_detection`.
        reports: by the names of features what each has told, an entry a step; None where none has,
            and before the last output when `output_kind` is DELTA. Logprobs and vectors have fields
            of their own.
        lora_request, routed_experts, sampling_mask, spec_decode_metrics, weight_versions: vLLM's,
            of what there is not: None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reports: dict[str, list[Any]] | None = None
    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request as its caller sees it.

    Attributes:
        request_id: the id that the caller gave or that was made for it.
        prompt: the prompt as text, None when it came as token ids.
        prompt_token_ids: the prompt's token ids, -1 where it has an embedding; none of one that is
            nothing but embeddings.
        prompt_logprobs: one entry a prompt token, None of the first and of embeddings; None unless
            asked for.
        outputs: the `n` completions, by index.
        finished: True when all completions have ended.
        metrics: times of the request.
        num_cached_tokens: prompt tokens whose keys and values the prefix cache had when the request
            began to run.
        embedding: of a request with `PoolingParams`, once it has finished; None of others.
        captured: of a request with `capture`, arrays [tokens, ...] by the names of their sites, in
            the order of the positions: of the prompt and of the output but for its last token; of
            "logits", float32[tokens, V], what each token of the output was drawn from.
        weights_version: how often an `LLM` had updated its weights when it answered.
        lora_request, encoder_prompt, encoder_prompt_token_ids: vLLM's, of what there is not: None.
        num_cache_creation_tokens, prompt_token_id_logprobs: likewise.
        kv_transfer_params, ec_transfer_params: likewise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | FlatLogprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    embedding: list[float] | None = None
    captured: dict[str, Any] | None = None
    weights_version: int = 0
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences that a beam search found.

    Attributes:
        tokens: the prompt and what was generated, an end-of-sequence token included.
        cum_logprob: sum of the generated tokens' raw log-probabilities.
        text: of all tokens; the end-of-sequence token has a part in it only with
            `include_stop_str_in_output`. None when the engine has no tokenizer.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str


@dataclass(slots=True)
class BeamSearchOutput:
    """What a beam search found for one prompt: `beam_width` sequences, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class PoolingOutput:
    """The vector of one prompt: float32[hidden size]."""

    data: np.ndarray


@dataclass(slots=True)
class _VectorOutput(Generic[Vector]):
    """What is returned of one prompt that was pooled.

    Attributes:
        request_id: the id that was made for it.
        outputs: its vector, without a number if its time was over.
        prompt_token_ids, num_cached_tokens: as of a `RequestOutput`.
        finished: False if its time was over.
    """

    request_id: str
    outputs: Vector
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def _of(cls, output: RequestOutput, vector: Vector) -> Self:
        tokens, cached = output.prompt_token_ids, output.num_cached_tokens
        return cls(output.request_id, vector, tokens, cached, output.embedding is not None)


class EmbeddingRequestOutput(_VectorOutput[EmbeddingOutput]):
    """What `LLM.embed` returns of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Of the output of a request with `PoolingParams` that has finished."""
        return cls._of(output, EmbeddingOutput(output.embedding or []))


class PoolingRequestOutput(_VectorOutput[PoolingOutput]):
    """What `LLM.encode` returns of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Of the output of a request with `PoolingParams` that has finished."""
        return cls._of(output, PoolingOutput(np.array(output.embedding or [], np.float32)))


@dataclass(slots=True)
class ClassificationOutput:
    """Of one prompt: a number a label, which are probabilities unless asked for as they are."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ClassificationRequestOutput(_VectorOutput[ClassificationOutput]):
    """What `LLM.classify` returns of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Of the output of a request with `PoolingParams` that has finished."""
        return cls._of(output, ClassificationOutput(output.embedding or []))


@dataclass(slots=True)
class ScoringOutput:
    """A pair's score: the head's, in [0, 1] by default, or the cosine of two vectors."""

    score: float


class ScoringRequestOutput(_VectorOutput[ScoringOutput]):
    """What `LLM.score` returns of one pair.

    By two vectors: `request_id` is the ids of both prompts with a "_" between, `prompt_token_ids`
    are the first prompt's, then the other's.
    """

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Of the output of a request with `PoolingParams` for a pair that has finished."""
        (score,) = output.embedding or [0.0]
        return cls._of(output, ScoringOutput(score))
