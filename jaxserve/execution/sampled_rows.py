"""How the features of a program compose: from logits to tokens and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.execution.features import Facts, Feature, Rows
from jaxserve.execution.inputs import Blob, BlobLayout, contained


def sample_rows(
    features: Sequence[Feature],
    facts: Facts,
    layout: BlobLayout,
    given: Blob,
    history: jax.Array,
    logits: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:
    """The token of each row, and what the features report on the special rows.

    The costly features see M rows of logits, not R. The tokens drawn after them replace those that
    the same rows got without them.

    Args:
        features: of the engine; those that the program contains are applied in their order.
        facts: about the engine.
        layout: of the program's blob.
        given: the blob, traced.
        history: int32[S + 1, L] token ids by slot and position.
        logits: float32[R, V].

    Returns:
        tokens int32[R], and by a feature's name its outputs.
    """
    shape = layout.shape
    features = contained(features, shape)
    tokens = jnp.zeros(shape.num_rows, jnp.int32)
    if not shape.all_special:
        tokens = _drawn(features, _rows(layout, given, history), logits)
    outputs: dict[str, Any] = {}
    if not shape.num_special:
        return tokens, outputs
    places = None if shape.all_special else jnp.minimum(given.step.special, shape.num_rows - 1)
    rows = _rows(layout, given, history, places)
    raw = adjusted = logits if places is None else logits[places]
    for feature in features:
        adjusted = feature.logits(given.features.get(feature.name), rows, adjusted)
    drawn = _drawn(features, rows, adjusted)
    for feature in features:
        reported = feature.after(given.features.get(feature.name), rows, raw, drawn, facts)
        if reported is not None:
            outputs[feature.name] = reported
    if places is None:
        return drawn, outputs
    # places that are not used name row R, which does not exist
    return tokens.at[given.step.special].set(drawn, mode="drop"), outputs


def _rows(
    layout: BlobLayout, given: Blob, history: jax.Array, places: jax.Array | None = None
) -> Rows:
    """The sampling rows at int32[M] places, or all of them."""
    step, table = given.step, given.rows
    facts = (step.slot, step.position, step.prompt_len)
    if places is not None:
        table, facts = table[places], tuple(fact[places] for fact in facts)
    return Rows(*facts, history, layout.row_table.read(table))


def _drawn(features: Sequence[Feature], rows: Rows, logits: jax.Array) -> jax.Array:
    """The tokens of the one feature that draws."""
    (tokens,) = [t for f in features if (t := f.sample(rows, logits)) is not None]
    return tokens
