"""Request fields that completions and chat share, and how they become sampling parameters."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.errors import ValidationError
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from server.protocol.unsupported import check_unsupported

logger = logging.getLogger("jaxserve.server")

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024  # of each; every sequence follows its stop strings in the event loop
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_INT64 = 2**63

# A list stops at its first bad element, so a hostile body cannot ask for a million error lines.
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]

# Request fields that are handed to SamplingParams under the same name, each left out when null.
_SAMPLING_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "logit_bias",
)


class StrictModel(BaseModel):
    """Types are not converted, NaN and Infinity are refused, unknown fields are kept as extras."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ModelRequest(StrictModel):
    """A request that names a model; null or no name means the default one."""

    model: str | None = None

    def check_extras(self) -> None:
        """Refuse fields that jaxserve knows but does not support; others are only logged.

        Raises:
            ValidationError: names the field.
        """
        extras = self.model_extra or {}
        check_unsupported(extras)
        if extras:
            logger.debug("request fields that are not known: %s", sorted(extras)[:20])


class GenerationRequest(ModelRequest):
    """The fields of `/v1/completions` and `/v1/chat/completions` that mean the same in both."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    logit_bias: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    def check(self) -> None:
        """Rules that hold across fields and need no model.

        Raises:
            ValidationError: names the field, its value and what is allowed.
        """
        self.check_extras()
        if self.stream_options is not None and not self.streams:
            raise ValidationError(
                "stream_options", self.stream_options.model_dump(), "only with stream=true"
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS:
            raise ValidationError("stop", self.stop, f"at most {MAX_STOP_STRINGS} strings")
        longest = max(map(len, stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValidationError(
                "stop",
                f"a string of {longest} characters",
                f"at most {MAX_STOP_CHARACTERS} characters",
            )
        if self.prompt_logprobs is not None and self.streams:
            raise ValidationError("prompt_logprobs", self.prompt_logprobs, "only without stream")
        if self.request_id is not None and not is_request_id(self.request_id):
            raise ValidationError(
                "request_id", self.request_id, "1 to 128 letters, digits, '.', '_', ':' or '-'"
            )

    def sampling_params(
        self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Sampling parameters of one prompt.

        Args:
            max_tokens: limit that already fits into the context.
            logprobs, prompt_logprobs: how many, None for none.

        Raises:
            ValidationError: a value is out of its range; names the request's field.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        chosen = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            **chosen,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.DELTA if self.streams else RequestOutputKind.FINAL_ONLY,
        )


def is_request_id(text: str) -> bool:
    """Whether the text may appear in a header, a log line and a response as a request id."""
    return _REQUEST_ID.fullmatch(text) is not None
