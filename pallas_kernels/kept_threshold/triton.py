"""kept_threshold for NVIDIA GPUs, by Pallas' Triton backend: one thread block a row.

Two bounds of a row are sought: the floor, which top-k and min-p set, and the border of top-p. The
border's mass is relative to the tokens that the floor keeps. Each bound lies between two float32
numbers, and their bits have the same order. Three phases, none with more than one read of the row
at a time:

1. Counting, at most COUNTS times, while more than LISTED tokens lie between the ends: PIVOTS
   bounds are tried in one read, by the number and the mass of the tokens that reach them. The
   first read tries every second power of two, the next ones divide what is left.
2. Listing: one read. Tokens between the ends are kept in a list, and the mass above them is
   summed.
3. Halving on the list alone: exact bounds.

So a row is read at most COUNTS + 1 times, and not at all where every filter is off. The list is in
the cache unless many more than LISTED tokens lie between the last ends, which are a factor of about
33/32 apart for bounds above 2^-24 of the row's largest weight, and of about 3 below.

Exactness. Counts are integers. Sums that decide while counting are plain float32, and an end moves
only where it would at any sums within their bound of error. Sums that decide in the end are exact
but for the sums of GROUP = 8 weights (3 roundings), the product with top_p and one difference: 4
roundings of the total, 3 of the mass, 2^-24 of either each, together less than 5e-7 of the total.
Every sum has one fixed order, which depends on V alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError

WARPS = 16
LANES = 32 * WARPS  # a lane is a thread: what a lane has put on the list, it alone reads again
GROUP = 8  # loads of a lane that are under way together
COUNTS = 3
HALF = 7  # pivots for each of the two bounds
PIVOTS = 2 * HALF
LISTED = 8 * LANES  # tokens that may be left when counting ends early
ONE_BITS = 0x3F800000  # float32 1.0
EXPONENT = 23  # bits below the exponent
ABSENT = -1.0  # below every bound

Sum = tuple[jax.Array, jax.Array]  # float32 each: a sum and what its roundings have lost


class Span(NamedTuple):
    """The range of a bound: from `low` to below `high`, the bits of float32 numbers from 0 up.

    Attributes:
        low, high: the ends.
        low_count, high_count: tokens that reach them.
        low_mass, high_mass: what these weigh, as far as it is known; inf and 0 else.
    """

    low: jax.Array
    high: jax.Array
    low_count: jax.Array
    high_count: jax.Array
    low_mass: jax.Array
    high_mass: jax.Array

    @property
    def is_open(self) -> jax.Array:
        """Whether there is anything left to find."""
        return self.high - self.low > 1

    @property
    def between(self) -> jax.Array:
        """Tokens between the ends that are still to be told apart."""
        return jnp.where(self.is_open, self.low_count - self.high_count, 0)

    def closed_where(self, condition: jax.Array) -> Span:
        """The span of `low` alone where the condition holds."""
        return self._replace(high=jnp.where(condition, self.low + 1, self.high))

    def moved(self, tried: Span, is_low: jax.Array, is_high: jax.Array) -> Span:
        """With the pivot `tried` (both of its ends) as the low or as the high end."""
        is_low &= tried.low >= self.low
        is_high &= (tried.high > self.low) & (tried.high < self.high)
        low = [jnp.where(is_low, new, old) for new, old in zip(tried[::2], self[::2], strict=True)]
        high = [
            jnp.where(is_high, new, old) for new, old in zip(tried[1::2], self[1::2], strict=True)
        ]
        return Span(*(end for pair in zip(low, high, strict=True) for end in pair))


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(number: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(number, jnp.int32)


def _pairwise(terms: list[jax.Array]) -> jax.Array:
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _add(total: Sum, x: jax.Array) -> Sum:
    """The sum and one more term, without loss (Knuth's TwoSum)."""
    high, low = total
    new = high + x
    part = new - high
    return new, low + ((high - (new - part)) + (x - part))


def _across(total: Sum) -> Sum:
    """The sum over all lanes: scalars.

    The upper part of each lane is a multiple of 2^-15 times a power of two above all of them, so
    that 512 of them add up without rounding (Rump, Ogita and Oishi, 2008).
    """
    high, low = total
    power = _float(((_bits(high.max()) >> EXPONENT) + 1) << EXPONENT)
    shift = 384.0 * power  # its last place is 2^-15 * power
    upper = (high + shift) - shift
    return upper.sum(), ((high - upper) + low).sum()


def _pivots(floor: Span, border: Span, is_first: jax.Array) -> list[jax.Array]:
    """Bits of the bounds to try: with every second power of two, the row's least bound."""
    alone = (~(floor.is_open & border.is_open)).astype(jnp.int32)
    pivots = list[jax.Array]()
    for n in range(HALF):
        for first, second, back in ((floor, border, 1), (border, floor, 0)):
            low = jnp.where(first.is_open, first.low, second.low)
            width = jnp.where(first.is_open, first.high, second.high) - low
            # sixteenths: where one bound is found the other has the pivots of both
            part = 2 * (n + 1) - back * alone
            inner = low + (width >> 4) * part + (((width & 15) * part) >> 4)
            power = len(pivots) - 1
            start = floor.low if power < 0 else ONE_BITS - (2 * power << EXPONENT)
            pivots.append(jnp.where(is_first, start, inner))
    return pivots


def _kernel(
    weights: Any,  # float32[R, V]
    top_k_ref: Any,  # int32[R]
    top_p_ref: Any,  # float32[R]
    min_p_ref: Any,  # float32[R]
    out: Any,  # float32[R]
    listed: Any,  # float32[R, steps * GROUP * LANES]
) -> None:
    row, vocab = pl.program_id(0), weights.shape[1]
    lane = jnp.arange(LANES)
    steps = -(-vocab // (GROUP * LANES))
    # of a plain sum: of a lane, of a group in it, across the lanes; of either side of a comparison
    margin = 4 * (steps + GROUP + math.log2(LANES)) * 2.0**-24
    top_k, top_p = top_k_ref[row], top_p_ref[row]
    wanted = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab + 1)
    no_ints, no_floats = jnp.zeros(LANES, jnp.int32), jnp.zeros(LANES, jnp.float32)

    def tiles(step: jax.Array) -> list[jax.Array]:
        places = [(step * GROUP + n) * LANES + lane for n in range(GROUP)]
        return [plt.load(weights.at[row, p], mask=p < vocab, other=ABSENT) for p in places]

    def measured(pivots: list[jax.Array]) -> list[Span]:
        """One read: the number and the mass of the tokens that reach each pivot."""
        bounds = [_float(pivot) for pivot in pivots]

        def step(index: jax.Array, sums: tuple[list[jax.Array], ...]) -> tuple[Any, ...]:
            parts = tiles(index)
            counts, masses = list(sums[0]), list(sums[1])
            for n, bound in enumerate(bounds):
                # 1.0 or 0.0: one comparison, one addition and one fused multiply-add a weight
                reached = [(part >= bound).astype(jnp.float32) for part in parts]
                counts[n] += sum(reached)
                masses[n] += sum(hit * x for hit, x in zip(reached, parts))
            return counts, masses

        start = ([no_floats] * PIVOTS, [no_floats] * PIVOTS)
        counts, masses = lax.fori_loop(0, steps, step, start)
        found = []
        for pivot, lane_counts, lane_masses in zip(pivots, counts, masses, strict=True):
            count, mass = lane_counts.astype(jnp.int32).sum(), lane_masses.sum()
            found.append(Span(pivot, pivot, count, count, mass, mass))
        return found

    def narrowed(state: tuple[jax.Array, Span, Span]) -> tuple[jax.Array, Span, Span]:
        done, floor, border = state
        tried = measured(_pivots(floor, border, done == 0))
        sought = floor.is_open
        for pivot in tried:
            enough = pivot.low_count >= wanted
            same = pivot.low == floor.low
            floor = floor.moved(pivot, same | (sought & enough), sought & ~enough)
        # no more tokens than top_k reach the low end: it is a floor
        floor = floor.closed_where(floor.low_count <= wanted)
        least = jnp.where(floor.is_open, floor.high_mass, floor.low_mass)
        enough_for_all = top_p * floor.low_mass * (1.0 + margin)
        too_little_for_any = top_p * least * (1.0 - margin)
        sought = border.is_open
        for pivot in tried:
            # nothing below the floor is kept
            is_low = (pivot.low <= floor.low) | (pivot.low_mass >= enough_for_all)
            is_high = pivot.high_mass < too_little_for_any
            border = border.moved(pivot, sought & is_low, sought & is_high)
        return done + 1, floor, border

    start = _bits(jnp.maximum(min_p_ref[row], 0.0))
    span = Span(
        start, jnp.int32(ONE_BITS + 1), jnp.int32(vocab), jnp.int32(0),
        jnp.float32(math.inf), jnp.float32(0.0),
    )  # fmt: skip
    floor, border = span.closed_where(wanted > vocab), span.closed_where(top_p >= 1.0)
    _, floor, border = lax.while_loop(
        lambda state: (state[0] < COUNTS) & (state[1].between + state[2].between > LISTED),
        narrowed,
        (jnp.int32(0), floor, border),
    )

    floor_end = _float(jnp.where(floor.is_open, floor.high, floor.low))
    border_end = _float(border.high)
    # a span that is closed holds no token
    floor_low = jnp.where(floor.is_open, _float(floor.low), floor_end)
    border_low = jnp.where(border.is_open, _float(border.low), border_end)

    def listing(index: jax.Array, state: tuple[jax.Array, Sum, Sum]) -> tuple[jax.Array, Sum, Sum]:
        held, kept, above = state
        parts = tiles(index)
        for x in parts:
            inside = ((x >= floor_low) & (x < floor_end)) | ((x >= border_low) & (x < border_end))
            inside &= x > 0.0
            plt.store(listed.at[row, held * LANES + lane], x, mask=inside)
            held += inside.astype(jnp.int32)
        kept = _add(kept, _pairwise([jnp.where(x >= floor_end, x, 0.0) for x in parts]))
        above = _add(above, _pairwise([jnp.where(x >= border_end, x, 0.0) for x in parts]))
        return held, kept, above

    none = (no_floats, no_floats)
    is_open = floor.is_open | border.is_open
    held, kept, above = lax.fori_loop(
        0, is_open.astype(jnp.int32) * steps, listing, (no_ints, none, none)
    )
    length = held.max()

    def over_list(low: jax.Array, end: jax.Array, add: Callable[..., Any], total: Any) -> Any:
        """`total` and the tokens of the list from low to below end."""

        def one(index: jax.Array, total: Any) -> Any:
            place = listed.at[row, index * LANES + lane]
            x = plt.load(place, mask=index < held, other=ABSENT)
            return add(total, x, (x >= low) & (x < end))

        return lax.fori_loop(0, length, one, total)

    def halved(span: Span, reaches: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Bits of the largest bound from span.low up that enough tokens reach."""

        def step(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = low + ((high - low) >> 1)
            enough = reaches(_float(middle))
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        ends = lax.while_loop(lambda ends: ends[1] - ends[0] > 1, step, (span.low, span.high))
        return ends[0]

    def add_count(total: jax.Array, x: jax.Array, hit: jax.Array) -> jax.Array:
        return total + hit.astype(jnp.int32)

    def add_mass(total: Sum, x: jax.Array, hit: jax.Array) -> Sum:
        return _add(total, jnp.where(hit, x, 0.0))

    def counts(bound: jax.Array) -> jax.Array:
        found = over_list(bound, floor_end, add_count, no_ints).sum()
        return floor.high_count + found >= wanted

    lowest = halved(floor, counts)
    high, low = _across(over_list(_float(lowest), floor_end, add_mass, kept))

    def weighs(bound: jax.Array) -> jax.Array:
        mass_high, mass_low = _across(over_list(bound, border_end, add_mass, above))
        return (mass_high - top_p * high) + (mass_low - top_p * low) >= 0.0

    out[row] = _float(jnp.maximum(lowest, halved(border, weighs)))


@functools.partial(jax.jit, static_argnames="interpret")
def kept_threshold(
    weights: jax.Array,  # float32[R, V]
    top_k: jax.Array,  # int32[R]
    top_p: jax.Array,  # float32[R]
    min_p: jax.Array,  # float32[R]
    *,
    interpret: bool | None = None,
) -> jax.Array:  # float32[R]
    """The bounds of `pallas_kernels.kept_threshold` on an NVIDIA GPU.

    Args:
        interpret: True runs Pallas' interpreter; None compiles for the GPU.

    Raises:
        KernelError: there are more weights than the kernel can address.
    """
    rows, vocab = weights.shape
    room = pl.cdiv(vocab, GROUP * LANES) * GROUP * LANES
    if rows * room >= 2**31:
        raise KernelError("weights.shape", weights.shape, "fewer than 2^31 weights, rows padded")
    bounds, _ = pl.pallas_call(
        _kernel,
        grid=(rows,),
        out_shape=(
            result_like(weights, (rows,), jnp.float32),
            result_like(weights, (rows, room), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpreter.is_used_by_triton(interpret),
        name="kept_threshold",
    )(weights, top_k, top_p, min_p)
    return bounds
