"""What a request may ask for in all: refused before its prompts are started or looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import TOKEN_FIELDS
from server.protocol.requests import GenerationRequest

if TYPE_CHECKING:
    from server.service import Service


def check_choices(service: Service, request: GenerationRequest, num_prompts: int) -> None:
    """Raises ValidationError when prompts times n is more than the server starts at once."""
    most = service.limits.max_choices // num_prompts
    if most < 1:
        allowed = f"at most {service.limits.max_choices} prompts in one request"
        raise ValidationError("prompt", f"{num_prompts} prompts", allowed)
    if request.choices_per_prompt > most:
        raise ValidationError(
            "n", request.choices_per_prompt, f"1 to {most} for {num_prompts} prompt(s)"
        )


def check_batch(service: Service, num_prompts: int, field: str, num_tokens: int = 0) -> None:
    """Refuse prompts of one request that could never wait at a time, with an empty queue.

    Raises:
        ValidationError: names `field`.
    """
    asked = service.engine.config.asked
    most, most_tokens = asked.max_num_queued_reqs, asked.max_num_queued_tokens
    if most is not None and num_prompts > most:
        allowed = f"at most {most} prompts, as many may wait (--max-num-queued-reqs)"
        raise ValidationError(field, f"{num_prompts} prompts", allowed)
    if most_tokens is not None and num_prompts > 1 and num_tokens > most_tokens:
        allowed = f"at most {most_tokens} tokens of several prompts (--max-num-queued-tokens)"
        raise ValidationError(field, f"{num_tokens} tokens", allowed)


def check_response(service: Service, request: GenerationRequest, num_tokens: int) -> None:
    """Refuse a response that would repeat its prompts too often.

    Args:
        request: names what its choices show of their prompts.
        num_tokens: of all prompts.

    Raises:
        ValidationError: names the field that asks for the most.
    """
    asked = request.shown_of_prompt(service.engine.model_config.vocab_size)
    most = service.limits.max_response_entries
    entries = num_tokens * sum(asked.values())
    if entries > most:
        name = max(asked, key=lambda one: asked[one])
        raise ValidationError(
            name,
            getattr(request, name),
            f"responses that show at most {most} tokens and logprobs of prompts; these "
            f"{num_tokens} prompt tokens would be {entries}",
        )


def check_token_lists(service: Service, request: GenerationRequest) -> None:
    """Raises ValidationError for a parameter that names more tokens than the model has.

    Before each of them is looked at: a body may hold millions.
    """
    vocab_size = service.engine.model_config.vocab_size
    for name in TOKEN_FIELDS:
        count = len(getattr(request, name) or ())
        if count > vocab_size:
            raise ValidationError(name, f"{count} tokens", f"at most {vocab_size} tokens")
