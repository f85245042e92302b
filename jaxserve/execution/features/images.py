"""Images in the places of token ids: `multi_modal_data`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.prompt_spans import IMAGES, PromptSpan
from jaxserve.execution.encoder import Encoded, Encoder
from jaxserve.execution.features.feature import NO_OPTIONS, Facts, Host
from jaxserve.execution.features.prompt_embeds import PromptEmbeds
from jaxserve.memory.page_keys import KeySpan
from jaxserve.request.request import Request


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
        self._waiting: dict[str, tuple[Future[list[Encoded]], set[str]]] = {}

    @classmethod
    def suits(cls, facts: Facts) -> bool:
        return facts.model is not None and facts.model.images is not None

    def serve(self, host: Host) -> None:
        self.encoder = host.encoder

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()

    def begins(self, asked: AddGroup) -> Future[list[Encoded]] | None:
        mine = [span for span in asked.spans if span.part == self.name]
        if not mine:
            return None
        assert self.encoder is not None
        done = self.encoder.encode([(span.shape, span.data) for span in mine])
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

    def rows_of(self, request: Request, span: PromptSpan) -> np.ndarray:
        mine = [one.start for one in self._spans(request)]
        encoded: Encoded = request.shared[self.name][mine.index(span.start)]
        return encoded.rows

    def _spans(self, request: Request) -> list[PromptSpan]:
        return [one for one in request.asked.spans if one.part == self.name]
