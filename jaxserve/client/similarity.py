"""Similarity of texts by their embeddings."""

from __future__ import annotations

import numpy as np

from jaxserve.errors import ValidationError
from jaxserve.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput


def pair_up(first: int, second: int) -> list[tuple[int, int]]:
    """Pairs of indices: a single first text is paired with all, else texts of one index pair.

    Raises:
        ValidationError: neither is one and their numbers differ.
    """
    if first == 1:
        return [(0, index) for index in range(second)]
    if first != second:
        raise ValidationError(
            "data_2", f"{second} texts", f"{first} texts, as data_1, or data_1 one"
        )
    return [(index, index) for index in range(first)]


def score(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    """The output of a pair."""
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(cosine(one.outputs.data, other.outputs.data)),
        one.prompt_token_ids + other.prompt_token_ids,
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of the angle between two vectors; 0 where one is zero."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    norm = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norm if norm else 0.0
