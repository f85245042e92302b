"""The reports of a step's features on sequences, as the engine sends them to its client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import shown

LOGPROBS, PROMPT_SCORES, POOLING = "logprobs", "prompt_scores", "pooling"


class TokenLogprobs(NamedTuple):
    """Raw log-probabilities at one position: of the token itself, and of others asked for.

    Attributes:
        ids: token ids, the token itself first; it may come again.
        logprobs: log-probability of each id.
        ranks: rank of each id, 1 for the most likely; None where only the id was asked for.
    """

    ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


def plain(value: Any) -> Any:
    """A feature's report as JSON types: arrays become lists.

    Raises:
        TypeError: something in it is neither an array, text, a number, None, a list nor a mapping
            with keys of text, or has more than 64 bits.
        UnicodeEncodeError: text is none.
    """
    match value:
        case int() if not -(2**63) <= value < 2**64:
            raise TypeError(f"{shown(value)} has more than 64 bits")
        case str():
            value.encode()  # refuses halves of surrogate pairs
            return value
        case None | bool() | int() | float():
            return value
        case list() | tuple():
            return [plain(one) for one in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: plain(one) for key, one in value.items()}
    if hasattr(value, "shape"):  # NumPy's and JAX's arrays: not looked at number by number
        array = np.asarray(value)
        if array.dtype.kind in "biufUV" and array.dtype.names is None:  # V: bfloat16 and its like
            return array.tolist()
    raise TypeError(f"{shown(value)} ({type(value).__name__}) is nothing that JSON has")


# reports that have fields of their own in outputs: feature -> type of its reports, by sequence
REPORTS: Mapping[str, Any] = {
    LOGPROBS: dict[str, TokenLogprobs],  # of its only token in the step
    # of each place of the prompt after the first; None of embeddings
    PROMPT_SCORES: dict[str, list[TokenLogprobs | None]],
    POOLING: dict[str, list[float]],  # its vector
}
