"""Divides the tokens of a decode batch among thread blocks, on the device, once a step.

A row is cut into pieces by its own length alone, so what its result is rounded to never depends on
the batch. Thread blocks are persistent: a team of them, one for each group of query heads, walks
its share of the pieces, so neighbours read adjacent memory at the same time. Longer pieces are
shared out before shorter ones, each kind to the teams that have least to do so far, as water fills
a vessel. The layers share the list.

Three small kernels of Pallas' Triton backend make it, each of what the one before has left in
memory: the rows in order of the length of their pieces, the shares of the teams, the pieces. All
numbers are integers, so no order of a sum can change the list.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.paged_attention.queries import key_range
from pallas_kernels.paged_attention.triton.block import padded

PIECE_COST = 1  # what begins and ends a piece takes, in steps of keys; by reasoning
ROWS, OTHERS = 16, 64  # a program of the first kernel ranks so many rows among so many at a time
ITEMS = 128  # pieces of a program of the last kernel
KINDS = 3  # of pieces, see `_bounds`
MOST = 2**30  # above every cost


class Piece(NamedTuple):
    """A run of steps of one row: a row of the work table, in this order; int32."""

    slot: jax.Array
    number: jax.Array  # of the piece in its row
    pieces: jax.Array  # of the row: alone, it is the whole result
    begin: jax.Array  # first step, counted from token 0
    steps: jax.Array
    first_key: jax.Array  # that a query of the row sees
    length: jax.Array  # end of the keys that a query of the row sees
    queries: jax.Array  # of the row


class Share(NamedTuple):
    """The walk of a team: a row of the table of teams, in this order; int32."""

    first: jax.Array  # piece
    last: jax.Array  # piece behind its last
    steps: jax.Array  # of all its pieces


class Work(NamedTuple):
    """The work of one call."""

    pieces: jax.Array  # int32[T, 8], `Piece`s
    teams: jax.Array  # int32[teams, 3], `Share`s
    rows: jax.Array  # int32[B], pieces of each row


class Cut(NamedTuple):
    """The cuts of rows; static, and the same for every batch.

    Attributes:
        block_tokens: keys a step.
        steps: of a piece, as long as a row has no more than `most` of them.
        most: pieces a row.
    """

    block_tokens: int
    steps: int
    most: int

    def most_pieces(self, tokens: int) -> int:
        """Pieces of the most cut row of up to so many tokens."""
        # a window may begin inside a step and so touch one more
        steps = -(-tokens // self.block_tokens) + 1
        return min(self.most, -(-steps // self.steps))


class Row(NamedTuple):
    """A row of the batch and where it stands among all; int32 each, a row of the sorted table."""

    slot: jax.Array
    first: jax.Array  # step, counted from token 0
    steps: jax.Array
    share: jax.Array  # steps of each piece but the last, which may have fewer; at least 1
    pieces: jax.Array  # at least 1
    first_key: jax.Array
    length: jax.Array
    queries: jax.Array
    end: jax.Array  # pieces of the rows up to this one
    before: jax.Array  # what the pieces of the rows before this one cost

    @property
    def size(self) -> jax.Array:
        """Steps of its longest piece."""
        return jnp.minimum(self.share, self.steps)

    @property
    def cost(self) -> jax.Array:
        """Of all its pieces."""
        return self.steps + PIECE_COST * self.pieces


class Batch(NamedTuple):
    """What the first kernel knows of the batch beside its lengths; static.

    Attributes:
        slots: rows.
        queries: of a row, at most.
        window: as of the attention.
        tokens: that a row of the page table reaches: no row is longer.
        cut: where rows are cut.
    """

    slots: int
    queries: int
    window: int | None
    tokens: int
    cut: Cut

    @property
    def most_cost(self) -> int:
        """A bound of what all pieces cost."""
        return self.slots * (self.tokens // self.cut.block_tokens + 2 + PIECE_COST * self.cut.most)


def divide(
    kv_lens: jax.Array,  # int32[B]
    query_lens: jax.Array | None,  # int32[B]
    batch: Batch,
    *,
    most_pieces: int,
    teams: int,
    interpret: Any = None,
) -> Work:
    """The pieces of all rows, those of the most steps first, and the share of each team.

    A row that sees no key is a piece without steps. Places behind the last piece are zeros.

    Args:
        kv_lens, query_lens: as of `paged_decode_attention`; None: every row has `batch.queries`.
        batch: what is known of it.
        most_pieces: `cut.most_pieces` of the longest row.
        teams: number of teams that share the pieces.
        interpret: None compiles for the GPU.
    """
    slots, items = batch.slots, batch.slots * most_pieces

    def call(
        kernel: Any, name: str, programs: int, shapes: list[tuple[int, ...]], *operands: Any
    ) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(programs,),
            out_shape=[result_like(kv_lens, shape, jnp.int32) for shape in shapes],
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpreter.is_used_by_triton(interpret),
            name=name,
        )(*operands)

    lengths = (kv_lens,) if query_lens is None else (kv_lens, query_lens)
    rows, counts = call(
        functools.partial(_sort_rows, batch=batch),
        "decode_rows",
        pl.cdiv(slots, ROWS),
        [(len(Row._fields), slots), (slots,)],
        *lengths,
    )
    shares, ends, places = call(
        functools.partial(_share_out, batch=batch),
        "decode_teams",
        1,
        [(teams, len(Share._fields)), (KINDS, teams), (KINDS, teams)],
        rows,
    )
    (pieces,) = call(
        functools.partial(_list_pieces, cut=batch.cut),
        "decode_pieces",
        pl.cdiv(items, ITEMS),
        [(items, len(Piece._fields))],
        rows,
        ends,
        places,
    )
    return Work(pieces, shares, counts)


def _bounds(cut: Cut) -> tuple[int, ...]:
    """Pieces of more steps than each are a kind, if they are not of a kind before."""
    return cut.steps, cut.steps // 2, -1


def _ceil_div(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    return lax.div(numerator + (denominator - 1), denominator)


def _sort_rows(*references: Any, batch: Batch) -> None:
    """Some rows of the batch into their places by the length of their pieces, longest first."""
    *lengths, table, counts = references
    cut, slots = batch.cut, batch.slots
    zero = jnp.int32(0)

    def row(slot: jax.Array) -> tuple[Row, jax.Array]:
        exists = slot < slots
        held = [plt.load(ref.at[slot], mask=exists, other=zero) for ref in lengths]
        kv_lens = jnp.minimum(held[0], batch.tokens)
        query_lens = held[1] if len(held) > 1 else jnp.full_like(slot, batch.queries)
        low, high = key_range(kv_lens, query_lens, batch.queries, batch.window)
        block = jnp.full_like(slot, cut.block_tokens)
        first = lax.div(low, block)
        steps = jnp.maximum(_ceil_div(high, block) - first, 0)
        share = jnp.maximum(cut.steps, _ceil_div(steps, jnp.full_like(steps, cut.most)))
        share = _ceil_div(steps, jnp.maximum(_ceil_div(steps, share), 1))  # of equal pieces
        share = jnp.maximum(share, 1)
        pieces = jnp.maximum(_ceil_div(steps, share), 1)
        return Row(slot, first, steps, share, pieces, low, high, query_lens, pieces, slot), exists

    own, exists = row(pl.program_id(0) * ROWS + jnp.arange(ROWS))

    def count(step: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        other, is_row = row(step * OTHERS + jnp.arange(OTHERS))
        size, own_size = other.size[None], own.size[:, None]
        ahead = (size > own_size) | ((size == own_size) & (other.slot[None] < own.slot[:, None]))
        ahead &= is_row[None]
        counted = (jnp.ones_like(other.slot), other.pieces, other.cost)
        return tuple(
            total + jnp.where(ahead, of_other[None], 0).sum(axis=1)
            for total, of_other in zip(found, counted, strict=True)
        )

    nothing = (jnp.zeros_like(own.slot),) * 3
    rank, pieces, cost = lax.fori_loop(0, pl.cdiv(slots, OTHERS), count, nothing)
    placed = own._replace(end=pieces + own.pieces, before=cost)
    for field, value in enumerate(placed):
        plt.store(table.at[field, rank], value, mask=exists)
    plt.store(counts.at[own.slot], own.pieces, mask=exists)


def _field(table: Any, field: str, place: jax.Array, exists: jax.Array | None = None) -> jax.Array:
    """A field of the sorted rows in some places, 0 where there is none."""
    ref = table.at[Row._fields.index(field), place]
    if exists is None:
        return plt.load(ref)
    return plt.load(ref, mask=exists, other=jnp.int32(0))


def _count(table: Any, line: int, key: jax.Array, is_before: Any) -> jax.Array:
    """How many numbers of a line, which ascend, lie before a key: a search by halves."""
    width = table.shape[1]
    bits = width.bit_length()

    def halve(bit: jax.Array, found: jax.Array) -> jax.Array:
        probe = found + _step(bits, bit)
        exists = probe <= width
        held = plt.load(table.at[line, probe - 1], mask=exists, other=jnp.int32(0))
        return jnp.where(exists & is_before(held, key), probe, found)

    return lax.fori_loop(0, bits, halve, jnp.zeros_like(key))


def _step(bits: int, bit: jax.Array) -> jax.Array:
    """The steps of a search by halves among numbers of so many bits: the highest bit first."""
    return lax.shift_left(jnp.int32(1), bits - 1 - bit)


def _level(loads: jax.Array, amount: jax.Array, most: int) -> jax.Array:
    """The least level at which loads that are filled up to it take an amount; both up to `most`."""
    bits = most.bit_length()

    def halve(bit: jax.Array, found: jax.Array) -> jax.Array:
        probe = found + _step(bits, bit)
        taken = jnp.maximum(probe - 1 - loads, 0).sum()
        return jnp.where(taken < amount, probe, found)

    return lax.fori_loop(0, bits, halve, jnp.int32(0))


def _share_out(rows: Any, shares: Any, ends: Any, places: Any, *, batch: Batch) -> None:
    """The pieces of each team: of every kind a run of the sorted ones.

    Args:
        rows: the sorted rows.
        shares: int32[teams, 3], those without a piece last: the first of the grid have a
            multiprocessor for themselves.
        ends: int32[KINDS, teams], the end of a team's run of a kind.
        places: int32[KINDS, teams], what is added to the number of a piece of a run for its place
            when those of a team follow one another.
    """
    cut, teams, slots = batch.cut, shares.shape[0], batch.slots
    team, slot = jnp.arange(padded(teams)), jnp.arange(padded(slots))
    is_team, is_row = team < teams, slot < slots
    fields = {name: _field(rows, name, slot, is_row) for name in ("share", "steps", "pieces")}
    share, steps, pieces = fields["share"], fields["steps"], fields["pieces"]
    size, cost = jnp.where(is_row, jnp.minimum(share, steps), -1), steps + PIECE_COST * pieces

    def reach(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pieces that begin before a cost, and the cost where they end."""
        row = _count(rows, Row._fields.index("before"), key, lambda held, key: held < key) - 1
        exists = row >= 0
        end, before, share, steps, pieces = (
            _field(rows, name, row, exists)
            for name in ("end", "before", "share", "steps", "pieces")
        )
        begun = _ceil_div(key - before, share + PIECE_COST)
        begun = jnp.where(exists, jnp.minimum(begun, pieces), 0)
        cost = jnp.minimum(begun * (share + PIECE_COST), steps + PIECE_COST * pieces)
        return end - pieces + begun, before + cost

    loads = counts = jnp.zeros_like(team)
    runs: list[tuple[jax.Array, jax.Array]] = []
    low_cost = jnp.int32(0)
    longest = size.max()
    for bound in _bounds(cut):
        high = jnp.where(size > bound, pieces, 0).sum()
        high_cost = jnp.where(size > bound, cost, 0).sum()
        amount = high_cost - low_cost
        level = _level(jnp.where(is_team, loads, MOST), amount, batch.most_cost)
        # a team with room for less than half a piece would only be overfilled by one
        least = jnp.where(is_team, loads, MOST).min()
        room = (2 * (level - loads) >= longest + PIECE_COST) | (loads == least)
        room &= is_team
        level = amount + jnp.where(room, loads, 0).sum()
        level = _ceil_div(level, room.astype(jnp.int32).sum())
        own = jnp.where(room, jnp.maximum(level - loads, 0), 0)
        filled = jnp.cumsum(own)
        begin, begin_cost = reach(low_cost + filled - own)
        end, end_cost = reach(low_cost + filled)
        begin, begin_cost = jnp.minimum(begin, high), jnp.minimum(begin_cost, high_cost)
        end, end_cost = jnp.minimum(end, high), jnp.minimum(end_cost, high_cost)
        runs.append((end, counts - begin))
        counts += jnp.where(is_team, end - begin, 0)
        loads += jnp.where(is_team, end_cost - begin_cost, 0)
        low_cost, longest = high_cost, jnp.where(size <= bound, size, -1).max()

    starts = jnp.cumsum(counts) - counts
    for kind, (end, offset) in enumerate(runs):
        plt.store(ends.at[kind, team], end, mask=is_team)
        plt.store(places.at[kind, team], starts + offset, mask=is_team)
    works = (counts > 0).astype(jnp.int32)
    working = jnp.cumsum(works)
    place = jnp.where(works > 0, working - 1, works.sum() + team - working)
    walk = Share(starts, starts + counts, loads - PIECE_COST * counts)
    for field, value in enumerate(walk):
        plt.store(shares.at[place, field], value * works, mask=is_team)


def _list_pieces(rows: Any, ends: Any, places: Any, pieces: Any, *, cut: Cut) -> None:
    """Some pieces, into their places."""
    items, slots = pieces.shape[0], rows.shape[1]
    item = pl.program_id(0) * ITEMS + jnp.arange(ITEMS)
    place = _count(rows, Row._fields.index("end"), item, lambda held, key: held <= key)
    used = place < slots
    row = Row(*(_field(rows, name, place, used) for name in Row._fields))
    number = item - (row.end - row.pieces)
    begun = number * row.share
    kind = sum((row.size <= bound).astype(jnp.int32) for bound in _bounds(cut)[:-1])
    target = jnp.zeros_like(item)
    for one in range(KINDS):
        team = _count(ends, one, item, lambda held, key: held <= key)
        of_kind = used & (kind == one) & (team < ends.shape[1])
        offset = plt.load(places.at[one, team], mask=of_kind, other=jnp.int32(0))
        target = jnp.where(kind == one, item + offset, target)
    piece = Piece(
        row.slot,
        number,
        row.pieces,
        row.first + begun,
        jnp.clip(row.steps - begun, 0, row.share),
        row.first_key,
        row.length,
        row.queries,
    )
    # the pieces fill the first places
    target = jnp.where(used, target, item)
    for field, value in enumerate(piece):
        plt.store(pieces.at[target, field], jnp.where(used, value, 0), mask=item < items)
