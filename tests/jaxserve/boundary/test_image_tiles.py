"""Images in tiles, as transformers divides them."""

from __future__ import annotations

import pytest

from jaxserve.boundary.image_tiles import Tiling

SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
PUBLISHED = Tiling(SIZES, 336, 24)


@pytest.mark.parametrize(
    ("size", "grid", "places"),
    [
        # what transformers' processor says of images of the published model, class token left out
        ((672, 672), (2, 2), 576 + 48 * 49),
        ((336, 672), (1, 2), 576 + 24 * 49),
        ((1008, 336), (3, 1), 576 + 72 * 25),
        ((480, 640), (2, 2), 576 + 36 * 49),
        ((640, 480), (2, 2), 576 + 48 * 37),
        ((1, 50), (1, 2), 576),
    ],
)
def test_places(size: tuple[int, int], grid: tuple[int, int], places: int) -> None:
    assert PUBLISHED.grid(*size) == grid
    assert len(PUBLISHED.picks(*size)) == places
    assert PUBLISHED.num_tiles(*size) == 1 + grid[0] * grid[1]


def test_lines_run_through_the_tiles() -> None:
    tiling = Tiling(((4, 8), (8, 4)), 4, 2)  # a tile has 2 x 2 patches and 5 rows
    whole = [0, 1, 2, 3]
    assert tiling.picks(4, 8).tolist() == [*whole, 5, 6, 10, 11, 4, 7, 8, 12, 13, 4]
    assert tiling.picks(8, 4).tolist() == [*whole, 5, 6, 4, 7, 8, 4, 10, 11, 4, 12, 13, 4]
    # half of the columns are filled up
    assert tiling.picks(8, 2).tolist() == [*whole, 5, 6, 4, 7, 8, 4, 10, 11, 4, 12, 13, 4]
