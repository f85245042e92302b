"""The work list of balanced decode: every step once, and a schedule without stragglers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.paged_attention.hopper.decode import cut_of, default_tuning
from pallas_kernels.paged_attention.hopper.decode_work import (
    PIECE_COST,
    Batch,
    Cut,
    Piece,
    Share,
    divide,
)
from pallas_kernels.paged_attention.queries import key_range
from tests.pallas_kernels.paged_attention.hopper.plain_work import plain_list
from tests.pallas_kernels.strategies import examples

CUT = Cut(block_tokens=64, steps=8, most=16)
BLOCKS = 264  # two on each of 132 multiprocessors


@functools.partial(jax.jit, static_argnames=("batch", "teams"))
def divided(lengths, query_lens, batch, teams):
    most = batch.cut.most_pieces(batch.tokens)
    return divide(lengths, query_lens, batch, most_pieces=most, teams=teams, interpret=True)


def work_of(lengths, window=None, cut=CUT, tokens=None, teams=33, queries=1, query_lens=None):
    kv_lens = jnp.asarray(lengths, jnp.int32)
    batch = Batch(len(lengths), queries, window, tokens or max(max(lengths), 1), cut)
    counts = None if query_lens is None else jnp.asarray(query_lens, jnp.int32)
    work = divided(kv_lens, counts, batch, teams)
    table, shares = np.asarray(work.pieces), np.asarray(work.teams)
    pieces = [Piece(*(int(x) for x in row)) for row in table]
    low, _ = key_range(kv_lens, counts, queries, window)
    walks = [Share(*(int(x) for x in row)) for row in shares]
    return pieces, walks, np.asarray(work.rows), np.asarray(low)


@pytest.mark.parametrize(
    ("window", "cut", "teams", "queries"),
    [
        (None, CUT, 5, 1),
        pytest.param(700, CUT, 5, 3, marks=pytest.mark.slow),
        pytest.param(None, Cut(64, 4, 128), 264, 1, marks=pytest.mark.slow),
        pytest.param(5000, Cut(128, 3, 4), 1, 8, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_make_the_list_that_plain_python_makes(window, cut, teams, queries):
    """Of ragged batches, some with idle rows and rows longer than the page table."""
    rng = np.random.default_rng(teams)
    for longest in (300, 20000):
        lengths = [*rng.integers(1, longest, 60).tolist(), 0, 64, 65, 30000, 0, 1, longest, longest]
        counts = rng.integers(0, queries + 1, len(lengths)) if queries > 1 else None
        found = work_of(lengths, window, cut, 20000, teams, queries, counts)
        cut_off = jnp.minimum(jnp.asarray(lengths), 20000)
        keys = zip(*map(np.asarray, key_range(cut_off, counts, queries, window)), strict=True)
        of_row = np.full(len(lengths), queries) if counts is None else counts
        pieces, shares, rows = plain_list([*keys], of_row.tolist(), cut, teams)
        assert found[0][: len(pieces)] == pieces and found[1] == shares
        assert all(piece == Piece(*[0] * 8) for piece in found[0][len(pieces) :])
        assert found[2].tolist() == rows


@pytest.mark.slow
@examples(8)
@given(
    lengths=st.lists(
        st.one_of(st.sampled_from((0, 1, 63, 64, 65)), st.integers(0, 20000)),
        min_size=1,
        max_size=20,
    ),
    window=st.sampled_from((None, 1, 100, 5000)),
    teams=st.sampled_from((1, 5, 33)),
)
def test_every_visible_step_is_in_one_piece_of_one_team(lengths, window, teams):
    lengths = lengths + [0] * (20 - len(lengths))
    pieces, shares, rows, low = work_of(lengths, window, tokens=20000, teams=teams)
    walked = [index for share in shares for index in range(share.first, share.last)]
    assert walked == list(range(sum(rows)))
    found = {slot: [] for slot in range(len(lengths))}
    for index in walked:
        piece = pieces[index]
        assert (piece.pieces, piece.length) == (rows[piece.slot], lengths[piece.slot])
        found[piece.slot].append(piece)
    for slot, own in found.items():
        own.sort(key=lambda piece: piece.number)
        assert [piece.number for piece in own] == list(range(rows[slot]))
        steps = [piece.begin + step for piece in own for step in range(piece.steps)]
        assert steps == list(range(low[slot] // 64, -(-lengths[slot] // 64)))
        assert len(own) == 1 or all(piece.steps > 0 for piece in own)
    for share in shares:
        assert share.steps == sum(pieces[i].steps for i in range(share.first, share.last))
        # the longest first, but for the last of a row, which may be shorter than the row's others
        sizes = [p.steps for p in pieces[share.first : share.last] if p.number + 1 < p.pieces]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
def test_where_a_row_is_cut_follows_from_its_own_length():
    alone, _, rows, _ = work_of([5000, 0, 0, 0, 0, 0], tokens=64000)
    alone = [piece[1:] for piece in alone[: sum(rows)] if piece.slot == 0]
    many, _, rows, _ = work_of([9000, 30, 5000, 0, 64000, 5000])
    for slot in (2, 5):
        own = [piece[1:] for piece in many[: sum(rows)] if piece.slot == slot]
        assert sorted(own) == sorted(alone)


def makespan(lengths, cut, teams):
    """The most that one team has to do, in steps: those of its pieces, and what a piece costs."""
    _, shares, _, _ = work_of(lengths, cut=cut, teams=teams)
    return max(share.steps + PIECE_COST * (share.last - share.first) for share in shares)


RANDOM = np.random.default_rng(0)
RAGGED = {
    "63 of 1k beside one of 64k": [1024] * 63 + [65536],
    "uniform, short": [128] * 256,
    "one of 16k": [16384],
    "eight of 1k": [1024] * 8,
    "up to 8k": RANDOM.integers(1, 8192, 64).tolist(),
    "up to 2k": RANDOM.integers(1, 2048, 256).tolist(),
    "few, up to 32k": RANDOM.integers(1, 32768, 16).tolist(),
    "exponential": np.minimum(RANDOM.exponential(3000, 64).astype(int) + 1, 60000).tolist(),
    "half of them short": [200] * 32 + [8000] * 32,
}


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [8, 4, 1])
@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_batch_takes_no_more_than_a_uniform_one_of_equal_bytes(name, kv_heads):
    """A model of the schedule, not a measurement: within 1.2 times."""
    lengths = RAGGED[name]
    tuning = default_tuning(128, 4, "bfloat16")
    cut, teams = cut_of(tuning.block_tokens, 128, "bfloat16", kv_heads), BLOCKS // kv_heads
    uniform = [-(-sum(lengths) // len(lengths))] * len(lengths)
    assert makespan(lengths, cut, teams) <= 1.2 * makespan(uniform, cut, teams)
    # and no team waits for another, where there is enough work to share
    steps = sum(-(-length // tuning.block_tokens) for length in lengths)
    if steps > 4 * cut.steps * teams:
        assert makespan(lengths, cut, teams) <= 1.25 * (1 + PIECE_COST / cut.steps) * steps / teams
