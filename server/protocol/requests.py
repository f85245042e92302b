"""Request fields that completions and chat share, and how they become sampling parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import reduce
from itertools import islice
from operator import or_
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from jaxserve.client.input_processor import Params
from jaxserve.client.prompt_reader import EXTRA_KEYS
from jaxserve.errors import ValidationError
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams
from server.protocol.beams import (
    KEPT_WITH_BEAMS,
    check_early_stopping,
    check_with_beams,
    check_without_beams,
)
from server.protocol.response_format import FormatFields, constraint
from server.protocol.unsupported import check_unsupported

logger = logging.getLogger("jaxserve.server")

NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024  # of each; every sequence follows its stop strings in the event loop
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
INT64 = 2**63
Int64 = Annotated[int, Field(ge=-INT64, le=INT64 - 1)]

# A list stops at its first bad element, so a hostile body cannot ask for a million error lines.
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
SessionName = Annotated[str, Field(max_length=1024)]

# Fields of SamplingParams that requests give under another name or type, or not at all.
_GIVEN_OTHERWISE = {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "output_kind",
    "thoughts",
    "extra_args",
    "flat_logprobs",
    "logits_processors",
}
# What JSON has for a type of SamplingParams, where that is another one.
_JSON_TYPES: dict[Any, Any] = {
    list[int]: Integers,
    list[str]: Strings,
    str | list[str]: str | Strings,
    dict[int, float]: dict[str, Any],
    StructuredOutputsParams: dict[str, Any],
    RepetitionDetectionParams: dict[str, Any],
}


class StrictModel(BaseModel):
    """Types are not converted, NaN and Infinity are refused, unknown fields are kept as extras."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ModelRequest(StrictModel):
    """A request that names a model; null or no name means the default one."""

    request_kind: ClassVar[str] = ""  # of `unsupported.KNOWN`

    model: str | None = None

    def check(self) -> None:
        """Rules that need nothing but the body. Raises ValidationError."""
        self.check_extras()

    def check_extras(self) -> None:
        """Refuse fields that jaxserve knows but does not support; others are only logged.

        Raises:
            ValidationError: names the field.
        """
        extras = self.model_extra or {}
        check_unsupported(extras, self.request_kind)
        if extras:
            logger.debug("request fields that are not known: %s", list(islice(extras, 20)))
            extras.clear()  # of any size, while a request may run for long


class QueuedRequest(ModelRequest):
    """A request that waits for the engine."""

    cache_salt: str | None = None
    priority: Int64 | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @property
    def session(self) -> str:
        """See `Queueing.session`."""
        return ""

    def prompt_extras(self) -> dict[str, Any]:
        """The fields of the body that a prompt's mapping has under the same name."""
        found = {name: getattr(self, name, None) for name in EXTRA_KEYS}
        return {name: value for name, value in found.items() if value is not None}


class PromptRequest(QueuedRequest):
    """A request with prompts of its own, which may be cut."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None


def _sampling_fields() -> dict[str, Any]:
    """The fields of SamplingParams that requests have under the same name; null leaves them out."""
    types = get_type_hints(SamplingParams)
    found: dict[str, Any] = {}
    for item in fields(SamplingParams):
        if item.name not in _GIVEN_OTHERWISE:
            kind = _without_none(types[item.name])
            found[item.name] = (_JSON_TYPES.get(kind, kind) | None, None)
    return found


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`, also where X is a union itself."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    return reduce(or_, parts) if isinstance(kind, UnionType) else kind


_SAMPLING_FIELDS = _sampling_fields()
if TYPE_CHECKING:
    SamplingRequest = ModelRequest
else:
    SamplingRequest = create_model("SamplingRequest", __base__=ModelRequest, **_SAMPLING_FIELDS)


class GenerationRequest(PromptRequest, SamplingRequest):
    """The fields of `/v1/completions` and `/v1/chat/completions` that mean the same in both.

    Those of SamplingParams are among them, under their names; what is used here is declared again.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None  # checked by `check`, in words of its own
    shrink_under_pressure: bool | None = None
    n: int | None = None
    seed: Int64 | None = None
    stop: str | Strings | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Integers | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    session_id: SessionName | None = None

    @property
    def session(self) -> str:
        return self.session_id or ""

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

    def forget_prompt(self) -> None:
        """Let go of what has become token ids: a request may wait and run for long."""
        for name in ("prompt", "messages"):
            if name in type(self).model_fields:
                setattr(self, name, [])

    def shown_of_prompt(self, vocab_size: int) -> dict[str, int]:
        """Field -> entries that the response has of each prompt token because of it.

        In all choices together; log-probabilities count as what they list and the token itself.
        """
        shown: dict[str, int] = {}
        if self.return_token_ids:
            shown["return_token_ids"] = 1
        if self.prompt_logprobs is not None:
            shown["prompt_logprobs"] = listed(self.prompt_logprobs, vocab_size)
        return shown

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
        check_early_stopping(self.early_stopping)
        if not self.use_beam_search:
            check_without_beams(
                self.length_penalty, self.early_stopping, self.shrink_under_pressure
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
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValidationError(
                "truncation_side", self.truncation_side, "only with truncate_prompt_tokens"
            )
        if self.prompt_logprobs is not None and self.streams:
            raise ValidationError("prompt_logprobs", self.prompt_logprobs, "only without stream")
        shows = getattr(self, "logprobs", None)
        if self.logprob_token_ids and (shows is None or shows is False):
            allowed = "none where logprobs is not set"
            raise ValidationError("logprob_token_ids", self.logprob_token_ids, allowed)
        check_request_id(self.request_id)

    def constraint(self) -> FormatFields | None:
        """What the text must be. Raises ValidationError."""
        return constraint(self.structured_outputs, self.response_format)

    def constraint_fields(self) -> Mapping[str, str]:
        """Parameter -> field of the body that the constraint comes from."""
        asked = self.constraint()
        return {} if asked is None else asked.fields

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        defaults: Mapping[str, float] = NO_DEFAULTS,
    ) -> Params:
        """Parameters of one prompt: of sampling, or of a beam search.

        Args:
            max_tokens: limit, None for what the context has room for.
            logprobs, prompt_logprobs: how many, None for none.
            defaults: of the model (`GenerationDefaults`), in place of `SamplingParams`' own;
                `max_tokens` there bounds every request.

        Raises:
            ValidationError: a value is out of its range; names the request's field.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        asked = self.constraint()
        given["structured_outputs"] = None if asked is None else asked.params
        given["extra_args"] = self.vllm_xargs or None
        chosen = {name: value for name, value in given.items() if value is not None}
        most = defaults.get("max_tokens")
        if most is not None:
            max_tokens = int(most) if max_tokens is None else min(max_tokens, int(most))
        if self.use_beam_search:
            shown = {
                "logprobs": logprobs,
                "prompt_logprobs": prompt_logprobs,
                "stream": self.stream,
            }
            check_with_beams(chosen | shown)
            return self._beam_search_params(max_tokens, given["structured_outputs"])
        own = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return SamplingParams(
            **(own | chosen),
            max_tokens=max_tokens,
            logprobs=None if self.logprob_token_ids else logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.DELTA if self.streams else RequestOutputKind.FINAL_ONLY,
        )

    def _beam_search_params(
        self, max_tokens: int | None, constraint: StructuredOutputsParams | None
    ) -> BeamSearchParams:
        names = (*KEPT_WITH_BEAMS, "length_penalty", "early_stopping", "shrink_under_pressure")
        given = {name: getattr(self, name) for name in names} | {"structured_outputs": constraint}
        return BeamSearchParams(
            beam_width=self.choices_per_prompt,
            max_tokens=max_tokens,
            **{name: value for name, value in given.items() if value is not None},
        )


def listed(logprobs: int, vocab_size: int) -> int:
    """Entries of one position's log-probabilities, the token's own among them."""
    return 1 + (vocab_size if logprobs == -1 else max(0, logprobs))


def is_request_id(text: str) -> bool:
    """Whether the text may appear in a header, a log line and a response as a request id."""
    return _REQUEST_ID.fullmatch(text) is not None


def check_request_id(given: str | None) -> None:
    """Raises ValidationError for a `request_id` of other characters."""
    if given is not None and not is_request_id(given):
        raise ValidationError("request_id", given, "1 to 128 letters, digits, '.', '_', ':' or '-'")
