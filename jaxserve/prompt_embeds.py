"""Prompts as embeddings: how they are checked, and how they travel in a message."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.errors import ValidationError


def checked_embeds(
    given: Any, hidden_size: int, check_length: Callable[[Any, int], None]
) -> np.ndarray:
    """float32[T, hidden_size] of what a caller gives.

    Args:
        given: a NumPy or JAX array of floating numbers.
        hidden_size: of the model.
        check_length: told the prompt and T, raises where it is too short or too long.

    Raises:
        ValidationError: anything else, an array of another shape, or numbers that are not finite.
    """
    field = "prompt_embeds"
    if not (isinstance(given, np.ndarray) or _is_jax_array(given)):
        raise ValidationError(field, type(given).__name__, "a NumPy or JAX array")
    shown = f"{given.dtype}{list(given.shape)}"
    # those that NumPy does not know, such as bfloat16, are of kind V and named
    if given.dtype.kind != "f" and "float" not in given.dtype.name:
        raise ValidationError(field, shown, "float32, bfloat16 or another floating type")
    if given.ndim != 2 or given.shape[1] != hidden_size:
        raise ValidationError(field, shown, f"[tokens, {hidden_size}], the model's hidden size")
    check_length(shown, given.shape[0])
    # what overflows float32 is infinite there, which is what is refused
    with np.errstate(over="ignore"):
        embeds = np.asarray(given).astype(np.float32)
    if not np.isfinite(embeds).all():
        raise ValidationError(field, shown, "finite numbers")
    return embeds


def _is_jax_array(given: Any) -> bool:
    jax = sys.modules.get("jax")  # a process without an engine has no reason to import it
    return jax is not None and isinstance(given, jax.Array)


def embeds_as_text(embeds: np.ndarray) -> str:
    """float32[T, E] as they travel, see `AddGroup.prompt_embeds`."""
    return base64.b64encode(embeds.astype("<f4").tobytes()).decode("ascii")


def embeds_from_text(text: str, num_tokens: int) -> np.ndarray:
    """What `embeds_as_text` was given: float32[num_tokens, E]."""
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(num_tokens, -1)
