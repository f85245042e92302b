"""Images in the places of token ids: `multi_modal_data`."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.execution.encoder import Encoder
from jaxserve.execution.features.feature import Facts, Host
from jaxserve.execution.features.prompt_embeds import PromptEmbeds
from jaxserve.memory.page_keys import KeySpan
from jaxserve.request.request import Request


class Images(PromptEmbeds):
    """Sends the device the rows that the model's encoder has made of a prompt's images.

    A request is queued once the encoder has seen all of its images.

    Attributes:
        encoder: of the engine, once it serves.
    """

    name = "images"
    setting = "limit_mm_per_prompt"
    encoder: Encoder | None = None

    @classmethod
    def suits(cls, facts: Facts) -> bool:
        return facts.model is not None and facts.model.images is not None

    def serve(self, host: Host) -> None:
        self.encoder = host.encoder

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()

    def begins(self, asked: AddGroup) -> Future[list[np.ndarray]] | None:
        mine = [span for span in asked.spans if span.part == self.name]
        if not mine:
            return None
        assert self.encoder is not None
        return self.encoder.encode([(span.shape, span.data) for span in mine])

    def key_spans(self, request: Request) -> list[KeySpan]:
        identity = b"" if self.encoder is None else self.encoder.identity
        return [one._replace(content=identity + one.content) for one in super().key_spans(request)]

    def rows_of(self, request: Request, span: PromptSpan) -> np.ndarray:
        mine = [one.start for one in request.asked.spans if one.part == self.name]
        rows: np.ndarray = request.shared[self.name][mine.index(span.start)]
        return rows
