"""Images that are read as a whole and in tiles of a finer grid (Liu et al., "LLaVA-NeXT", 2024)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tiling(NamedTuple):
    """How a model's images are divided.

    An image is fitted into the best of some sizes, which are filled up at two sides and cut into
    tiles; before them comes the whole image as one tile. The encoder gives the rows of a tile's
    patches, and one more that ends a line.

    Attributes:
        sizes: (height, width) in pixels.
        side: of a tile in pixels.
        patches: of a tile's side.
    """

    sizes: tuple[tuple[int, int], ...]
    side: int
    patches: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tiles of an image of so many pixels.

        The size of the most pixels of the image, and of those the one that it fills best.
        """

        def rank(size: tuple[int, int]) -> tuple[int, int]:
            high, wide = size
            scale = min(wide / width, high / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return -used, high * wide - used

        high, wide = min(self.sizes, key=rank)
        return high // self.side, wide // self.side

    def num_tiles(self, height: int, width: int) -> int:
        """Tiles of such an image, the whole included."""
        rows, columns = self.grid(height, width)
        return 1 + rows * columns

    def picks(self, height: int, width: int) -> np.ndarray:
        """int64[places]: which of the rows of all tiles, one tile behind the other, are an image's.

        The whole image, then the lines of the tiles side by side without what filled them up.
        """
        square = self.patches**2
        rows, columns = self.grid(height, width)
        tiles = 1 + np.arange(rows * columns).reshape(rows, 1, columns, 1)
        line, place = np.indices((self.patches, self.patches))
        inside = line * self.patches + place  # [patches, patches]
        fine = tiles * (square + 1) + inside[None, :, None]
        fine = fine.reshape(rows * self.patches, columns * self.patches)
        fine = _unfilled(fine, height, width)
        ended = np.pad(fine, ((0, 0), (0, 1)), constant_values=square)
        return np.concatenate([np.arange(square), ended.reshape(-1)])


def _unfilled(places: np.ndarray, height: int, width: int) -> np.ndarray:
    """The lines and columns of [R, C] that show an image, as transformers counts them."""
    lines, columns = places.shape
    if width / height > columns / lines:
        used = int(round(height * (columns / width), 7))
        filled = (lines - used) // 2
        return places[filled : lines - filled]
    used = int(round(width * (lines / height), 7))
    filled = (columns - used) // 2
    return places[:, filled : columns - filled]
