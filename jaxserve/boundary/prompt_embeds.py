"""Checks embeddings that take the place of a prompt's token ids."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.errors import ValidationError

FIELD = "prompt_embeds"


def checked_embeds(given: Any, model: ModelFacts) -> np.ndarray:
    """A caller's embeddings as little-endian float32[T, hidden_size].

    Args:
        given: a NumPy or JAX array of floating numbers, or a tensor of torch's.
        model: its hidden size is the wanted one.

    Raises:
        ValidationError: anything else, an array of another shape, or numbers that are not finite.
    """
    if _is_of("torch", "Tensor", given) and given.is_floating_point():
        given = given.detach().float().cpu().numpy()  # NumPy knows no bfloat16 of torch's
    if not (isinstance(given, np.ndarray) or _is_of("jax", "Array", given)):
        allowed = "a NumPy or JAX array, or a floating tensor of torch's"
        raise ValidationError(FIELD, type(given).__name__, allowed)
    shown = f"{given.dtype}{list(given.shape)}"
    # types that NumPy does not know, such as bfloat16, have kind V and a name
    if given.dtype.kind != "f" and "float" not in given.dtype.name:
        raise ValidationError(FIELD, shown, "float32, bfloat16 or another floating type")
    if given.ndim != 2 or given.shape[1] != model.hidden_size:
        allowed = f"[tokens, {model.hidden_size}], the model's hidden size"
        raise ValidationError(FIELD, shown, allowed)
    # a number that overflows float32 becomes infinite, and is refused below
    with np.errstate(over="ignore"):
        embeds = np.asarray(given).astype("<f4")
    if not np.isfinite(embeds).all():
        raise ValidationError(FIELD, shown, "finite numbers")
    return embeds


def _is_of(module: str, kind: str, given: Any) -> bool:
    """Whether it is of a type of a module, which there is no reason to import if it is not."""
    found = sys.modules.get(module)
    return found is not None and isinstance(given, getattr(found, kind))
