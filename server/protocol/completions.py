"""`/v1/completions`: the request."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxserve.errors import ValidationError
from server.protocol.prompts import prompt_list
from server.protocol.requests import GenerationRequest, listed

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`; `prompt` is checked by `prompts`."""

    request_kind: ClassVar[str] = "completions"

    prompt: Any
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ValidationError("max_tokens", 0, "at least 1, or 0 together with echo=true")

    def shown_of_prompt(self, vocab_size: int) -> dict[str, int]:
        shown = super().shown_of_prompt(vocab_size)
        if self.echo:
            shown["echo"] = 1
            if self.logprobs is not None:
                shown["logprobs"] = listed(self.logprobs, vocab_size)
        return {name: count * self.choices_per_prompt for name, count in shown.items()}

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order, each a text or a list of token ids.

        Raises:
            ValidationError: the prompt is empty, too many, or of another type.
        """
        return prompt_list(self.prompt, "prompt")
