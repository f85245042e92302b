"""What metrics say of a request that is over: its lengths, and where its time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.observability.buckets import (
    COUNT_BUCKETS,
    LATENCY_BUCKETS,
    LENGTH_BUCKETS,
    TOKEN_BUCKETS,
)
from jaxserve.observability.cheap_histogram import CheapHistogram
from jaxserve.outputs import RequestMetrics


class EndedRequest(NamedTuple):
    """A request of which every sequence has ended.

    Attributes:
        times: when it came, began and ended.
        num_prompt: tokens of the prompt.
        num_generated: tokens of each sequence.
        max_tokens: that each might have had; None where it had no limit of its own.
        num_preemptions: of all its sequences.
        is_whole: it ran to its end: neither an abort nor an error ended it.
    """

    times: RequestMetrics
    num_prompt: int
    num_generated: Sequence[int]
    max_tokens: int | None
    num_preemptions: int
    is_whole: bool


class RequestHistograms:
    """Histograms with an observation a request, or one a sequence where that is said.

    Args:
        make: makes a histogram that is collected, from its name, the help line and its buckets.
    """

    def __init__(self, make: Callable[[str, str, Sequence[float]], CheapHistogram]):
        self._prompt = make("request_prompt_tokens", "Tokens of a prompt.", LENGTH_BUCKETS)
        self._generated = make(
            "request_generation_tokens", "Generated tokens of a sequence.", LENGTH_BUCKETS
        )
        self._longest = make(
            "request_max_num_generation_tokens",
            "Generated tokens of a request's longest sequence.",
            LENGTH_BUCKETS,
        )
        self._max_tokens = make(
            "request_params_max_tokens", "max_tokens of requests that set it.", LENGTH_BUCKETS
        )
        self._n = make("request_params_n", "Completions that a request asked for.", COUNT_BUCKETS)
        self._preemptions = make(
            "request_num_preemptions",
            "Times that a request's sequences lost their slots.",
            COUNT_BUCKETS,
        )
        self._prefill = make(
            "request_prefill_time_seconds", "First step to first token.", LATENCY_BUCKETS
        )
        self._decode = make(
            "request_decode_time_seconds", "First token to last token.", LATENCY_BUCKETS
        )
        self._inference = make(
            "request_inference_time_seconds", "First step to last token.", LATENCY_BUCKETS
        )
        self._per_token = make(
            "request_time_per_output_token_seconds",
            "Decode time by the tokens after the first one, of requests with more than one.",
            TOKEN_BUCKETS,
        )

    def record(self, ended: EndedRequest) -> None:
        """Take in a request that is over; times only of one that ran to its end."""
        longest = max(ended.num_generated, default=0)
        self._prompt.observe(ended.num_prompt)
        for count in ended.num_generated:
            self._generated.observe(count)
        self._longest.observe(longest)
        if ended.max_tokens is not None:
            self._max_tokens.observe(ended.max_tokens)
        self._n.observe(len(ended.num_generated))
        self._preemptions.observe(ended.num_preemptions)
        times = ended.times
        first, last = times.first_token_time, times.last_token_time
        if not ended.is_whole or first is None or last is None:
            return
        self._decode.observe(last - first)
        if longest > 1:
            self._per_token.observe((last - first) / (longest - 1))
        if times.first_scheduled_time is not None:
            self._prefill.observe(first - times.first_scheduled_time)
            self._inference.observe(last - times.first_scheduled_time)
