"""How the features of a program compose: from logits to tokens and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.execution.features import Feature, Rows, of_region, overrides
from jaxserve.execution.features.traced import traced
from jaxserve.execution.step_inputs import Blob, BlobLayout, contained

FEW_SPECIAL = 8  # special rows that are worth a branch of their own


class SampleFacts(NamedTuple):
    """What is known of all R samples of a step; the fields are those of `Rows`."""

    slot: jax.Array
    position: jax.Array
    prompt_len: jax.Array
    history: jax.Array


def sample_rows(
    features: Sequence[Feature],
    layout: BlobLayout,
    given: Blob,
    known: SampleFacts,
    logits: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:
    """The token of each row, and what the features report on the special rows.

    The costly features see M rows of logits, not R. The tokens drawn after them replace those that
    the same rows got without them.

    Args:
        features: of the engine; those that the program contains are applied in their order.
        layout: of the program's blob.
        given: the blob, traced.
        known: of the samples.
        logits: float32[R, V].

    Returns:
        tokens int32[R], and by a feature's name its outputs.
    """
    shape = layout.shape
    features = contained(features, shape)
    tokens = jnp.zeros(shape.num_rows, jnp.int32)
    if not shape.all_special:
        tokens = _drawn(features, _rows(layout, given, known), logits)
    if not shape.num_special:
        return tokens, {}
    work = partial(_special_rows, features, layout, known, logits, tokens)
    if shape.all_special:
        return work(given)
    drawn, outputs = _few_or_all(layout, given, work)
    # places that are not used name row R, which does not exist
    return tokens.at[given.step.special].set(drawn, mode="drop"), outputs


def _special_rows(
    features: Sequence[Feature],
    layout: BlobLayout,
    known: SampleFacts,
    logits: jax.Array,
    tokens: jax.Array,
    given: Blob,
) -> tuple[jax.Array, dict[str, Any]]:
    """Tokens int32[M] and reports of the special rows that `given` lists.

    Where no feature adjusts logits they are the tokens that the rows got already.
    """
    shape = layout.shape
    places = None if shape.all_special else jnp.minimum(given.step.special, shape.num_rows - 1)
    rows = _rows(layout, given, known, places)
    raw = adjusted = logits if places is None else logits[places]
    for feature in features:
        inputs = given.features.get(feature.name)
        adjust = partial(traced, feature, "logits", inputs, rows, adjusted, like=adjusted)
        adjusted = if_wanted(feature, layout, given, adjust, adjusted)
    if places is None:
        drawn = _drawn(features, rows, adjusted)
    else:
        adjusts = [f for f in features if overrides(f, "logits")]
        flags = jnp.stack([layout.is_wanted(given, feature) for feature in adjusts])
        draw = partial(_drawn, features, rows, adjusted)
        drawn = _conditional(jnp.any(flags), draw, lambda: tokens[places])
    outputs: dict[str, Any] = {}
    rows = replace(rows, adjusted=adjusted)
    for feature in features:
        if feature.outputs is not None and not of_region(feature):
            inputs, like = given.features.get(feature.name), layout.outputs(feature, len(drawn))
            report = partial(traced, feature, "after", inputs, rows, raw, drawn, like=like)
            outputs[feature.name] = if_wanted(feature, layout, given, report)
    return drawn, outputs


def _few_or_all(
    layout: BlobLayout, given: Blob, work: Callable[[Blob], tuple[jax.Array, dict[str, Any]]]
) -> tuple[jax.Array, dict[str, Any]]:
    """What `work` computes for the special rows; where they are few, for no more than these."""
    shape = layout.shape
    if shape.num_special <= FEW_SPECIAL:
        return work(given)

    def few() -> tuple[jax.Array, dict[str, Any]]:
        found = work(layout.first_special(given, FEW_SPECIAL))
        rest = shape.num_special - FEW_SPECIAL
        return jax.tree.map(lambda x: jnp.pad(x, [(0, rest)] + [(0, 0)] * (x.ndim - 1)), found)

    # the list is filled from the front
    are_many = given.step.special[FEW_SPECIAL] < shape.num_rows
    return _conditional(are_many, partial(work, given), few)


def if_wanted(
    feature: Feature,
    layout: BlobLayout,
    given: Blob,
    work: Callable[[], Any],
    otherwise: Any = None,
) -> Any:
    """What `work` computes; without need for the feature `otherwise`, zeros if that is None."""
    if not feature.special:
        return work()

    def nothing() -> Any:
        if otherwise is not None:
            return otherwise
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work))

    return _conditional(layout.is_wanted(given, feature), work, nothing)


def _conditional(flag: jax.Array, work: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """One of the two; a GPU always does the work: a conditional would leave its graph."""

    def choose() -> Any:
        return jax.lax.cond(flag, work, otherwise)

    return jax.lax.platform_dependent(cpu=choose, tpu=choose, default=work)


def _rows(
    layout: BlobLayout, given: Blob, known: SampleFacts, places: jax.Array | None = None
) -> Rows:
    """The samples at int32[M] places, or all of them."""
    shape, table = layout.shape, given.rows
    if shape.num_queries > 1:
        decode = jnp.repeat(table[: shape.num_decode], shape.num_queries, axis=0)
        table = jnp.concatenate([decode, table[shape.num_decode :]])
    slot, position, prompt_len, history = known
    if places is not None:
        table = table[places]
        slot, position, prompt_len = slot[places], position[places], prompt_len[places]
    return Rows(slot, position, prompt_len, history, layout.row_table.read(table))


def _drawn(features: Sequence[Feature], rows: Rows, logits: jax.Array) -> jax.Array:
    """The tokens of the one feature that draws."""
    drawn = (traced(f, "sample", rows, logits) for f in features if overrides(f, "sample"))
    (tokens,) = [tokens for tokens in drawn if tokens is not None]
    return tokens
