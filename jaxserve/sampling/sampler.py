"""From logits to tokens: one draw a row, reproducible whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.params.sampling_params import GREEDY_TEMPERATURE
from pallas_kernels import blocks, kept_threshold

# exp(-80) = 1.8e-35 is a normal float32: below it a weight is exactly 0, so that no backend's
# treatment of denormals decides whether a token can be drawn.
SMALLEST_EXPONENT = -80.0
# threshold(weights float32[R, V], top_k [R], top_p [R], min_p [R]) -> the least kept weight [R]
Threshold = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
PORTABLE: Threshold = partial(kept_threshold, backend="xla")


class SamplingRows(NamedTuple):
    """Sampling parameters of R rows.

    Attributes:
        temperature: float32[R], 0 takes the most likely token.
        top_p: float32[R], 1 is off.
        top_k: int32[R], 0 is off.
        min_p: float32[R], 0 is off.
        seed: uint32[R, 2], high and low word of the request's seed.
        position: int32[R], position in the sequence of the token that is sampled.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seed: jax.Array
    position: jax.Array


# draw(logits float32[R, V], rows) -> one token a row, int32[R]
Draw = Callable[[jax.Array, SamplingRows], jax.Array]


class Draws(NamedTuple):
    """How the devices of a model draw tokens.

    Attributes:
        shared: of logits that all devices have.
        divided: of logits that nothing else reads: each device draws its part of the rows where
            they can be divided. A row is drawn of its own logits alone, so devices exchange
            nothing but the tokens.
    """

    shared: Draw
    divided: Draw


def sample(logits: jax.Array, rows: SamplingRows, threshold: Threshold = PORTABLE) -> jax.Array:
    """Samples one token a row: int32[R].

    The order is vLLM's: temperature, min_p, top_k, top_p.

    A row's random numbers depend on its seed and position alone, so its token does not change
    with the batch or the row.

    Args:
        logits: float32[R, V].
        rows: parameters, R rows.
        threshold: `kept_threshold` as the device runs it.
    """
    greedy, largest = blocks.argmax(logits)
    is_greedy = rows.temperature < GREEDY_TEMPERATURE

    def draw() -> jax.Array:
        return jnp.where(is_greedy, greedy, _draw(logits, largest, greedy, rows, threshold))

    def draw_if_wanted() -> jax.Array:
        return jax.lax.cond(jnp.all(is_greedy), lambda: greedy, draw)

    # a conditional would leave a GPU's graph, whose kernels cost greedy rows little
    return jax.lax.platform_dependent(cpu=draw_if_wanted, tpu=draw_if_wanted, default=draw)


def sample_apart(
    logits: jax.Array, rows: SamplingRows, threshold: Threshold = PORTABLE
) -> jax.Array:
    """The same, one row after the other: no bit of a row's sums depends on the others.

    XLA:CPU adds the weights of a row in an order that follows the number of rows.
    """

    def one(row: tuple[jax.Array, SamplingRows]) -> jax.Array:
        here, own = jax.tree.map(lambda leaf: leaf[None], row)
        return sample(here, own, threshold)[0]

    return jax.lax.map(one, (logits, rows))


def random_words(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Two uniform uint32 words a row from `fold_in(key(seed), position)`: uint32[R, 2].

    seed: uint32[R, 2], the words of a threefry key; position: int32[R].
    """

    def one_row(words: jax.Array, row_position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, row_position), (2,), jnp.uint32)

    return jax.vmap(one_row)(seed, position)


def _draw(
    logits: jax.Array,
    largest: jax.Array,
    greedy: jax.Array,
    rows: SamplingRows,
    threshold: Threshold,
) -> jax.Array:
    """One token a row by inversion of the cumulative distribution, in two levels: int32[R].

    One word of randomness chooses a block by the blocks' sums, a second one the token inside, so
    that rare tokens keep their probability although float32 cannot resolve it in one step.
    Gumbel-max would need a random number for every token: 15 ms for [16, 32768] and 63 ms for
    [16, 128256] on a 2-core CPU, where all of sampling by temperature takes 0.6 and 2 ms.
    """
    temperature = jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature)
    centre = jnp.where(jnp.isfinite(largest), largest, 0.0)
    z = (logits - centre[:, None]) * (1.0 / temperature)[:, None]
    # Masked before exp: XLA:CPU makes a second pass over the vocabulary for a select behind exp.
    weights = jnp.exp(jnp.where(z >= SMALLEST_EXPONENT, z, -jnp.inf))
    least = threshold(weights, rows.top_k, rows.top_p, rows.min_p)
    weights = jnp.where(weights >= least[:, None], weights, 0.0)
    # 24 bits make every value below 1 exact, so u * total never rounds up to total.
    uniform = (random_words(rows.seed, rows.position) >> 8).astype(jnp.float32) * 2.0**-24
    tokens = pick(weights, uniform)
    # Every token masked: there is nothing to draw from.
    return jnp.where(jnp.isfinite(largest), tokens, greedy)


def pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index int32[R] drawn with probability proportional to weights >= 0, float32[R, V].

    uniform: float32[R, 2] in [0, 1): the first chooses a block, the second an entry of it.
    An entry of weight 0 is returned only where the whole row is 0.
    """
    parts = blocks.split(weights, 0.0)
    block = _invert(jnp.sum(parts, axis=-1), uniform[:, 0])
    inside = _invert(blocks.take(parts, block[:, None])[:, 0], uniform[:, 1])
    return jnp.minimum(block * blocks.BLOCK + inside, weights.shape[1] - 1)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index whose cumulative weight exceeds uniform * total; weights [R, N], uniform [R]."""
    cumulative = jnp.cumsum(weights, axis=-1)
    target = uniform * cumulative[:, -1]
    positive = weights > 0.0
    # A parallel cumulative sum may rise at an entry of weight 0 by rounding: such never count.
    found = blocks.first(positive & (cumulative > target[:, None]))
    index = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.minimum(found, last)
