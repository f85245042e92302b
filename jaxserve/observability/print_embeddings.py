"""Prints an embedding, as example programs of vLLM do."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 4  # numbers of each


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and how many it has."""
    numbers = ", ".join(f"{value:.6f}" for value in embeds[:SHOWN])
    print(f"{prefix}: [{numbers}, ...] (size={len(embeds)})")
