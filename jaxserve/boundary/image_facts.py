"""What a client knows of a model that reads images, and how images travel; without jax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.boundary.image_tiles import Tiling
from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.boundary.model_facts import ModelFacts

FIELD = "multi_modal_data.image"


class Pixels(NamedTuple):
    """An image behind the image processor.

    Attributes:
        array: see `ImageFacts.shape`.
        size: height and width in pixels of the image before, where it is read in tiles.
    """

    array: np.ndarray
    size: tuple[int, ...] = ()


class ImageFacts(NamedTuple):
    """How a model reads images.

    Attributes:
        token_id: stands for one image among a prompt's token ids.
        shape: of an image behind its image processor; 0: an axis whose length is the image's own.
            Such axes come first, and count cells that take places of a prompt each.
        places_per_cell: places of a cell; of an image without such axes, which is one cell.
        row_axes: first axes of an image that count the rows that its encoder is given.
        patches_per_row: patches of the encoder that are in a row.
        position_axes: kinds of position that a token has.
        sees_whole: whether each place of an image attends to all places of it.
        tiling: how images are read in tiles, which the first axis counts; None: they are not.
    """

    token_id: int
    shape: tuple[int, ...]
    places_per_cell: int
    row_axes: int = 0
    patches_per_row: int = 1
    position_axes: int = 1
    sees_whole: bool = False
    tiling: Tiling | None = None

    @property
    def free_axes(self) -> int:
        """Axes whose length is the image's own."""
        return self.shape.count(0)

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[self.row_axes if self.tiling is None else 1 :]

    @property
    def rows_per_cell(self) -> int:
        """Rows that belong together."""
        return math.prod(self.shape[self.free_axes : self.row_axes])

    def places(self, shape: tuple[int, ...], size: tuple[int, ...] = ()) -> int:
        """Places that an image takes in a prompt.

        Args:
            shape: behind the image processor.
            size: of `Pixels`.
        """
        if self.tiling is not None:
            return len(self.tiling.picks(*size))
        return math.prod(shape[: self.free_axes]) * self.places_per_cell

    def rows_made(self, shape: tuple[int, ...], places: int) -> int:
        """Rows of the encoder that a request holds for an image until it ends.

        Of tiles there are more than the image takes places.
        """
        return places if self.tiling is None else shape[0] * (self.tiling.patches**2 + 1)


def facts_of(model: ModelFacts) -> ImageFacts:
    """How a model reads images. Raises ValidationError: it reads none."""
    if model.images is None:
        raise ValidationError(FIELD, "...", "nothing: this model reads text alone")
    return model.images


def size_of(given: Any) -> tuple[int, ...]:
    """The size of `Pixels`."""
    return given.size if isinstance(given, Pixels) else ()


def checked_pixels(given: Any, model: ModelFacts) -> np.ndarray:
    """An image behind the model's image processor, as little-endian float32 of `facts.shape`.

    Args:
        given: the array, or `Pixels`.
        model: reads it.

    Raises:
        ValidationError: another model's image, or numbers that are not finite.
    """
    facts, size = facts_of(model), size_of(given)
    given = given.array if isinstance(given, Pixels) else given
    shape = getattr(given, "shape", ())
    is_free = [axis < facts.free_axes for axis in range(len(facts.shape))]
    fits = len(shape) == len(facts.shape) and all(
        size > 0 if free else size == wanted
        for size, wanted, free in zip(shape, facts.shape, is_free)
    )
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or not fits:
        value = f"{getattr(given, 'dtype', type(given).__name__)}{[*shape]}"
        wanted = ", ".join("*" if free else str(one) for one, free in zip(facts.shape, is_free))
        raise ValidationError(FIELD, value, f"floating pixels of the shape [{wanted}]")
    if facts.tiling is not None and len(given) != (facts.tiling.num_tiles(*size) if size else 0):
        allowed = "the tiles of its size: image processor and model differ in image_grid_pinpoints"
        raise ValidationError(FIELD, f"{len(given)} tiles of {[*size]} pixels", allowed)
    pixels = given.astype("<f4", copy=False)
    if not np.isfinite(pixels).all():
        raise ValidationError(FIELD, "pixels", "finite numbers")
    return pixels


def image_places(pixels: np.ndarray, size: tuple[int, ...], model: ModelFacts) -> int:
    """Places that a checked image takes in a prompt."""
    return facts_of(model).places(pixels.shape, size)
