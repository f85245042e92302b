"""Into how many parts a contraction is divided so that a GPU's multiprocessors are all at work."""

from __future__ import annotations

MAX_SPLITS = 8
MIN_STEPS = 4  # of a part: fewer would wait for their first data most of the time
ENOUGH = 0.85  # of the multiprocessors busy, on average


def number_of_splits(tiles: int, steps: int, multiprocessors: int) -> int:
    """Parts of K for so many tiles of the result, each of so many steps.

    The smallest number that keeps most multiprocessors busy in every wave of thread blocks, since
    every part costs a pass over the result; the best there is when none does.

    Args:
        tiles: thread blocks without splitting.
        steps: steps of the loop over all of K.
        multiprocessors: of the GPU.
    """

    def busy(splits: int) -> float:
        blocks = tiles * splits
        return blocks / (-(-blocks // multiprocessors) * multiprocessors)

    candidates = [
        splits
        for splits in range(1, min(MAX_SPLITS, max(1, steps // MIN_STEPS)) + 1)
        # parts of ceil(steps / splits) steps: the last must not be empty
        if -(-steps // -(-steps // splits)) == splits
    ]
    for splits in candidates:
        if busy(splits) >= ENOUGH:
            return splits
    return max(candidates, key=busy)
