"""Chooses a call's native product of a linear layer; `paths.h` has the same numbers."""

from __future__ import annotations

import enum


class Path(enum.IntEnum):
    """A product, or how it is chosen.

    Attributes:
        BY_ROWS: the fastest for the number of rows, by the limits in `paths.h`.
        ONE_ORDER: one order of summation whatever the number of rows, so that a row's result does
            not depend on the rows beside it.
        DOTS: dot products of rows.
        LANES: rows of x as the lanes of a vector.
        TILES: the CPU's matrix unit.
    """

    BY_ROWS = 0
    ONE_ORDER = 1
    DOTS = 2
    LANES = 3
    TILES = 4
