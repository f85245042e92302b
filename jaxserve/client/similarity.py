"""Pairs of texts, and the similarity of two by their vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.errors import ValidationError
from jaxserve.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput


def check_scores(labels: tuple[str, ...]) -> bool:
    """Whether a model scores a pair by its head; False: it makes a vector of each text.

    Raises:
        ValidationError: it classifies, and not by one score.
    """
    if len(labels) > 1:
        allowed = "a model with one label, or one that makes embeddings"
        raise ValidationError("model", f"a model with {len(labels)} labels", allowed)
    return bool(labels)


def pair_up(first: int, second: int, fields: tuple[str, str]) -> list[tuple[int, int]]:
    """Pairs of indices: a single first text is paired with all, else texts of one index pair.

    Raises:
        ValidationError: there are none, or neither is one and their numbers differ.
    """
    for name, count in zip(fields, (first, second), strict=True):
        if not count:
            raise ValidationError(name, [], "at least one text")
    if first == 1:
        return [(0, index) for index in range(second)]
    if first != second:
        allowed = f"{first} texts, as {fields[0]}, or {fields[0]} one"
        raise ValidationError(fields[1], f"{second} texts", allowed)
    return [(index, index) for index in range(first)]


def score(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    """The output of a pair by its vectors."""
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(cosine(one.outputs.data, other.outputs.data)),
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        one.finished and other.finished,
    )


def cosine(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Cosine of the angle between two vectors; 0 where one is zero."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    norm = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norm if norm else 0.0
