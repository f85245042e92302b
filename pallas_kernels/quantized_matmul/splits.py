"""Into how many parts a contraction is divided: what fills a GPU against what the parts cost.

More parts make more thread blocks, of fewer steps each: the last wave of blocks leaves fewer
multiprocessors idle. Every part is a float32 result that is written to memory and read again by
the kernel that adds them up. Both are counted in bytes that the GPU's memory could have moved
meanwhile, so the choice needs no clock rate and no bandwidth:

    cost(splits) = waves * steps of a part * bytes of a step * multiprocessors
                   + (splits > 1) * (2 * splits * bytes of a part + LAUNCH_BYTES)

A multiprocessor has its share of the memory's bandwidth, so the chip could have moved `bytes of a
step * multiprocessors` in the time that one of them takes for a step. Where a step is bound by
something else, its bytes are as many as pass in that time (`Tiling.of`).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 8
# An estimate: a tile converts each 4-bit weight and waits for the sum of its group, in the time of
# the products of so many rows more
CONVERSION_ROWS = 64
DEQUANTIZED_BYTES = 2.5  # 4 bits read and 16 written for a weight that is dequantised once
MIN_STEPS = 4  # of a part: fewer would wait for their first data most of the time
# Ratios of data sheets (H100, H200, A100), rounded; the choice is not sensitive to them.
CACHE_OVER_MEMORY = 3  # bytes that the L2 cache gives while the memory gives one
FLOPS_A_BYTE = 200  # 16-bit operations of the tensor cores while the memory gives a byte
# about a microsecond of 4 TB/s: the kernel that adds the parts begins and ends
LAUNCH_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Tiling:
    """The division of a product into thread blocks before its contraction is divided.

    Attributes:
        rows: rows of the result, filled up to whole tiles.
        outputs: columns of the result.
        tiles: thread blocks.
        steps: steps of the loop over all of K.
        step_bytes: bytes that the memory could give to a multiprocessor in the time of a step.
    """

    rows: int
    outputs: int
    tiles: int
    steps: int
    step_bytes: float

    @staticmethod
    def of(
        sizes: tuple[int, int, int], tile: tuple[int, int, int], stored: int, element: int
    ) -> Tiling:
        """The division into tiles of one size.

        The stored weights come from memory, x from the cache, and the products have a rate: the
        slowest of these decides what a step takes.

        Args:
            sizes: rows, outputs and inputs of the product.
            tile: rows and outputs of a tile of the result, and inputs of a step.
            stored: bytes of the weights of a step.
            element: bytes of an element of x.
        """
        (rows, outputs, inputs), (tile_rows, tile_outputs, width) = sizes, tile
        brought = stored + tile_rows * width * element
        flops = 2 * tile_rows * tile_outputs * width
        return Tiling(
            rows=rows,
            outputs=outputs,
            tiles=-(-rows // tile_rows) * -(-outputs // tile_outputs),
            steps=-(-inputs // width),
            step_bytes=max(stored, brought / CACHE_OVER_MEMORY, flops / FLOPS_A_BYTE),
        )

    @property
    def part_bytes(self) -> int:
        """Of one float32 result."""
        return 4 * self.rows * self.outputs


def cost(tiling: Tiling, splits: int, multiprocessors: int) -> float:
    """Bytes that the memory could move in the time of the product; see the module."""
    waves = -(-tiling.tiles * splits // multiprocessors)
    share = -(-tiling.steps // splits)
    working = waves * share * tiling.step_bytes * multiprocessors
    parts = 2 * splits * tiling.part_bytes + LAUNCH_BYTES if splits > 1 else 0
    return working + parts


def number_of_splits(tiling: Tiling, multiprocessors: int, *, equal: bool = False) -> int:
    """The number of parts of K that costs least; of equals the smallest.

    Args:
        tiling: the product's division into thread blocks.
        multiprocessors: number of the GPU's multiprocessors.
        equal: whether all parts must have the same number of steps.
    """
    candidates = [
        splits
        for splits in range(1, min(MAX_SPLITS, max(1, tiling.steps // MIN_STEPS)) + 1)
        # parts of ceil(steps / splits) steps: the last must not be empty
        if -(-tiling.steps // -(-tiling.steps // splits)) == splits
        and not (equal and tiling.steps % splits)
    ]
    return min(candidates, key=lambda splits: cost(tiling, splits, multiprocessors))


def dequantizes(rows: int, tile_rows: int) -> bool:
    """Whether a 4-bit weight is dequantised once, for a product of 16 bits.

    Tiles of a kernel convert it again for every tile of rows.

    Args:
        rows: of x.
        tile_rows: of the kernel's tiles.
    """
    conversions = -(-rows // tile_rows) * CONVERSION_ROWS  # in rows' products of each weight
    return conversions > DEQUANTIZED_BYTES * FLOPS_A_BYTE / 2
