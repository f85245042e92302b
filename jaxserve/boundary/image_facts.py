"""What a client knows of a model that reads images, and how images travel; without jax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.boundary.model_facts import ModelFacts

FIELD = "multi_modal_data.image"
CHANNELS = 3


class ImageFacts(NamedTuple):
    """How a model reads images.

    Attributes:
        token_id: stands for one image among a prompt's token ids.
        size: height and width in pixels that its image processor gives every image.
        patch_pixels: pixels of the square that one place of a prompt stands for.
        more_places: places of an image beside those of its squares.
    """

    token_id: int
    size: tuple[int, int]
    patch_pixels: int
    more_places: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image's pixels."""
        return (CHANNELS, *self.size)

    @property
    def patches(self) -> int:
        """Squares of an image."""
        height, width = self.size
        return height * width // self.patch_pixels

    @property
    def places(self) -> int:
        """Places that an image takes in a prompt."""
        return self.patches + self.more_places


def facts_of(model: ModelFacts) -> ImageFacts:
    """How a model reads images. Raises ValidationError: it reads none."""
    if model.images is None:
        raise ValidationError(FIELD, "...", "nothing: this model reads text alone")
    return model.images


def checked_pixels(given: Any, model: ModelFacts) -> np.ndarray:
    """An image behind the model's image processor, as little-endian float32[3, H, W].

    Raises:
        ValidationError: another model's image, or numbers that are not finite.
    """
    wanted = facts_of(model).shape
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or given.shape != wanted:
        shape = [*getattr(given, "shape", ())]
        value = f"{getattr(given, 'dtype', type(given).__name__)}{shape}"
        raise ValidationError(FIELD, value, f"floating pixels of the shape {[*wanted]}")
    pixels = given.astype("<f4")
    if not np.isfinite(pixels).all():
        raise ValidationError(FIELD, "pixels", "finite numbers")
    return pixels


def image_places(pixels: np.ndarray, model: ModelFacts) -> int:
    """Places that a checked image takes in a prompt."""
    return facts_of(model).places
