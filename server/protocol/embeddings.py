"""`/v1/embeddings`: the request."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from jaxserve.params.pooling_params import PoolingParams
from server.protocol.prompts import prompt_list
from server.protocol.requests import PromptRequest, check_request_id


class EmbeddingRequest(PromptRequest):
    """Body of `POST /v1/embeddings`; `input` is checked by `prompts`."""

    request_kind: ClassVar[str] = "embeddings"

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    pooling: str | None = None
    normalize: bool | None = None
    layer: int | None = None

    def forget_prompt(self) -> None:
        """Let go of what has become token ids."""
        self.input = []

    def check(self) -> None:
        """Raises ValidationError for a field that is known but not supported, or a bad id."""
        self.check_extras()
        check_request_id(self.request_id)

    def prompts(self) -> list[str | list[int]]:
        """See `prompt_list`."""
        return prompt_list(self.input, "input")

    def pooling_params(self) -> PoolingParams:
        """What is wanted of each prompt.

        Raises:
            ValidationError: names the field that is out of its range.
        """
        given = {"pooling": self.pooling, "normalize": self.normalize, "layer": self.layer}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return PoolingParams(**chosen)
