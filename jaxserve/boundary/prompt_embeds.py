"""Embeddings in the place of a prompt's token ids: how they are checked."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.errors import ValidationError

FIELD = "prompt_embeds"


def checked_embeds(given: Any, model: ModelFacts) -> np.ndarray:
    """Little-endian float32[T, hidden_size] of what a caller gives.

    Args:
        given: a NumPy or JAX array of floating numbers.
        model: of the engine.

    Raises:
        ValidationError: anything else, an array of another shape, or numbers that are not finite.
    """
    if not (isinstance(given, np.ndarray) or _is_jax_array(given)):
        raise ValidationError(FIELD, type(given).__name__, "a NumPy or JAX array")
    shown = f"{given.dtype}{list(given.shape)}"
    # those that NumPy does not know, such as bfloat16, are of kind V and named
    if given.dtype.kind != "f" and "float" not in given.dtype.name:
        raise ValidationError(FIELD, shown, "float32, bfloat16 or another floating type")
    if given.ndim != 2 or given.shape[1] != model.hidden_size:
        allowed = f"[tokens, {model.hidden_size}], the model's hidden size"
        raise ValidationError(FIELD, shown, allowed)
    # what overflows float32 is infinite there, which is what is refused
    with np.errstate(over="ignore"):
        embeds = np.asarray(given).astype("<f4")
    if not np.isfinite(embeds).all():
        raise ValidationError(FIELD, shown, "finite numbers")
    return embeds


def _is_jax_array(given: Any) -> bool:
    jax = sys.modules.get("jax")  # a process without an engine has no reason to import it
    return jax is not None and isinstance(given, jax.Array)
