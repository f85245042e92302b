"""How one request wants its tokens chosen: vLLM's `SamplingParams`, validated when it is made."""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any, Self

from jaxserve.config.settings import Integer, Number, Switch, Texts, check, setting, settings_of
from jaxserve.errors import ValidationError
from jaxserve.params.logits_processor import ALLOWED, Processor, as_processor
from jaxserve.params.repetition_detection import Repetition, RepetitionDetectionParams
from jaxserve.params.sampling_rules import LogitBias, TokenIds
from jaxserve.params.structured_outputs_params import (
    Constraint,
    StructuredOutputsParams,
    Tags,
    Thoughts,
)

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 1e-5
SMALLEST_TEMPERATURE = 0.01
LARGEST_TEMPERATURE = 2.0
MAX_COMPLETIONS = 16384
MAX_BAD_WORD_SEQUENCES = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
# parameters that are token ids, or have them as keys
TOKEN_FIELDS = ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids")
# the device divides by a repetition penalty: as a float32 it must be neither 0 nor infinite
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 2.0**127
LARGEST_INT32 = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# parameters of vLLM's in the order of their fields, and what to do instead
NOT_DONE = {
    "watermarking": "a logits processor can mark tokens (docs/processors.md)",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 has those of all tokens",
    "prompt_logprob_start": "prompt_logprobs are of the whole prompt",
    "routed_experts_prompt_start": "a feature of your own can report them (docs/research.md)",
    "trace_decode_token_ids": "prompt_logprobs score a text that is known",
}
NO_MEANING = {"skip_clone", "output_text_buffer_length"}


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


class OneKind:
    """A `RequestOutputKind`."""

    metavar = "KIND"
    allowed = f"one of {', '.join(str(kind) for kind in RequestOutputKind)}"

    def checked(self, name: str, value: Any) -> RequestOutputKind:
        if not isinstance(value, RequestOutputKind):
            raise ValidationError(name, value, self.allowed)
        return value


class ExtraArgs:
    """A mapping of names to plain data."""

    metavar = "JSON"
    allowed = "a mapping of names of features"

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValidationError(name, value, self.allowed)
        return dict(value)


class Processors:
    """Logits processors of one request, kept as `as_processor` makes them."""

    metavar = "MODULE:NAME"
    allowed = f"a list of {ALLOWED}"

    def checked(self, name: str, value: Any) -> list[Processor]:
        if not isinstance(value, list | tuple):
            raise ValidationError(name, value, self.allowed)
        found = [as_processor(one, name) for one in value]
        for one in found:
            if isinstance(one, type):
                allowed = f"a list of {ALLOWED}; classes are given to the engine"
                raise ValidationError(name, one, allowed)
        return found


# the parts that read parameters: the client, the scheduler, or features of the step by their files
CLIENT, SCHEDULER, SAMPLING, PENALTIES = "client", "scheduler", "sampling", "penalties"
MASK, BIAS, LOGPROBS, SCORES = "mask", "bias", "logprobs", "prompt_scores"
FEATURES, PROCESSORS = "own_features", "processors"
CUTOFF = "epsilon_cutoff"


@dataclass(slots=True)  # a queue holds many of them
class SamplingParams:
    """Sampling parameters of one request; names, defaults and ranges are those of vLLM.

    Those that are no settings are vLLM's: of what there is not (`NOT_DONE`), or without a meaning
    here (`NO_MEANING`).

    Raises:
        ValidationError: a value has the wrong type or lies outside its range.
    """

    n: int = setting(1, Integer(1, MAX_COMPLETIONS), "Completions a prompt.", reader=CLIENT)
    presence_penalty: float = setting(
        0.0,
        Number(-2.0, 2.0),
        "Subtracted from the logits of tokens that were generated before.",
        reader=PENALTIES,
    )
    frequency_penalty: float = setting(
        0.0,
        Number(-2.0, 2.0),
        "Subtracted from the logits of generated tokens once an occurrence.",
        reader=PENALTIES,
    )
    repetition_penalty: float = setting(
        1.0,
        Number(SMALLEST_FLOAT32, LARGEST_FLOAT32),
        "Divides positive and multiplies negative logits of prompt and generated tokens; 1 is off.",
        reader=PENALTIES,
    )
    temperature: float = setting(
        1.0,
        Number(0.0, LARGEST_TEMPERATURE),
        "0 is greedy and resets top_p, top_k and min_p; values in (0, 0.01) become 0.01.",
        reader=SAMPLING,
    )
    top_p: float = setting(
        1.0,
        Number(above=0.0, most=1.0),
        "Sample from the smallest set of tokens that holds this probability; 1 is off.",
        reader=SAMPLING,
    )
    top_k: int = setting(
        0, Integer(-1), "Sample from the k most likely tokens; 0 and -1 are off.", reader=SAMPLING
    )
    min_p: float = setting(
        0.0,
        Number(0.0, 1.0),
        "Drop tokens less likely than this share of the most likely one.",
        reader=SAMPLING,
    )
    seed: int | None = setting(
        None,
        Integer(INT64_MIN, INT64_MAX),
        "Makes the request reproducible; none or -1 leaves the choice to the engine.",
        reader=SAMPLING,
    )
    stop: str | list[str] | None = setting(
        list, Texts(single=True), "Strings that end the text.", reader=CLIENT
    )
    stop_token_ids: list[int] | None = setting(
        list, TokenIds(unique=True), "Tokens that end the text.", reader=SCHEDULER
    )
    bad_words: list[str] | None = setting(
        list, Texts(), "Texts that must not be generated.", reader=MASK
    )
    include_stop_str_in_output: bool = setting(
        False, Switch(), "Keep the stop string in the text.", reader=CLIENT
    )
    ignore_eos: bool = setting(
        False, Switch(), "Go on after the end-of-sequence token.", reader=SCHEDULER
    )
    max_tokens: int | None = setting(
        16,
        Integer(1),
        "Most tokens to generate; none fills up to max_model_len.",
        reader=SCHEDULER,
        optional=True,
    )
    min_tokens: int = setting(
        0,
        Integer(0),
        "End-of-sequence and stop tokens are not generated before this many tokens, also with "
        "ignore_eos.",
        reader=MASK,
    )
    logprobs: int | None = setting(
        None,
        Integer(-1),
        "Log-probabilities to return for each generated token, -1 for the vocabulary.",
        reader=LOGPROBS,
    )
    prompt_logprobs: int | None = setting(
        None, Integer(-1), "The same for each prompt token.", reader=SCORES
    )
    detokenize: bool = setting(True, Switch(), "Make text from the tokens.", reader=CLIENT)
    skip_special_tokens: bool = setting(
        True, Switch(), "Leave special tokens out of the text.", reader=CLIENT
    )
    spaces_between_special_tokens: bool = setting(
        True, Switch(), "Separate special tokens by spaces in the text.", reader=CLIENT
    )
    output_kind: RequestOutputKind = setting(
        RequestOutputKind.CUMULATIVE,
        OneKind(),
        "What each output of a stream holds.",
        reader=CLIENT,
    )
    stream_interval: int | None = setting(
        None,
        Integer(1),
        "Of a stream: tokens that each output brings at least, but for the first and the last.",
        reader=CLIENT,
    )
    logit_bias: dict[int, float] | None = setting(
        None,
        LogitBias(),
        "Token id -> value added to its logit, clamped to [-100, 100].",
        reader=BIAS,
    )
    allowed_token_ids: list[int] | None = setting(
        None, TokenIds(least=1), "Sample only from these tokens.", reader=MASK
    )
    logprob_token_ids: list[int] | None = setting(
        None,
        TokenIds(most=MAX_LOGPROB_TOKEN_IDS),
        "Log-probabilities of exactly these tokens, and of the generated one, are returned for "
        "each generated token; `logprobs` is none then, or their number.",
        reader=LOGPROBS,
    )
    flat_logprobs: bool = setting(
        False,
        Switch(),
        "Log-probabilities are returned as `FlatLogprobs`, a few long lists; not over HTTP.",
        reader=CLIENT,
    )
    epsilon_cutoff: float = setting(
        0.0,
        Number(0.0, 1.0),
        "Drop tokens less likely than this, after the temperature, but the most likely one; 0 is "
        "off. transformers' name for it; vLLM has none.",
        reader=CUTOFF,
    )
    structured_outputs: StructuredOutputsParams | None = setting(
        None,
        Constraint(),
        "What the text must be; see [structured_outputs.md](structured_outputs.md).",
        reader=MASK,
    )
    thinking_token_budget: int | None = setting(
        None,
        Integer(-1, 2**63 - 1),
        "Most tokens of thoughts, behind which their closing tag is forced; -1: any number.",
        reader=MASK,
    )
    repetition_detection: RepetitionDetectionParams | None = setting(
        None,
        Repetition(),
        "End a text that repeats itself, with the finish_reason `repetition`: when its last "
        "`min_pattern_size` to `max_pattern_size` tokens stand there `min_count` times.",
        reader=SCHEDULER,
    )
    skip_reading_prefix_cache: bool | None = setting(
        None,
        Switch(),
        "Compute the whole prompt, whatever the prefix cache has of it; none: no.",
        reader=SCHEDULER,
    )
    extra_args: dict[str, Any] | None = setting(
        None,
        ExtraArgs(),
        "What features of your own are asked for, by their names (`vllm_xargs` over HTTP); see "
        "[research.md](research.md).",
        reader=FEATURES,
    )
    logits_processors: list[Any] | None = setting(
        None,
        Processors(),
        "What changes the logits before a token is drawn, in their order; of an `LLM`, not over "
        "HTTP: see [processors.md](processors.md).",
        reader=PROCESSORS,
    )
    thoughts: Thoughts | None = setting(
        None,
        Tags(),
        "The tags around thoughts, for `thinking_token_budget`. A server has them from its "
        "reasoning parser.",
        reader=MASK,
    )
    watermarking: InitVar[bool | None] = None
    prompt_logprob_token_ids: InitVar[Any] = None
    prompt_logprob_start: InitVar[int | None] = None
    routed_experts_prompt_start: InitVar[int] = 0
    trace_decode_token_ids: InitVar[list[int] | None] = None
    skip_clone: InitVar[bool] = False
    output_text_buffer_length: InitVar[int] = 0

    def __post_init__(self, *vllms: Any) -> None:
        check(self)
        for (name, instead), value in zip(NOT_DONE.items(), vllms, strict=False):
            if value:
                raise ValidationError(name, value, f"nothing: {instead}")
        # more than any vocabulary is no filter either, and fits into every message
        self.top_k = min(max(self.top_k, 0), LARGEST_INT32)
        if self.seed == -1:
            self.seed = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                "min_tokens", self.min_tokens, f"an integer up to max_tokens={self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValidationError("stop", self.stop, "stop strings need detokenize=True")
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            allowed = f"None or {len(self.logprob_token_ids)}, the number of logprob_token_ids"
            raise ValidationError("logprobs", self.logprobs, allowed)
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

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Those of arguments that may be None, which stands for the default.

        Where None is a value of the parameter itself, as of `max_tokens`, it is kept.

        Raises:
            ValidationError: a name that is no parameter, besides what the constructor raises.
        """
        known = settings_of(cls)
        for name in given.keys() - known.keys() - NOT_DONE.keys() - NO_MEANING:
            raise ValidationError(name, given[name], f"one of the parameters {', '.join(known)}")
        can_be_none = {name for name, item in known.items() if item.optional}
        return cls(**{n: v for n, v in given.items() if v is not None or n in can_be_none})

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken at every step."""
        return self.temperature < GREEDY_TEMPERATURE

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
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def verify(
        self,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        features: Sequence[str] | None = (),
    ) -> None:
        """Checks the limits that need the model.

        Args:
            vocab_size: token ids are 0 .. vocab_size - 1.
            max_model_len: longest prompt plus output, in tokens.
            max_logprobs: most logprobs a request may ask for; -1 allows the whole vocabulary.
            features: names that `extra_args` may have; None: any.

        Raises:
            ValidationError: a token id, max_tokens or a logprobs count is over its limit.
        """
        for name in self.extra_args or ():
            if features is not None and name not in features:
                shown = ", ".join(features) or "none was given to this engine"
                raise ValidationError("extra_args", name, f"names of `features`: {shown}")
        for name in TOKEN_FIELDS:
            unknown = [t for t in getattr(self, name) or () if not 0 <= t < vocab_size]
            if unknown:
                value = unknown[0] if len(unknown) == 1 else unknown
                allowed = f"token ids of this model, 0 to {vocab_size - 1}"
                raise ValidationError(name, value, f"{allowed} (vocabulary size {vocab_size})")
        if self.max_tokens is not None and self.max_tokens > max_model_len:
            raise ValidationError(
                "max_tokens", self.max_tokens, f"an integer up to max_model_len={max_model_len}"
            )
        most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count == -1 and most < vocab_size:
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

    def for_engine(self) -> SamplingParams:
        """What the engine needs of them for each completion: text is the client's concern.

        Lists are shared: thousands of copies of a list of the vocabulary would not fit.
        """
        twin = copy.copy(self)
        twin.n = 1
        if self.stop or self.bad_words:
            twin.stop = twin.bad_words = []
        twin.structured_outputs = twin.thoughts = None  # travel as a grammar, and beside it
        twin.repetition_detection = None  # is in the stop rule
        twin.logits_processors = None  # are among the `extra_args`
        twin.output_kind = RequestOutputKind.CUMULATIVE
        twin.detokenize = twin.skip_special_tokens = twin.spaces_between_special_tokens = True
        twin.include_stop_str_in_output = twin.flat_logprobs = False
        twin.stream_interval = None
        return twin


def seed_words(seed: int) -> tuple[int, int]:
    """The two uint32 words (high, low) of a 64-bit seed: a threefry key.

    For 0 <= seed < 2**32 this is the key data of `jax.random.key(seed)`.
    """
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
