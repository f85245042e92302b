"""Images of requests: opened within bounds, and made pixels by the model's image processor."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from jaxserve.boundary.image_facts import FIELD, ImageFacts, Pixels, facts_of
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.processor_kwargs import FIELD as KWARGS
from jaxserve.boundary.processor_kwargs import SIZE, joined, processor_kwargs
from jaxserve.client.media import MediaReader
from jaxserve.errors import ShutdownError, ValidationError

if TYPE_CHECKING:
    from PIL.Image import Image

KEY: Final = "multi_modal_data"  # of a prompt's mapping
IMAGE = "image"
CHANNELS = 3
MAX_PIXELS = 1 << 25  # of an image before it is made smaller
MAX_RATIO = 50  # of its longer side to the shorter one, which an image processor may make larger
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_FETCHED = 16  # prompts whose images come at a time: a slow host keeps few others waiting
MOST_DECODED = 2  # images that are in memory whole at a time


class ImageUrl(NamedTuple):
    """Where an image is to be read from."""

    url: str


def image_data(urls: Sequence[str]) -> dict[str, Any]:
    """What a prompt's mapping has of images that come by addresses; {} of none."""
    return {KEY: {IMAGE: [ImageUrl(one) for one in urls]}} if urls else {}


class ImageReader:
    """Makes pixels of what callers give.

    Args:
        folder: of the model, with its image processor's configuration.
        model: reads the images.
        media: reads what addresses name.
        most: images of a prompt; the setting `limit_mm_per_prompt`.
        most_patches: of an image whose size is its own, which is made smaller where it has more;
            the setting `max_encoder_patches`.
        kwargs: the setting `mm_processor_kwargs`; a prompt's own go before them.
    """

    def __init__(
        self,
        folder: str,
        model: ModelFacts,
        media: MediaReader,
        most: int,
        most_patches: int,
        kwargs: Mapping[str, Any] | None = None,
    ):
        self._kwargs = processor_kwargs(kwargs, model.images) if model.images else {}
        self._folder, self._model, self._media, self._most = folder, model, media, most
        self._most_patches = most_patches
        self._processor: Any = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MOST_FETCHED, "jaxserve-images")
        self._decoding = threading.Semaphore(MOST_DECODED)
        if model.images is not None:  # imported meanwhile, so that the first image need not wait
            self._threads.submit(self._load)

    def asked(self, prompt: Mapping[str, Any]) -> list[Any]:
        """The images of a prompt that has the key `multi_modal_data`.

        Raises:
            ValidationError: other data, too many images, or a model that reads none.
        """
        data = prompt[KEY]
        if not isinstance(data, Mapping) or any(
            not (value is None or (isinstance(value, list | tuple) and not value))
            for key, value in data.items()
            if key != IMAGE
        ):
            raise ValidationError(KEY, "...", f"a mapping with the key {IMAGE}")
        given = data.get(IMAGE)
        images = [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
        if isinstance(given, Pixels | ImageUrl):
            images = [given]
        if images:
            processor_kwargs(prompt.get(KWARGS), facts_of(self._model))
        if len(images) > self._most:
            allowed = f"at most {self._most} (limit_mm_per_prompt)"
            raise ValidationError(FIELD, f"{len(images)} images", allowed)
        return images

    def begin(self, prompt: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """The prompt with pixels in the place of its images, made in threads of the reader's.

        Raises:
            ShutdownError: the reader was closed.
        """
        try:
            return self._threads.submit(self._with_pixels, prompt)
        except RuntimeError as error:
            raise ShutdownError("the engine was closed") from error

    def _with_pixels(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        return {**prompt, KEY: {IMAGE: self.pixels_of(prompt)}}

    def pixels_of(self, prompt: Mapping[str, Any]) -> list[Pixels]:
        """Of the images of a prompt that has the key `multi_modal_data`.

        Raises:
            ValidationError: as `asked` and `pixels`.
        """
        images = self.asked(prompt)
        return [self.pixels(one, prompt.get(KWARGS)) for one in images]

    def pixels(self, given: Any, kwargs: Mapping[str, Any] | None = None) -> Pixels:
        """Of a PIL image, an array uint8[H, W, 3] or [H, W], or an
        address.

        Args:
            given: it; pixels stay what they are.
            kwargs: the prompt's `mm_processor_kwargs`.

        Raises:
            ValidationError: it is none of these, or no image of reasonable size.
        """
        if isinstance(given, Pixels):
            return given
        facts = facts_of(self._model)
        own = joined(self._kwargs, processor_kwargs(kwargs, facts))
        self._load()
        if isinstance(given, ImageUrl):
            data = self._media.read(given.url)
            with self._decoding:
                return self._processed(opened(data), facts, own)
        with self._decoding:
            return self._processed(as_image(given), facts, own)

    def _load(self) -> None:
        with self._lock:
            if self._processor is None:
                self._processor = image_processor(self._folder)

    def _processed(self, image: Image, facts: ImageFacts, own: Mapping[str, Any]) -> Pixels:
        if facts.free_axes and facts.tiling is None:
            return Pixels(self._patches(image, facts, own))
        made = self._processor(images=image, return_tensors="np", **own)
        array = np.asarray(made["pixel_values"][0], np.float32)
        if facts.tiling is None:
            return Pixels(array)
        return Pixels(array, tuple(map(int, made["image_sizes"][0])))

    def _patches(self, image: Image, facts: ImageFacts, own: Mapping[str, Any]) -> np.ndarray:
        """float32[rows / M, columns / M, M * M, 3 * P * P]: patches in squares of M x M."""
        size, (*_, square, numbers) = self._processor.size, facts.shape
        most = self._most_patches * (numbers // CHANNELS)
        asked = own.get(SIZE, {})
        least, longest = "shortest_edge", "longest_edge"  # both are numbers of pixels
        bounds = {longest: min(asked.get(longest, size[longest]), most)}
        if asked.get(least, 0) > bounds[longest]:
            allowed = f"min_pixels of at most max_pixels, and at most {most} (max_encoder_patches)"
            raise ValidationError(KWARGS, asked, allowed)
        bounds[least] = asked.get(least, size[least])
        if longest in asked:
            bounds[least] = min(bounds.values())
        made = self._processor(images=image, return_tensors="np", **{**own, SIZE: bounds})
        _, rows, columns = made["image_grid_thw"][0]
        if rows * columns > self._most_patches:
            allowed = f"at most {self._most_patches} (max_encoder_patches)"
            raise ValidationError(FIELD, f"{rows} x {columns} patches", allowed)
        # an image stands for some frames of a video, which are alike
        frames = np.asarray(made["pixel_values"], np.float32)
        frames = frames.reshape(rows * columns, CHANNELS, -1, numbers // CHANNELS)
        side = math.isqrt(square)
        return frames[:, :, 0].reshape(rows // side, columns // side, square, numbers)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def image_processor(folder: str) -> Any:
    """transformers' image processor of a folder, of the kind that works with Pillow and NumPy.

    Raises:
        ValidationError: the folder has none that can be read.
    """
    from transformers import AutoImageProcessor

    try:
        made = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:  # transformers raises many
        allowed = f"a folder with preprocessor_config.json ({type(error).__name__}: {error})"
        raise ValidationError("model", folder, allowed) from error
    if getattr(made, "do_pan_and_scan", False):
        allowed = "false in the image processor's configuration: an image is one"
        raise ValidationError("do_pan_and_scan", True, allowed)
    if made.backend != "pil":
        allowed = "an image processor that works with Pillow and NumPy"
        raise ValidationError("model", type(made).__name__, allowed)
    return made


def opened(data: bytes) -> Image:
    """The image in a file's bytes, upright and in RGB, as transformers' `load_image` has it.

    Raises:
        ValidationError: the bytes are no image, are cut off, or hold more than one; or it is
            larger than this process takes.
    """
    from PIL import Image, ImageOps

    allowed = f"a whole image in one of the formats {', '.join(FORMATS)}"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(image.size)  # of the header: nothing is decoded yet
            # not n_frames, which decodes every frame of a GIF
            if getattr(image, "is_animated", False):
                raise ValidationError(FIELD, "many frames", "one: no animations")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return as_rgb(image)
    except ValidationError:
        raise
    except Image.DecompressionBombError as error:
        allowed = f"an image of at most {MAX_PIXELS} pixels"
        raise ValidationError(FIELD, f"{len(data)} bytes of too many pixels", allowed) from error
    except Exception as error:  # Pillow's decoders raise many kinds for bytes that are broken
        raise ValidationError(FIELD, f"{len(data)} bytes", allowed) from error


def as_image(given: Any) -> Image:
    """A caller's PIL image or array as an image. Raises ValidationError, as `opened`."""
    from PIL import Image

    if isinstance(given, Image.Image):
        check_size(given.size)
        return as_rgb(given)
    if (
        not isinstance(given, np.ndarray)
        or given.dtype != np.uint8
        or given.shape[2:] not in ((), (3,))
        or given.ndim not in (2, 3)
    ):
        shown = f"{getattr(given, 'dtype', type(given).__name__)}{[*getattr(given, 'shape', ())]}"
        raise ValidationError(FIELD, shown, "a PIL image, or uint8[height, width, 3] or [h, w]")
    check_size(given.shape[1::-1])
    return Image.fromarray(given).convert("RGB")


def as_rgb(image: Image) -> Image:
    """An image in RGB of 8 bits; one of 16 bits keeps the upper ones, where Pillow would clip."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def check_size(size: tuple[int, ...]) -> None:
    """Refuse an image of too many pixels, or none, or far longer than wide. Raises
    ValidationError."""
    width, height = size
    shown = f"{width} x {height} pixels"
    if not width or not height or width * height > MAX_PIXELS:
        raise ValidationError(FIELD, shown, f"1 to {MAX_PIXELS} pixels")
    if max(size) > MAX_RATIO * min(size):
        raise ValidationError(FIELD, shown, f"sides that differ by a factor of {MAX_RATIO} at most")


def placed(
    tokens: list[int], facts: ImageFacts, pixels: list[Pixels]
) -> tuple[list[int], list[tuple[int, Pixels]]]:
    """Token ids with room for images in the place of each one's token.

    Returns:
        The ids, and where each image begins with its pixels.

    Raises:
        ValidationError: there are not as many tokens of images as images.
    """
    check_count(tokens, facts, len(pixels))
    made: list[int] = []
    pairs: list[tuple[int, Pixels]] = []
    for token in tokens:
        if token == facts.token_id:
            image = pixels[len(pairs)]
            pairs.append((len(made), image))
            made += [token] * facts.places(image.array.shape, image.size)
        else:
            made.append(token)
    return made, pairs


def least_places(facts: ImageFacts) -> int:
    """Places that any image takes in a prompt, at least."""
    if facts.tiling is not None:
        return facts.tiling.patches**2
    return facts.places((1,) * len(facts.shape))


def check_count(tokens: list[int], facts: ImageFacts, count: int) -> None:
    """Raises ValidationError unless a prompt has a token for each image."""
    found = tokens.count(facts.token_id)
    if found != count:
        allowed = f"as many as the prompt has tokens {facts.token_id}, which stand for one each: "
        raise ValidationError(FIELD, f"{count} images", f"{allowed}{found}")
