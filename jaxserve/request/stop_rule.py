"""Which sampled tokens end a request, and how a request has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from jaxserve.params.repetition_detection import RepetitionDetectionParams


class FinishReason(StrEnum):
    """How a token may end a request, in the words of the OpenAI and vLLM APIs."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ERROR = "error"  # its grammar allows no token, or has become too complex
    NOT_COMPILED = "not compiled"  # the engine had no time for its grammar; told as an error


class End(NamedTuple):
    """How a token ended its request."""

    reason: FinishReason
    stop_token: int | None  # None but for a stop token


@dataclass(frozen=True, slots=True)
class StopRule:
    """Which sampled tokens end a request.

    Attributes:
        eos_token_ids: end it with `stop_reason` None, unless they are ignored.
        stop_token_ids: end it with the token id as `stop_reason`.
        min_tokens: neither kind is generated before that many tokens.
        max_tokens: it ends with "length" at that many generated tokens.
        ignore_eos: `eos_token_ids` are held back by `min_tokens` and end nothing.
        repetition: the repetitions that end it, from `min_tokens` on; None: none do.
        end_token_ids: what ends it; made here, so that most tokens need one look-up.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    ignore_eos: bool = False
    repetition: RepetitionDetectionParams | None = None
    end_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        ends = self.stop_token_ids
        if not self.ignore_eos:  # one set for all that stop at nothing else: many may wait
            ends = ends | self.eos_token_ids if ends else self.eos_token_ids
        object.__setattr__(self, "end_token_ids", ends)

    def check(self, token: int, num_output: int) -> End | None:
        """Whether the request ends with `token` as its `num_output`-th generated token."""
        if num_output >= self.min_tokens and token in self.end_token_ids:
            is_eos = token in self.eos_token_ids and not self.ignore_eos
            return End(FinishReason.STOP, None if is_eos else token)
        if num_output >= self.max_tokens:
            return End(FinishReason.LENGTH, None)
        return None

    def check_repetition(self, tokens: list[int]) -> End | None:
        """Whether the last of the generated tokens ends the request by repetition."""
        asked = self.repetition
        if asked is None or len(tokens) < self.min_tokens or not asked.ends(tokens):
            return None
        return End(FinishReason.REPETITION, None)
