"""What an image's tokens attend to, for models in which each sees the whole image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.execution.features.feature import Chunk, Facts, Feature, SpecialRow, Tokens
from jaxserve.execution.features.images import Images
from jaxserve.execution.layout import array, arrays
from jaxserve.memory.page_keys import KeySpan
from jaxserve.request.request import Request


@arrays
class SightInputs:
    """Of each region token how many tokens behind it it attends to."""

    ahead: Any = array("C")


class ImageSight(Feature):
    """Has the tokens of an image attend to all of it, and to nothing behind it."""

    name = "image_sight"
    setting = Images.setting
    inputs = SightInputs

    @classmethod
    def suits(cls, facts: Facts) -> bool:
        images = None if facts.model is None else facts.model.images
        return images is not None and images.sees_whole

    def whole_spans(self, request: Request) -> Sequence[tuple[int, int]]:
        spans = (span for span in request.asked.spans if span.part == Images.name)
        return [(span.start, span.start + span.length) for span in spans]

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return any(last - first > 1 for first, last in self._seen(chunk))

    def key_spans(self, request: Request) -> Sequence[KeySpan]:
        """None: what tokens see follows from where images are, which `Images` names."""
        return ()

    def pack(self, inputs: SightInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        begin = 0
        for chunk in chunks:
            for first, last in self._seen(chunk):
                here = slice(begin + first - chunk.start, begin + last - chunk.start)
                inputs.ahead[here] = np.arange(last - first)[::-1]
            begin += chunk.length

    def ahead(self, tokens: Tokens) -> jax.Array:
        given: jax.Array = tokens.inputs.ahead
        return given

    def _seen(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """The places of a chunk that are of one image each; it has their ends."""
        for first, last in self.whole_spans(chunk.request):
            first = max(first, chunk.start)
            if first < last <= chunk.start + chunk.length:
                yield first, last
