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
    kept: dict[str, dict[str, jax.Array]] = {}  # noqa: RUF012 - of a named tuple, never changed
    logits_of: Callable[[jax.Array], jax.Array] | None = None


class Sampled(NamedTuple):
    """What sampling gives.

    Attributes:
        tokens: int32[R].
        outputs: of features, by their names.
        states: what `Feature.adjust` has made of the features' states, by their names.
    """

    tokens: jax.Array
    outputs: dict[str, Any]
    states: dict[str, Any]


def sample_rows(
    features: Sequence[Feature],
    layout: BlobLayout,
    given: Blob,
    known: SampleFacts,
    logits: jax.Array,
    states: dict[str, Any] | None = None,
) -> Sampled:
    """The token of each row, and what the features report on the special rows.

    The costly features see M rows of logits, not R. The tokens drawn after them replace those that
    the same rows got without them.

    Args:
        features: of the engine; those that the program contains are applied in their order.
        layout: of the program's blob.
        given: the blob, traced.
        known: of the samples.
        logits: float32[R, V].
        states: of features, by their names.
    """
    shape = layout.shape
    features = contained(features, shape)
    adjusting = [feature for feature in features if overrides(feature, "adjust")]
    mine = {feature.name: (states or {}).get(feature.name) for feature in adjusting}
    tokens = jnp.zeros(shape.num_rows, jnp.int32)
    if not shape.all_special:
        rows = replace(_rows(layout, given, known), drawn_alone=draws_alone(features, layout))
        tokens = _drawn(features, rows, logits)
    if not shape.num_special:
        return Sampled(tokens, {}, {})
    work = partial(_special_rows, features, layout, known, logits, tokens, mine)
    if shape.all_special:
        return work(given)
    drawn, outputs, changed = _few_or_all(layout, given, work)
    # places that are not used name row R, which does not exist
    tokens = tokens.at[given.step.special].set(drawn, mode="drop")
    return Sampled(tokens, outputs, changed)


def draws_alone(features: Sequence[Feature], layout: BlobLayout) -> bool:
    """Whether a program uses its logits for nothing but to draw a token of each row."""
    shape = layout.shape
    sees = any(overrides(feature, "see_last") for feature in contained(features, shape))
    return not shape.num_special and not sees


def _special_rows(
    features: Sequence[Feature],
    layout: BlobLayout,
    known: SampleFacts,
    logits: jax.Array,
    tokens: jax.Array,
    states: dict[str, Any],
    given: Blob,
) -> Sampled:
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
    states = dict(states)
    for feature in features:
        if feature.name in states:
            inputs, before = given.features.get(feature.name), (adjusted, states[feature.name])
            work = partial(traced, feature, "adjust", inputs, rows, *before, like=before)
            adjusted, states[feature.name] = if_wanted(feature, layout, given, work, before)
    if places is None:
        drawn = _drawn(features, rows, adjusted)
    else:
        adjusts = [f for f in features if overrides(f, "logits") or overrides(f, "adjust")]
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
    return Sampled(drawn, outputs, states)


def _few_or_all(layout: BlobLayout, given: Blob, work: Callable[[Blob], Sampled]) -> Sampled:
    """What `work` computes for the special rows; where they are few, for no more than these."""
    shape = layout.shape
    if shape.num_special <= FEW_SPECIAL:
        return work(given)

    def few() -> Sampled:
        tokens, outputs, states = work(layout.first_special(given, FEW_SPECIAL))
        rest = shape.num_special - FEW_SPECIAL
        tokens, outputs = jax.tree.map(
            lambda x: jnp.pad(x, [(0, rest)] + [(0, 0)] * (x.ndim - 1)), (tokens, outputs)
        )
        return Sampled(tokens, outputs, states)

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
    slot, position, prompt_len, history, kept, logits_of = known
    if places is not None:
        table = table[places]
        slot, position, prompt_len = slot[places], position[places], prompt_len[places]
        kept = jax.tree.map(lambda x: x[places], kept)
    values = layout.row_table.read(table)
    return Rows(slot, position, prompt_len, history, values, kept=kept, logits_of=logits_of)


def _drawn(features: Sequence[Feature], rows: Rows, logits: jax.Array) -> jax.Array:
    """The tokens of the one feature that draws."""
    drawn = (traced(f, "sample", rows, logits) for f in features if overrides(f, "sample"))
    (tokens,) = [tokens for tokens in drawn if tokens is not None]
    return tokens
