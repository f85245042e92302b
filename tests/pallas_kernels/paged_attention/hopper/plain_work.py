"""The work list of decode on Hopper in plain Python: what the kernels of `decode_work` compute."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.paged_attention.hopper.decode_work import PIECE_COST, Cut, Piece, Share


def plain_list(
    keys: Sequence[tuple[int, int]], queries: Sequence[int], cut: Cut, teams: int
) -> tuple[list[Piece], list[Share], list[int]]:
    """Pieces in their order, walks of the teams, and pieces of each row.

    Args:
        keys: first and end of the visible keys of each row.
        queries: of each row.
        cut: where rows are cut.
        teams: that share the pieces.
    """
    of_row = [_pieces_of(slot, *range_, queries[slot], cut) for slot, range_ in enumerate(keys)]
    ordered = sorted(of_row, key=lambda pieces: -pieces[0].steps)
    bounds = (cut.steps, cut.steps // 2, -1)
    loads, walks = [0] * teams, [[] for _ in range(teams)]
    for longer, bound in zip((10**9, *bounds), bounds, strict=False):
        kind = [p for pieces in ordered if bound < pieces[0].steps <= longer for p in pieces]
        if not kind:
            continue
        amount = sum(piece.steps + PIECE_COST for piece in kind)
        level = 0
        while sum(max(level - load, 0) for load in loads) < amount:
            level += 1
        first = kind[0].steps + PIECE_COST
        room = [2 * (level - load) >= first or load == min(loads) for load in loads]
        total = amount + sum(load for load, has in zip(loads, room, strict=True) if has)
        level = -(-total // sum(room))
        filled, ends = 0, []
        for load, has in zip(loads, room, strict=True):
            filled += max(level - load, 0) if has else 0
            ends.append(filled)
        spent = 0
        for piece in kind:
            team = next(team for team, end in enumerate(ends) if end > spent)
            walks[team].append(piece)
            loads[team] += piece.steps + PIECE_COST
            spent += piece.steps + PIECE_COST
    walks.sort(key=lambda walk: not walk)  # those without a piece last
    shares, walked = [], 0
    for walk in walks:
        steps = sum(piece.steps for piece in walk)
        end = walked + len(walk)
        shares.append(Share(walked, end, steps) if walk else Share(0, 0, 0))
        walked = end
    return [p for walk in walks for p in walk], shares, [len(pieces) for pieces in of_row]


def _pieces_of(slot: int, low: int, high: int, queries: int, cut: Cut) -> list[Piece]:
    first = low // cut.block_tokens
    steps = max(-(-high // cut.block_tokens) - first, 0)
    share = max(cut.steps, -(-steps // cut.most))
    share = max(-(-steps // max(-(-steps // share), 1)), 1)
    count = max(-(-steps // share), 1)
    return [
        Piece(slot, n, count, first + n * share, min(share, steps - n * share), low, high, queries)
        for n in range(count)
    ]
