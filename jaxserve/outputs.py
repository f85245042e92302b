"""What a request returns: the same fields as vLLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the model's probability.
        rank: 1 for the most likely token, 2 for the next, and so on.
        decoded_token: the token as text, or None when detokenisation is off.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# One position: token id -> Logprob. The first prompt position has no logprobs and is None.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`; None until the event has happened.

    `first_scheduled_time` and `queue_overhead` are those of `Request`.
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
        cumulative_logprob: sum of the tokens' logprobs, None unless logprobs were asked for.
        logprobs: one dict a generated token, None unless logprobs were asked for.
        finish_reason: None while running, then "stop", "length" or "abort".
        stop_reason: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request as its caller sees it.

    Attributes:
        request_id: the id that the caller gave or that was made for it.
        prompt: the prompt as text, None when it came as token ids.
        prompt_token_ids: the prompt's token ids.
        prompt_logprobs: one entry a prompt token (the first is None), None unless asked for.
        outputs: the `n` completions, by index.
        finished: True when all completions have ended.
        metrics: times of the request.
        num_cached_tokens: prompt tokens whose KV was found in a prefix cache: 0, there is none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
