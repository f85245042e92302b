"""`/v1/embeddings`, `/pooling` and `/classify`: the requests."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from jaxserve.errors import ValidationError
from jaxserve.params.pooling_params import CLASSIFY, EMBED, PoolingParams
from server.protocol.chat import Messages, TemplateFields
from server.protocol.prompts import prompt_list
from server.protocol.requests import PromptRequest, check_request_id
from server.protocol.vectors import VectorFields


class PooledRequest(PromptRequest):
    """A request whose prompts become vectors."""

    use_activation: bool | None = None

    def check(self) -> None:
        """Raises ValidationError for a field that is known but not supported, or a bad id."""
        self.check_extras()
        check_request_id(self.request_id)


class InputRequest(TemplateFields, PooledRequest):
    """One with texts, token ids or a conversation; `input` is checked by `prompts`."""

    input: Any = None
    messages: Messages = Field(default_factory=list)
    add_generation_prompt: bool = False

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    def check(self) -> None:
        super().check()
        if self.is_chat and self.input is not None:
            raise ValidationError("messages", "...", "either messages or input")
        if self.is_chat:
            self.check_template()

    def forget_prompt(self) -> None:
        """Let go of what has become token ids."""
        self.input, self.messages = None, []

    def prompts(self) -> list[str | list[int]]:
        """See `prompt_list`."""
        return prompt_list(self.input, "input")


class ClassifyRequest(InputRequest):
    """Body of `POST /classify`."""

    request_kind: ClassVar[str] = "classify"

    def pooling_params(self) -> PoolingParams:
        """What is wanted of each prompt."""
        return PoolingParams(use_activation=self.use_activation, task=CLASSIFY)


class PoolingRequest(VectorFields, InputRequest):
    """Body of `POST /pooling`."""

    request_kind: ClassVar[str] = "pooling"

    pooling: str | None = None
    layer: int | None = None
    dimensions: int | None = None
    task: str | None = None

    def pooling_params(self) -> PoolingParams:
        """What is wanted of each prompt.

        Raises:
            ValidationError: names the field that is out of its range.
        """
        return PoolingParams(
            self.pooling or "last", self.use_activation, self.layer, self.dimensions, self.task
        )


class EmbeddingRequest(PoolingRequest):
    """Body of `POST /v1/embeddings`."""

    request_kind: ClassVar[str] = "embeddings"

    task: None = None

    def pooling_params(self) -> PoolingParams:
        return PoolingParams(
            self.pooling or "last", self.use_activation, self.layer, self.dimensions, EMBED
        )
