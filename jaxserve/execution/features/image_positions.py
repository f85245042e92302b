"""Positions of three axes around images, for models whose tokens have them (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features.feature import Chunk, Facts, Feature, SpecialRow, Tokens
from jaxserve.execution.features.images import Images
from jaxserve.execution.layout import array, arrays
from jaxserve.memory.page_keys import KeySpan
from jaxserve.request.request import Request

AXES = 3  # time, row, column


@arrays
class PositionInputs:
    """Positions of each region token."""

    position: Any = array(AXES, "C")


@arrays
class PositionRow:
    """What is added to the place of a token behind the prompt."""

    shift: Any = array()


class ImagePositions(Feature):
    """Tells the model where tokens are: an image's by its rows and columns, others one by one.

    An image of R x C places that begins at position p has times p, rows p .. p + R - 1 and columns
    p .. p + C - 1; what follows it goes on from p + max(R, C).
    """

    name = "image_positions"
    setting = Images.setting
    special = False
    inputs = PositionInputs
    token_row = PositionRow

    @classmethod
    def suits(cls, facts: Facts) -> bool:
        images = None if facts.model is None else facts.model.images
        return images is not None and images.position_axes == AXES

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return chunk.start < chunk.request.num_prompt and bool(_grids(chunk.request))

    def token_row_of(self, request: Request) -> PositionRow:
        return PositionRow(_next_position(request) - request.num_prompt)

    def key_spans(self, request: Request) -> Sequence[KeySpan]:
        """None: positions follow from where images are and their shapes, which `Images` names."""
        return ()

    def pack(self, inputs: PositionInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        begin = 0
        for request, start, length in chunks:
            inputs.position[:, begin : begin + length] = positions_of(request, start, length)
            begin += length

    def positions(self, tokens: Tokens, positions: jax.Array) -> jax.Array:
        given = tokens.inputs.position
        own = jnp.broadcast_to(positions + tokens.values.shift, (AXES, positions.shape[1]))
        return own.at[:, own.shape[1] - given.shape[1] :].set(given)


def _grids(request: Request) -> list[tuple[int, int, int]]:
    """Of each image the place where it begins, and its rows and columns."""
    spans = (span for span in request.asked.spans if span.part == Images.name)
    return [(span.start, span.shape[0], span.shape[1]) for span in spans]


def _next_position(request: Request) -> int:
    """Of what follows the prompt."""
    saved = sum(rows * columns - max(rows, columns) for _, rows, columns in _grids(request))
    return request.num_prompt - saved


def positions_of(request: Request, start: int, length: int) -> np.ndarray:
    """int32[3, length]: positions of the tokens from place `start` of a request on."""
    made = np.tile(np.arange(start, start + length, dtype=np.int32), (AXES, 1))
    saved = 0  # places that images before have more than they take positions
    for begin, rows, columns in _grids(request):
        count = rows * columns
        low, high = max(start, begin), min(start + length, begin + count)
        if low < high:
            row, column = np.divmod(np.arange(low - begin, high - begin), columns)
            here = np.stack([np.zeros_like(row), row, column]) + begin - saved
            made[:, low - start : high - start] = here
        saved += count - max(rows, columns)
        behind = max(0, begin + count - start)
        made[:, behind:] -= count - max(rows, columns)
    return made
