"""Images in the places of token ids: `multi_modal_data`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxserve.boundary.image_tiles import Tiling
from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.prompt_spans import IMAGES, PromptSpan
from jaxserve.execution.encoder import DIGEST_BYTES, Encoded, Encoder
from jaxserve.execution.features.feature import NO_OPTIONS, Facts, Host
from jaxserve.execution.features.prompt_embeds import PromptEmbeds
from jaxserve.memory.page_keys import KeySpan
from jaxserve.request.request import Request


class InTiles(NamedTuple):
    """The rows of an image in tiles, which stay where the encoder keeps them.

    Attributes:
        digest: of the image.
        tiles: float32[rows, E] of each.
        picks: int64[places] which of all tiles' rows are the image's.
    """

    digest: bytes
    tiles: list[np.ndarray]
    picks: np.ndarray

    def part(self, here: slice) -> np.ndarray:
        """float32[P, E] of some of the places."""
        tile, row = np.divmod(self.picks[here], len(self.tiles[0]))
        made = np.empty((len(tile), self.tiles[0].shape[1]), np.float32)
        for number in np.unique(tile):
            mine = tile == number
            made[mine] = self.tiles[number][row[mine]]
        return made


class Images(PromptEmbeds):
    """Sends the device the rows that the model's encoder has made of a prompt's images.

    A request is queued once the encoder has seen all of its images.

    Attributes:
        encoder: of the engine, once it serves.
    """

    name = IMAGES
    setting = "limit_mm_per_prompt"
    encoder: Encoder | None = None

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS):
        super().__init__(facts, options)
        # of sequences whose images wait: what they wait for, and which others do
        self._waiting: dict[str, tuple[Future[list[Any]], set[str]]] = {}

    @classmethod
    def suits(cls, facts: Facts) -> bool:
        return facts.model is not None and facts.model.images is not None

    def serve(self, host: Host) -> None:
        self.encoder = host.encoder

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()

    def begins(self, asked: AddGroup) -> Future[list[Any]] | None:
        mine = [span for span in asked.spans if span.part == self.name]
        if not mine:
            return None
        assert self.encoder is not None
        tiling = self._tiling
        if tiling is None:
            done = self.encoder.encode([(span.shape, span.data) for span in mine])
        else:  # each tile is an image to the encoder
            tiles = [one for span in mine for one in tiles_of(span)]
            done = self.encoder.encode(tiles, partial(joined, mine, tiling))
        if not done.done():
            names = asked.sequence_ids
            self._waiting |= dict.fromkeys(names, (done, {*names}))
            done.add_done_callback(lambda _: [self._waiting.pop(one, None) for one in names])
        return done

    def ended(self, sequence_id: str) -> None:
        """Have no images encoded for a message whose sequences have all been aborted."""
        done, left = self._waiting.get(sequence_id, (None, set()))
        left.discard(sequence_id)
        if done is not None and not left:
            done.cancel()

    def key_spans(self, request: Request) -> list[KeySpan]:
        assert self.encoder is not None
        identity = self.encoder.identity
        return [
            KeySpan(span.start, span.length, identity + encoded.digest)
            for span, encoded in zip(self._spans(request), request.shared.get(self.name, ()))
        ]

    def part_of(self, request: Request, span: PromptSpan, here: slice) -> np.ndarray:
        mine = [one.start for one in self._spans(request)]
        encoded: Encoded | InTiles = request.shared[self.name][mine.index(span.start)]
        return encoded.part(here) if isinstance(encoded, InTiles) else encoded.rows[here]

    @property
    def _tiling(self) -> Tiling | None:
        model = self.facts.model
        return None if model is None or model.images is None else model.images.tiling

    def _spans(self, request: Request) -> list[PromptSpan]:
        return [one for one in request.asked.spans if one.part == self.name]


def tiles_of(span: PromptSpan) -> list[tuple[tuple[int, ...], memoryview]]:
    """Shape and bytes of each tile of an image."""
    data, count = memoryview(span.data), span.shape[0]
    size = len(data) // count
    return [(span.shape[1:], data[one * size : (one + 1) * size]) for one in range(count)]


def joined(
    spans: Sequence[PromptSpan], tiling: Tiling, encoded: Sequence[Encoded]
) -> list[InTiles]:
    """What the encoder made of each image, of what it made of their tiles in this order."""
    made, begin = [], 0
    for span in spans:
        tiles = encoded[begin : begin + span.shape[0]]
        begin += len(tiles)
        digest = hashlib.blake2b(repr(span.detail).encode(), digest_size=DIGEST_BYTES)
        for tile in tiles:
            digest.update(tile.digest)
        rows = [tile.rows for tile in tiles]
        made.append(InTiles(digest.digest(), rows, tiling.picks(*span.detail)))
    return made
