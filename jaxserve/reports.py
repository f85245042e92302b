"""What features of the step report on sequences, as it travels from the engine to its client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LOGPROBS, PROMPT_SCORES, POOLING = "logprobs", "prompt_scores", "pooling"


class TokenLogprobs(NamedTuple):
    """Raw log-probabilities at one position: of the token itself, and of others asked for.

    Attributes:
        ids: token ids, the token itself first; it may come again.
        logprobs: theirs.
        ranks: theirs, 1 for the most likely token; None where only the id was asked for.
    """

    ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


# by the feature that makes it, the type of what it tells, by sequence
REPORTS: Mapping[str, Any] = {
    LOGPROBS: dict[str, TokenLogprobs],  # of its only token in the step
    # of each place of the prompt after the first; None of embeddings
    PROMPT_SCORES: dict[str, list[TokenLogprobs | None]],
    POOLING: dict[str, list[float]],  # its vector
}
