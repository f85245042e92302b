"""Embeddings in the place of a prompt's token ids: how they are checked, and how they travel."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import ValidationError

FIELD = "prompt_embeds"
NO_ID = -1  # of a place of the prompt that an embedding takes


class EmbedsSpan(NamedTuple):
    """Embeddings of neighbouring places of a prompt.

    Attributes:
        start: the first place.
        data: little-endian float32[T, E], a row a place.
    """

    start: int
    data: bytes

    def rows(self, hidden_size: int) -> np.ndarray:
        """float32[T, hidden_size], read-only."""
        return np.frombuffer(self.data, "<f4").reshape(-1, hidden_size)


def checked_spans(given: Any, tokens: list[int], hidden_size: int) -> list[EmbedsSpan]:
    """The spans that a caller gives beside token ids, which become NO_ID there.

    Args:
        given: pairs (start, array) in the order of their places, see `checked_embeds`.
        tokens: of the whole prompt; changed in place.
        hidden_size: of the model.

    Raises:
        ValidationError: anything else, or spans that overlap or reach beyond the prompt.
    """
    spans, end = [], 0
    for pair in given:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], int | np.integer):
            allowed = "a NumPy or JAX array, or pairs (start, array) beside prompt_token_ids"
            raise ValidationError(FIELD, f"a list of {type(pair).__name__}", allowed)
        start, rows = int(pair[0]), checked_embeds(pair[1], hidden_size)
        if not end <= start < start + len(rows) <= len(tokens):
            allowed = f"one row or more from {end} on, within the {len(tokens)} tokens"
            raise ValidationError(FIELD, f"{len(rows)} rows from {start} on", allowed)
        end = start + len(rows)
        tokens[start:end] = [NO_ID] * len(rows)
        spans.append(EmbedsSpan(start, rows.tobytes()))
    return spans


def checked_embeds(given: Any, hidden_size: int) -> np.ndarray:
    """Little-endian float32[T, hidden_size] of what a caller gives.

    Args:
        given: a NumPy or JAX array of floating numbers.
        hidden_size: of the model.

    Raises:
        ValidationError: anything else, an array of another shape, or numbers that are not finite.
    """
    if not (isinstance(given, np.ndarray) or _is_jax_array(given)):
        raise ValidationError(FIELD, type(given).__name__, "a NumPy or JAX array")
    shown = f"{given.dtype}{list(given.shape)}"
    # those that NumPy does not know, such as bfloat16, are of kind V and named
    if given.dtype.kind != "f" and "float" not in given.dtype.name:
        raise ValidationError(FIELD, shown, "float32, bfloat16 or another floating type")
    if given.ndim != 2 or given.shape[1] != hidden_size:
        raise ValidationError(FIELD, shown, f"[tokens, {hidden_size}], the model's hidden size")
    # what overflows float32 is infinite there, which is what is refused
    with np.errstate(over="ignore"):
        embeds = np.asarray(given).astype("<f4")
    if not np.isfinite(embeds).all():
        raise ValidationError(FIELD, shown, "finite numbers")
    return embeds


def _is_jax_array(given: Any) -> bool:
    jax = sys.modules.get("jax")  # a process without an engine has no reason to import it
    return jax is not None and isinstance(given, jax.Array)
