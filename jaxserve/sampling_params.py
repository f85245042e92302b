"""How one request wants its tokens chosen: vLLM's `SamplingParams`, validated when it is made."""

from __future__ import annotations

import copy
import enum
import logging
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.errors import ValidationError

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 1e-5
SMALLEST_TEMPERATURE = 0.01
LARGEST_TEMPERATURE = 2.0
MAX_COMPLETIONS = 16384
MAX_BAD_WORD_SEQUENCES = 128
MAX_BAD_WORD_TOKENS = 1024
LOGIT_BIAS_LIMIT = 100.0
MAX_BIAS_ENTRIES = 2048  # values of logit_bias that all rows of a step have room for
# the device divides by a repetition penalty: as a float32 it must be neither 0 nor infinite
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 2.0**127
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


@dataclass
class SamplingParams:
    """Sampling parameters of one request; names, defaults and ranges are those of vLLM.

    Attributes:
        n: completions a prompt.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once
            or once an occurrence.
        repetition_penalty: divides positive and multiplies negative logits of prompt and
            generated tokens; 1.0 is off.
        temperature: 0 is greedy and resets top_p, top_k and min_p; values in (0, 0.01) become 0.01.
        top_p: sample from the smallest set of tokens that holds this probability; 1.0 is off.
        top_k: sample from the k most likely tokens; 0 and -1 are off.
        min_p: drop tokens less likely than min_p times the most likely one.
        seed: makes the request reproducible; None or -1 leaves the choice to the engine.
        stop: strings that end the text; one string or a list, kept as a list.
        stop_token_ids: tokens that end the text, without duplicates.
        bad_words: texts that must not be generated.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: most tokens to generate; None fills up to the engine's max_model_len.
        min_tokens: end-of-sequence and stop tokens are not generated before this many tokens, also
            with ignore_eos.
        logprobs: log-probabilities to return for each generated token, -1 for the vocabulary.
        prompt_logprobs: the same for each prompt token.
        detokenize: make text from the tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: separate special tokens by spaces in the text.
        output_kind: what each output of a stream holds.
        logit_bias: token id -> value added to its logit, clamped to [-100, 100].
        allowed_token_ids: sample only from these tokens.

    Raises:
        ValidationError: a value has the wrong type or lies outside its range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = field(default_factory=list)
    stop_token_ids: list[int] | None = field(default_factory=list)
    bad_words: list[str] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_switches()
        self._check_texts()
        self._check_tokens()
        if 0.0 < self.temperature < SMALLEST_TEMPERATURE:
            logger.warning(
                "temperature %g may overflow the logits and was raised to %g",
                self.temperature,
                SMALLEST_TEMPERATURE,
            )
            self.temperature = SMALLEST_TEMPERATURE
        if self.is_greedy:
            if self.n > 1:
                raise ValidationError("n", self.n, "1 when temperature is 0 (greedy sampling)")
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _check_numbers(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_COMPLETIONS)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, SMALLEST_FLOAT32, LARGEST_FLOAT32
        )
        self.temperature = _number("temperature", self.temperature, 0.0, LARGEST_TEMPERATURE)
        self.top_p = _number("top_p", self.top_p, most=1.0, above=0.0)
        self.top_k = _integer("top_k", self.top_k, -1)
        if self.top_k == -1:
            self.top_k = 0
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, INT64_MIN, INT64_MAX)
            if self.seed == -1:
                self.seed = None
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                "min_tokens", self.min_tokens, f"an integer up to max_tokens={self.max_tokens}"
            )
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer("prompt_logprobs", self.prompt_logprobs, -1)

    def _check_switches(self) -> None:
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(name, getattr(self, name), "true or false")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValidationError(
                "output_kind",
                self.output_kind,
                f"one of {', '.join(str(kind) for kind in RequestOutputKind)}",
            )

    def _check_texts(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = _texts("stop", stop)
        if self.stop and not self.detokenize:
            raise ValidationError("stop", self.stop, "stop strings need detokenize=True")
        self.bad_words = _texts("bad_words", self.bad_words)

    def _check_tokens(self) -> None:
        self.stop_token_ids = list(
            dict.fromkeys(_token_ids("stop_token_ids", self.stop_token_ids or []))
        )
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValidationError("allowed_token_ids", [], "None or at least one token id")
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken at every step."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def needs_filters(self) -> bool:
        """top_k, top_p or min_p may drop tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Logits depend on the tokens seen so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def needs_logprobs(self) -> bool:
        """Log-probabilities of generated tokens are returned."""
        return self.logprobs is not None

    def verify(self, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
        """Checks the limits that need the model.

        Args:
            vocab_size: token ids are 0 .. vocab_size - 1.
            max_model_len: longest prompt plus output, in tokens.
            max_logprobs: most logprobs a request may ask for; -1 allows the whole vocabulary.

        Raises:
            ValidationError: a token id, max_tokens or a logprobs count is over its limit.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise ValidationError(
                        name, token, f"token ids of this model, 0 to {vocab_size - 1}"
                    )
        if self.max_tokens is not None and self.max_tokens > max_model_len:
            raise ValidationError(
                "max_tokens", self.max_tokens, f"an integer up to max_model_len={max_model_len}"
            )
        most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count == -1 and max_logprobs != -1:
                raise ValidationError(
                    name, -1, f"0 to max_logprobs={max_logprobs} (-1 needs max_logprobs=-1)"
                )
            if count is not None and count > most:
                raise ValidationError(name, count, f"0 to {most} (the engine's max_logprobs)")

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one."""
        twin = copy.copy(self)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (list, dict)):
                setattr(twin, item.name, value.copy())
        return twin

    def for_child(self, index: int) -> SamplingParams:
        """Parameters of completion `index` of `n`: n = 1 and a seed of its own.

        The first one alone asks for prompt_logprobs, which are those of all.

        Seeds wrap around at the ends of int64, so that each child's differs from its siblings'.
        Lists are shared: thousands of children with a list of the vocabulary each would not fit.
        """
        child = copy.copy(self)
        child.n = 1
        if index:
            child.prompt_logprobs = None
        if self.seed is not None:
            child.seed = (self.seed + index - INT64_MIN) % 2**64 + INT64_MIN
        return child


def seed_words(seed: int) -> tuple[int, int]:
    """The two uint32 words (high, low) of a 64-bit seed: a threefry key.

    For 0 <= seed < 2**32 this is the key data of `jax.random.key(seed)`.
    """
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def _number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float = math.inf,
    *,
    above: float | None = None,
) -> float:
    allowed = "a finite number"
    if least is not None or above is not None:
        low = f"[{least:g}" if above is None else f"({above:g}"
        allowed += f" in {low}, {most:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValidationError(name, value, allowed)
    try:
        number = float(value)
    except OverflowError as error:
        raise ValidationError(name, value, allowed) from error
    if (
        not math.isfinite(number)
        or (least is not None and number < least)
        or (above is not None and number <= above)
        or number > most
    ):
        raise ValidationError(name, value, allowed)
    return number


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    allowed = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValidationError(name, value, allowed)
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValidationError(name, value, allowed)
    return number


def _texts(name: str, value: Any) -> list[str]:
    allowed = "a list of non-empty strings"
    if value is None:
        return []
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise ValidationError(name, value, allowed)
    texts = list(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValidationError(name, value, allowed)
    return texts


def _token_ids(name: str, value: Any) -> list[int]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise ValidationError(name, value, "a list of token ids")
    return [_integer(name, token, 0) for token in value]


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValidationError("logit_bias", value, "a mapping of token ids to numbers")
    if len(value) > MAX_BIAS_ENTRIES:
        raise ValidationError(
            "logit_bias", f"{len(value)} tokens", f"at most {MAX_BIAS_ENTRIES} tokens"
        )
    bias: dict[int, float] = {}
    for key, shift in value.items():
        try:
            token = int(key) if isinstance(key, str) else _integer("logit_bias", key, 0)
        except ValueError as error:
            raise ValidationError("logit_bias", key, "keys that are token ids") from error
        if token < 0:
            raise ValidationError("logit_bias", key, "keys that are token ids, 0 or more")
        number = _number("logit_bias", shift)
        bias[token] = min(max(number, -LOGIT_BIAS_LIMIT), LOGIT_BIAS_LIMIT)
    return bias
