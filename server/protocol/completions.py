"""`/v1/completions`: the request."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ValidationError
from server.protocol.requests import GenerationRequest

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`; `prompt` is checked by `prompts`."""

    prompt: Any
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ValidationError("max_tokens", 0, "at least 1, or 0 together with echo=true")

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order, each a text or a list of token ids.

        Raises:
            ValidationError: the prompt is empty, too many, or of another type.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
            prompts = [prompt]
        elif isinstance(prompt, list):
            prompts = prompt
        else:
            raise _wrong_prompt(prompt)
        if not prompts:
            raise ValidationError("prompt", prompts, "at least one prompt")
        if len(prompts) > MAX_PROMPTS:
            raise ValidationError(
                "prompt", f"{len(prompts)} prompts", f"at most {MAX_PROMPTS} prompts in one request"
            )
        all_text = all(isinstance(one, str) for one in prompts)
        if not all_text and not all(_is_token_ids(one) for one in prompts):
            raise _wrong_prompt(prompt)
        if not all(prompts):
            raise ValidationError("prompt", prompt, "a prompt that is not empty")
        return prompts


def _is_id(value: Any) -> bool:
    # type() and not isinstance(): True is an int to Python but no token id.
    return type(value) is int


def _is_token_ids(value: Any) -> bool:
    # set(map(type, ...)) runs in C: a body may hold millions of ids.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _wrong_prompt(prompt: Any) -> ValidationError:
    shown = prompt if isinstance(prompt, int | float | bool | None) else type(prompt).__name__
    return ValidationError(
        "prompt", shown, "a string, a list of strings, a list of token ids or a list of such lists"
    )
