"""kept_threshold for NVIDIA GPUs, by Pallas' Triton backend: one thread block a row, or several.

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

Rows that are so few that most of the chip would wait are divided among PIECES thread blocks each:
every count is a kernel, and so are the listing and the halving. Each block begins by adding up what
those of the kernels before have found. A kernel with nothing to do ends.

Exactness. Counts are integers. Sums that decide while counting are plain float32, and an end moves
only where it would at any sums within their bound of error. Sums that decide in the end are exact
but for the sums of GROUP = 8 weights (3 roundings), the product with top_p and one difference: 4
roundings of the total, 3 of the mass, 2^-24 of either each, together less than 5e-7 of the total.
Every sum has one fixed order, which depends on V alone and on whether rows are divided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.multiprocessors import multiprocessors

WARPS = 16
LANES = 32 * WARPS  # a lane is a thread: what a lane has put on the list, it alone reads again
GROUP = 8  # loads of a lane that are under way together
PIECES = 8  # of a row that is divided
COUNTS = 3
PIVOTS = 14  # half of them for each of the two bounds
PLACES = 16  # of an array of the pivots: a power of two
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
        """With the highest of the pivots `tried` (both ends of each, [PLACES]) that may be the low
        end as that, and the lowest that may be the high end."""
        place = jnp.arange(PLACES)
        is_low &= (place < PIVOTS) & (tried.low >= self.low)
        low = jnp.where(is_low, tried.low, self.low).max()
        is_high &= (place < PIVOTS) & (tried.high > low) & (tried.high < self.high)
        high = jnp.where(is_high, tried.high, self.high).min()

        def known(at: jax.Array, number: jax.Array, old: jax.Array) -> jax.Array:
            """What the first of some pivots is known by, or what was known."""
            first = jnp.where(at, place, PLACES).min()
            found = jnp.where(place == first, number, jnp.zeros_like(number)).sum()
            return jnp.where(first < PLACES, found, old)

        at_low, at_high = is_low & (tried.low == low), is_high & (tried.high == high)
        return Span(
            low,
            high,
            known(at_low, tried.low_count, self.low_count),
            known(at_high, tried.high_count, self.high_count),
            known(at_low, tried.low_mass, self.low_mass),
            known(at_high, tried.high_mass, self.high_mass),
        )


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


def _pivots(floor: Span, border: Span, is_first: jax.Array | bool, index: Any) -> jax.Array:
    """Bits of the bounds to try, by their indices: with every second power of two, the row's least
    bound. Even ones are the floor's, odd ones the border's."""
    is_even, number = index & 1 == 0, (index >> 1) + 1
    alone = (~(floor.is_open & border.is_open)).astype(jnp.int32)

    def ends(first: Span, second: Span) -> tuple[jax.Array, jax.Array]:
        low = jnp.where(first.is_open, first.low, second.low)
        return low, jnp.where(first.is_open, first.high, second.high) - low

    both = zip(ends(floor, border), ends(border, floor), strict=True)
    low, width = (jnp.where(is_even, *of_both) for of_both in both)
    # sixteenths: where one bound is found the other has the pivots of both
    part = 2 * number - jnp.where(is_even, alone, 0)
    inner = low + (width >> 4) * part + (((width & 15) * part) >> 4)
    power = ONE_BITS - (index - 1) * (2 << EXPONENT)
    return jnp.where(is_first, jnp.where(index == 0, floor.low, power), inner)


def _side_by_side(numbers: Sequence[jax.Array]) -> jax.Array:
    """Scalars as an array [PLACES], zeros behind them."""
    place, array = jnp.arange(PLACES), jnp.zeros(PLACES, numbers[0].dtype)
    for n, number in enumerate(numbers):
        array = jnp.where(place == n, number, array)
    return array


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens of a row that a program reads: every so many tiles of LANES.

    Attributes:
        weights: float32[R, V].
        row: index of the row.
        piece: index of the part.
        pieces: number of parts.
    """

    weights: Any
    row: Any
    piece: Any = 0
    pieces: int = 1

    @property
    def steps(self) -> int:
        """Groups of tiles of a part."""
        return -(-self.weights.shape[1] // (self.pieces * GROUP * LANES))

    def place(self, tile: Any) -> jax.Array:
        """Where a tile of the part lies in the row."""
        return (tile * self.pieces + self.piece) * LANES + jnp.arange(LANES)

    def tiles(self, step: jax.Array) -> list[jax.Array]:
        """The weights of a group, ABSENT behind the end of the row."""
        places = [self.place(step * GROUP + n) for n in range(GROUP)]
        vocab = self.weights.shape[1]
        refs = [(self.weights.at[self.row, place], place < vocab) for place in places]
        return [plt.load(ref, mask=mask, other=ABSENT) for ref, mask in refs]

    def measured(self, floor: Span, border: Span, is_first: jax.Array | bool) -> Span:
        """One read: the number and the mass of the tokens that reach each pivot, [PLACES]."""
        pivots = [_pivots(floor, border, is_first, n) for n in range(PIVOTS)]
        bounds = [_float(pivot) for pivot in pivots]

        def step(index: jax.Array, sums: tuple[list[jax.Array], ...]) -> tuple[Any, ...]:
            parts = self.tiles(index)
            counts, masses = list(sums[0]), list(sums[1])
            for n, bound in enumerate(bounds):
                # 1.0 or 0.0: one comparison, one addition and one fused multiply-add a weight
                reached = [(part >= bound).astype(jnp.float32) for part in parts]
                counts[n] += sum(reached)
                masses[n] += sum(hit * x for hit, x in zip(reached, parts))
            return counts, masses

        none = [jnp.zeros(LANES, jnp.float32)] * PIVOTS
        counts, masses = lax.fori_loop(0, self.steps, step, (none, none))
        return _tried(
            _side_by_side(pivots),
            _side_by_side([count.astype(jnp.int32).sum() for count in counts]),
            _side_by_side([mass.sum() for mass in masses]),
        )


class _Search(NamedTuple):
    """What is sought in a row, and what is known of it.

    Attributes:
        wanted: tokens that reach the floor; more than there are where top-k is off.
        top_p: share of the floor's mass.
        margin: of either side of a comparison of plain sums.
        floor, border: the spans.
    """

    wanted: jax.Array
    top_p: jax.Array
    margin: float
    floor: Span
    border: Span

    @staticmethod
    def of(part: _Part, top_k: Any, top_p: Any, min_p: Any) -> _Search:
        """At the beginning, by the references to the filters of all rows."""
        vocab, row = part.weights.shape[1], part.row
        # of a plain sum: of a lane, of a group in it, across the lanes, of the pieces
        terms = part.steps + GROUP + math.log2(LANES) + part.pieces - 1
        wanted = jnp.where((top_k[row] > 0) & (top_k[row] < vocab), top_k[row], vocab + 1)
        start = _bits(jnp.maximum(min_p[row], 0.0))
        span = Span(
            start, jnp.int32(ONE_BITS + 1), jnp.int32(vocab), jnp.int32(0),
            jnp.float32(math.inf), jnp.float32(0.0),
        )  # fmt: skip
        floor, border = span.closed_where(wanted > vocab), span.closed_where(top_p[row] >= 1.0)
        return _Search(wanted, top_p[row], 4 * terms * 2.0**-24, floor, border)

    @property
    def counts_on(self) -> jax.Array:
        """Whether so many tokens are left that one more read pays."""
        return self.floor.between + self.border.between > LISTED

    def narrowed(self, tried: Span) -> _Search:
        """With what is known of the pivots, [PLACES]."""
        floor, sought = self.floor, self.floor.is_open
        enough = tried.low_count >= self.wanted
        is_low = (tried.low == floor.low) | (sought & enough)
        floor = floor.moved(tried, is_low, sought & ~enough)
        # no more tokens than top_k reach the low end: it is a floor
        floor = floor.closed_where(floor.low_count <= self.wanted)
        least = jnp.where(floor.is_open, floor.high_mass, floor.low_mass)
        enough_for_all = self.top_p * floor.low_mass * (1.0 + self.margin)
        too_little_for_any = self.top_p * least * (1.0 - self.margin)
        sought = self.border.is_open
        # nothing below the floor is kept
        is_low = (tried.low <= floor.low) | (tried.low_mass >= enough_for_all)
        is_high = tried.high_mass < too_little_for_any
        border = self.border.moved(tried, sought & is_low, sought & is_high)
        return self._replace(floor=floor, border=border)

    def after(self, counted: Sequence[tuple[Any, Any]], row: Any) -> _Search:
        """With what the kernels that counted have left: [R, PIVOTS, PIECES] of each piece."""
        search, place, sides = self, jnp.arange(PLACES), (PLACES, PIECES)
        pivot = lax.broadcast_in_dim(jnp.minimum(place, PIVOTS - 1), sides, [0])
        index = (row, pivot, lax.broadcast_in_dim(jnp.arange(PIECES), sides, [1]))
        for number, found in enumerate(counted):
            pivots = _pivots(search.floor, search.border, number == 0, place)
            sums = (plt.load(each.at[index]).sum(axis=1) for each in found)
            moved, counts_on = search.narrowed(_tried(pivots, *sums)), search.counts_on
            floor, border = (
                Span(*(jnp.where(counts_on, *ends) for ends in zip(new, old, strict=True)))
                for new, old in ((moved.floor, search.floor), (moved.border, search.border))
            )
            search = search._replace(floor=floor, border=border)
        return search

    @property
    def listed(self) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """From where to below where the tokens of the floor's and the border's span are; a span
        that is closed holds none."""
        floor_end = _float(jnp.where(self.floor.is_open, self.floor.high, self.floor.low))
        border_end = _float(self.border.high)
        floor_low = jnp.where(self.floor.is_open, _float(self.floor.low), floor_end)
        border_low = jnp.where(self.border.is_open, _float(self.border.low), border_end)
        return (floor_low, floor_end), (border_low, border_end)


class _Listed(NamedTuple):
    """What a lane has put on the list, and its share of the mass above.

    Attributes:
        held: int32[LANES], tokens on the list.
        kept, above: of the tokens from the floor's and from the border's end up.
    """

    held: jax.Array
    kept: Sum
    above: Sum


def _tried(pivot: jax.Array, count: jax.Array, mass: jax.Array) -> Span:
    return Span(pivot, pivot, count, count, mass, mass)


def _list(part: _Part, search: _Search, listed: Any) -> _Listed:
    """One read, where anything is left to find: puts the tokens of the spans on the list."""
    (floor_low, floor_end), (border_low, border_end) = search.listed

    def step(index: jax.Array, state: _Listed) -> _Listed:
        held, kept, above = state
        parts = part.tiles(index)
        for x in parts:
            inside = ((x >= floor_low) & (x < floor_end)) | ((x >= border_low) & (x < border_end))
            inside &= x > 0.0
            plt.store(listed.at[part.row, part.place(held)], x, mask=inside)
            held += inside.astype(jnp.int32)
        kept = _add(kept, _pairwise([jnp.where(x >= floor_end, x, 0.0) for x in parts]))
        above = _add(above, _pairwise([jnp.where(x >= border_end, x, 0.0) for x in parts]))
        return _Listed(held, kept, above)

    no_ints, no_floats = jnp.zeros(LANES, jnp.int32), jnp.zeros(LANES, jnp.float32)
    none = _Listed(no_ints, (no_floats, no_floats), (no_floats, no_floats))
    is_open = search.floor.is_open | search.border.is_open
    return lax.fori_loop(0, is_open.astype(jnp.int32) * part.steps, step, none)


def _bound(parts: list[_Part], search: _Search, found: list[_Listed], listed: Any) -> jax.Array:
    """The row's bound, by halving on the lists of its parts."""
    floor, border = search.floor, search.border
    (_, floor_end), (_, border_end) = search.listed
    kept, above = found[0].kept, found[0].above
    for one in found[1:]:
        kept, above = (
            (sums[0], sums[1] + more[1])
            for total, more in ((kept, one.kept), (above, one.above))
            for sums in (_add(total, more[0]),)
        )
    held = [one.held for one in found]
    length = functools.reduce(jnp.maximum, held).max()

    def over_list(low: jax.Array, end: jax.Array, add: Callable[..., Any], total: Any) -> Any:
        """`total` and the tokens of the list from low to below end."""

        def one(index: jax.Array, total: Any) -> Any:
            places = [listed.at[part.row, part.place(index)] for part in parts]
            tokens = [
                plt.load(place, mask=index < number, other=ABSENT)
                for place, number in zip(places, held, strict=True)
            ]
            for x in tokens:
                total = add(total, x, (x >= low) & (x < end))
            return total

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
        none = jnp.zeros(LANES, jnp.int32)
        more = over_list(bound, floor_end, add_count, none).sum()
        return floor.high_count + more >= search.wanted

    lowest = halved(floor, counts)
    high, low = _across(over_list(_float(lowest), floor_end, add_mass, kept))

    def weighs(bound: jax.Array) -> jax.Array:
        mass_high, mass_low = _across(over_list(bound, border_end, add_mass, above))
        return (mass_high - search.top_p * high) + (mass_low - search.top_p * low) >= 0.0

    return _float(jnp.maximum(lowest, halved(border, weighs)))


def _whole_kernel(
    weights: Any,  # float32[R, V]
    top_k: Any,  # int32[R]
    top_p: Any,  # float32[R]
    min_p: Any,  # float32[R]
    out: Any,  # float32[R]
    listed: Any,  # float32[R, steps * GROUP * LANES]
) -> None:
    part = _Part(weights, pl.program_id(0))

    def counted(state: tuple[jax.Array, Span, Span]) -> tuple[jax.Array, Span, Span]:
        done, floor, border = state
        tried = part.measured(floor, border, done == 0)
        found = search._replace(floor=floor, border=border).narrowed(tried)
        return done + 1, found.floor, found.border

    search = _Search.of(part, top_k, top_p, min_p)
    _, floor, border = lax.while_loop(
        lambda state: (state[0] < COUNTS) & (state[1].between + state[2].between > LISTED),
        counted,
        (jnp.int32(0), search.floor, search.border),
    )
    search = search._replace(floor=floor, border=border)
    out[part.row] = _bound([part], search, [_list(part, search, listed)], listed)


def _count_kernel(weights: Any, top_k: Any, top_p: Any, min_p: Any, *refs: Any) -> None:
    """`refs`: what was counted before, and int32 and float32[R, PIVOTS, PIECES] for this time."""
    *earlier, counts, masses = refs
    part = _Part(weights, pl.program_id(0), pl.program_id(1), PIECES)
    search = _Search.of(part, top_k, top_p, min_p).after(_pairs(earlier), part.row)

    @pl.when(search.counts_on)
    def _() -> None:
        tried, place = part.measured(search.floor, search.border, not earlier), jnp.arange(PLACES)
        for ref, sums in ((counts, tried.low_count), (masses, tried.low_mass)):
            piece = jnp.full_like(place, part.piece)
            plt.store(ref.at[part.row, place, piece], sums, mask=place < PIVOTS)


def _list_kernel(weights: Any, top_k: Any, top_p: Any, min_p: Any, *refs: Any) -> None:
    """`refs`: what was counted, and for int32[R, PIECES, LANES] numbers of listed tokens,
    float32[R, 4, PIECES, LANES] sums and the list, float32[R, steps * PIECES * GROUP * LANES]."""
    *counted, held, sums, listed = refs
    part = _Part(weights, pl.program_id(0), pl.program_id(1), PIECES)
    search = _Search.of(part, top_k, top_p, min_p).after(_pairs(counted), part.row)
    found, lane = _list(part, search, listed), jnp.arange(LANES)
    plt.store(held.at[part.row, part.piece, lane], found.held)
    for n, number in enumerate((*found.kept, *found.above)):
        plt.store(sums.at[part.row, n, part.piece, lane], number)


def _settle_kernel(weights: Any, top_k: Any, top_p: Any, min_p: Any, *refs: Any) -> None:
    """`refs`: what the other kernels left, and float32[R] for the bounds."""
    *counted, held, sums, listed, out = refs
    row, lane = pl.program_id(0), jnp.arange(LANES)
    parts = [_Part(weights, row, piece, PIECES) for piece in range(PIECES)]
    search = _Search.of(parts[0], top_k, top_p, min_p).after(_pairs(counted), row)
    found = []
    for piece in range(PIECES):
        a, b, c, d = (plt.load(sums.at[row, n, piece, lane]) for n in range(4))
        found.append(_Listed(plt.load(held.at[row, piece, lane]), (a, b), (c, d)))
    out[row] = _bound(parts, search, found, listed)


def _pairs(refs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Counts and masses of each time."""
    return list(zip(refs[::2], refs[1::2], strict=True))


def is_divided(rows: int) -> bool:
    """Whether so few rows are divided, on the GPU that is traced for."""
    return rows * PIECES <= multiprocessors()


@functools.partial(jax.jit, static_argnames=("divided", "interpret"))
def kept_threshold(
    weights: jax.Array,  # float32[R, V]
    top_k: jax.Array,  # int32[R]
    top_p: jax.Array,  # float32[R]
    min_p: jax.Array,  # float32[R]
    *,
    divided: bool | None = None,
    interpret: bool | None = None,
) -> jax.Array:  # float32[R]
    """The bounds of `pallas_kernels.kept_threshold` on an NVIDIA GPU.

    Args:
        divided: whether a row is divided among thread blocks; None: `is_divided`.
        interpret: True runs Pallas' interpreter; None compiles for the GPU.

    Raises:
        KernelError: there are more weights than the kernel can address.
    """
    rows, vocab = weights.shape
    divided = is_divided(rows) if divided is None else divided
    tile = GROUP * LANES * (PIECES if divided else 1)
    room = pl.cdiv(vocab, tile) * tile
    if rows * room >= 2**31:
        raise KernelError("weights.shape", weights.shape, "fewer than 2^31 weights, rows padded")

    def call(kernel: Any, grid: tuple[int, ...], given: list[jax.Array], *results: Any) -> Any:
        shapes = [result_like(weights, (rows, *shape), dtype) for shape, dtype in results]
        return pl.pallas_call(
            kernel,
            grid=(rows, *grid),
            out_shape=shapes,
            compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=interpreter.is_used_by_triton(interpret),
            name="kept_threshold",
        )(weights, top_k, top_p, min_p, *given)

    bounds, ints, floats = ((), jnp.float32), jnp.int32, jnp.float32
    the_list = ((room,), floats)
    if not divided:
        return call(_whole_kernel, (), [], bounds, the_list)[0]
    found: list[jax.Array] = []
    for _ in range(COUNTS):
        sums = [((PIVOTS, PIECES), dtype) for dtype in (ints, floats)]
        found += call(_count_kernel, (PIECES,), found, *sums)
    lanes = (PIECES, LANES)
    found += call(_list_kernel, (PIECES,), found, (lanes, ints), ((4, *lanes), floats), the_list)
    return call(_settle_kernel, (), found, bounds)[0]
