"""How the features of a program compose: from logits to tokens and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.execution.features import KINDS, Facts, Feature, Rows
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
        adjusted = if_wanted(
            feature,
            given,
            partial(feature.logits, given.features.get(feature.name), rows, adjusted),
            adjusted,
        )
    drawn = _drawn(features, rows, adjusted)
    for feature in features:
        if feature.outputs is not None and not feature.of_region:
            report = partial(
                feature.after, given.features.get(feature.name), rows, raw, drawn, facts
            )
            outputs[feature.name] = if_wanted(feature, given, report)
    if places is None:
        return drawn, outputs
    # places that are not used name row R, which does not exist
    return tokens.at[given.step.special].set(drawn, mode="drop"), outputs


def if_wanted(feature: Feature, given: Blob, work: Callable[[], Any], otherwise: Any = None) -> Any:
    """What `work` computes; in a step that does not need the feature `otherwise`, or zeros if None.

    A GPU computes it in any case: a conditional would leave its graph.
    """
    if not feature.special and not feature.of_region:
        return work()
    flag = given.step.wanted[[kind.name for kind in KINDS].index(feature.name)] > 0

    def nothing() -> Any:
        if otherwise is not None:
            return otherwise
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work))

    def choose() -> Any:
        return jax.lax.cond(flag, work, nothing)

    return jax.lax.platform_dependent(cpu=choose, tpu=choose, default=work)


def _rows(
    layout: BlobLayout, given: Blob, history: jax.Array, places: jax.Array | None = None
) -> Rows:
    """The sampling rows at int32[M] places, or all of them."""
    step, table = given.step, given.rows
    known = (step.slot, step.position, step.prompt_len)
    if places is not None:
        table, known = table[places], tuple(array[places] for array in known)
    return Rows(*known, history, layout.row_table.read(table))


def _drawn(features: Sequence[Feature], rows: Rows, logits: jax.Array) -> jax.Array:
    """The tokens of the one feature that draws."""
    (tokens,) = [t for f in features if (t := f.sample(rows, logits)) is not None]
    return tokens
