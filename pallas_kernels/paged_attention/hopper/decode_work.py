"""Divides the tokens of a decode batch among thread blocks, on the device.

A row is cut into pieces by its own length alone, so what its result is rounded to never depends on
the batch. Thread blocks are persistent: a team of them, one for each group of query heads, walks
its share of the pieces, so neighbours read adjacent memory at the same time. Longer pieces are
shared out before shorter ones, each kind to the teams that have least to do so far, as water fills
a vessel. XLA makes the table once a step; the layers share it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PIECE_COST = 1  # what begins and ends a piece takes, in steps of keys; by reasoning


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


def divide(
    low: jax.Array,  # int32[B]
    high: jax.Array,  # int32[B]
    queries: jax.Array,  # int32[B]
    *,
    cut: Cut,
    most_pieces: int,
    teams: int,
) -> Work:
    """The pieces of all rows, those of the most steps first, and the share of each team.

    Args:
        low: the first key that a query of each row sees.
        high: the end of these keys; a row that sees none is a piece without steps.
        queries: number of queries of each row.
        cut: where rows are cut.
        most_pieces: `cut.most_pieces` of the longest row.
        teams: number of teams that share the pieces.
    """
    slots = low.shape[0]
    block = cut.block_tokens
    first = low // block
    steps = jnp.maximum(-(-high // block) - first, 0)
    share = jnp.maximum(cut.steps, -(-steps // cut.most))
    share = jnp.maximum(-(-steps // jnp.maximum(-(-steps // share), 1)), 1)  # of equal pieces
    pieces = jnp.maximum(-(-steps // share), 1)

    row = jnp.arange(slots)
    size = jnp.minimum(share, steps)
    ahead = (size > size[:, None]) | ((size == size[:, None]) & (row < row[:, None]))
    slot = jnp.zeros(slots, jnp.int32).at[jnp.sum(ahead, axis=1)].set(row, unique_indices=True)

    ends = jnp.cumsum(pieces[slot])
    item = jnp.arange(slots * most_pieces)
    place = jnp.minimum(jnp.sum(ends <= item[:, None], axis=1), slots - 1)
    of_row = slot[place]
    number = item - (ends[place] - pieces[of_row])
    used = item < ends[-1]
    begin = number * share[of_row]
    own = jnp.where(used, jnp.clip(steps[of_row] - begin, 0, share[of_row]), 0)
    piece = Piece(
        of_row,
        number,
        pieces[of_row],
        first[of_row] + begin,
        own,
        low[of_row],
        high[of_row],
        queries[of_row],
    )
    cost = jnp.where(used, own + PIECE_COST, 0)
    longer = [jnp.sum(jnp.where(size > bound, pieces, 0)) for bound in (cut.steps, cut.steps // 2)]
    target, counts, loads = _shared_out(cost, [*longer, ends[-1]], teams)

    # teams without a piece go last: the first of the grid have a multiprocessor for themselves
    has_work = counts > 0
    dense = jnp.where(has_work, jnp.cumsum(has_work) - 1, teams)
    shares = Share(jnp.cumsum(counts) - counts, jnp.cumsum(counts), loads - PIECE_COST * counts)
    packed = jnp.stack(shares, axis=1).astype(jnp.int32)
    table = jnp.stack(piece, axis=1).astype(jnp.int32)
    return Work(
        jnp.zeros_like(table).at[jnp.where(used, target, len(item))].set(table, mode="drop"),
        jnp.zeros_like(packed).at[dense].set(packed, mode="drop"),
        pieces.astype(jnp.int32),
    )


def _shared_out(
    cost: jax.Array,  # int32[T], 0 behind the last piece
    kinds: list[jax.Array],  # int32[]
    teams: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # int32[T], int32[teams], int32[teams]
    """The place of each piece when those of a team follow one another; pieces and cost of teams.

    Args:
        cost: of each piece, those of one kind together, long kinds first.
        kinds: the end of the pieces of each kind.
        teams: among which they are shared out.
    """
    item, team = jnp.arange(cost.shape[0]), jnp.arange(teams + 1)[:, None]
    before = jnp.append(jnp.cumsum(cost) - cost, jnp.sum(cost))  # [T + 1]
    loads, counts = jnp.zeros((2, teams), jnp.int32)
    owner, offset = jnp.zeros((2, *item.shape), jnp.int32)
    low = jnp.int32(0)
    for high in kinds:
        # the level that the loads reach when those below it are filled up to it
        below = loads <= loads[:, None]
        amount = before[high] - before[low]
        reached = amount + jnp.sum(jnp.where(below, loads, 0), axis=1)
        level = jnp.min(reached / jnp.sum(below, axis=1))
        # a team with room for less than half a piece would only be overfilled by one
        room = level - loads >= cost[jnp.minimum(low, cost.shape[0] - 1)] / 2
        room |= loads == jnp.min(loads)
        level = (amount + jnp.sum(jnp.where(room, loads, 0))) / jnp.sum(room)
        filled = jnp.cumsum(jnp.where(room, jnp.maximum(level - loads, 0.0), 0.0))
        own = (item >= low) & (item < high)
        chosen = jnp.sum(filled <= (before[:-1] - before[low])[:, None], axis=1)
        chosen = jnp.minimum(chosen, teams - 1)
        bounds = low + jnp.sum(own & (chosen < team), axis=1)
        owner = jnp.where(own, chosen, owner)
        offset = jnp.where(own, counts[chosen] + item - bounds[chosen], offset)
        counts = counts + bounds[1:] - bounds[:-1]
        loads = loads + before[bounds[1:]] - before[bounds[:-1]]
        low = high
    starts = jnp.cumsum(counts) - counts
    return starts[owner] + offset, counts, loads
