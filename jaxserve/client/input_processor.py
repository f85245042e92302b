"""Validates and tokenises a caller's prompt (text, token ids, messages) into an `AddGroup`."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.boundary.grammar_verdicts import GrammarTokens
from jaxserve.boundary.image_facts import facts_of
from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.model_facts import ModelFacts, eos_token_ids
from jaxserve.boundary.processor_kwargs import FIELD as PROCESSOR_KWARGS
from jaxserve.boundary.prompt_spans import NO_ID, PARTS, PromptSpan, span_of, take_places
from jaxserve.client.images import KEY as MULTI_MODAL
from jaxserve.client.images import ImageReader, check_count, least_places, placed
from jaxserve.client.media import MediaReader
from jaxserve.config.engine_config import WITHOUT_PRIORITIES, check_seconds
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.grammars.grammar_checks import GrammarChecks
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.memory.page_keys import page_keys, root_key
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.logits_processor import FIELD as PROCESSORS
from jaxserve.params.logits_processor import HOST_PROCESSORS
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    TOKEN_FIELDS,
    RequestOutputKind,
    SamplingParams,
)
from jaxserve.params.structured_outputs_params import KINDS, StructuredOutputsParams, Thoughts
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.beam_search import BeamSearch
from jaxserve.tokenization.bad_words import bad_word_sequences
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams | PoolingParams
Tokenised = tuple[str | None, list[int], list[PromptSpan]]  # text, token ids, what has places

# of a prompt that is a mapping, beside PARTS; and what any such prompt may have
PROMPT_KEYS, EXTRA_KEYS = ("prompt", "prompt_token_ids"), ("cache_salt", PROCESSOR_KWARGS)
_ONE_TOKEN = SamplingParams(
    temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
MAX_SALT_CHARACTERS = 1024
_NONE = frozenset[int]()
# one for all, since hundreds of thousands may wait: lists of a message are not changed
_NO_LIST: list[Any] = []
# Of a long text so many characters a token of the context, and at least so many, are tokenised
# before the others; and so many tokens may change with what follows them.
HEAD_CHARACTERS, LEAST_HEAD, SPARE_TOKENS = 8, 2**15, 64
# So many tokens are checked in a fraction of a millisecond.
QUICK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request: the client's part, and the message for the engine.

    Attributes:
        keys: of its prompt's full pages, where one of several engines is chosen by them.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    group: AddGroup
    keys: Sequence[bytes] = ()


class InputProcessor:
    """Validates and tokenises prompts.

    Args:
        config: its limits bound prompts.
        model: the model's configuration, or the facts that a client has of it.
        tokenizer: None when `skip_tokenizer_init` is set.
        folder: of the model, where its image processor lies.

    Attributes:
        features: names that `extra_args` may have; None: any, which classes of vLLM's read.
        prefix: what its sequence ids begin with, where several processes make some.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: ModelFacts,
        tokenizer: Tokenizer | None,
        folder: str = "",
    ):
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = config.scheduler.max_model_len
        self._eos_token_ids = eos_token_ids(model, tokenizer)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            logger.warning(
                "the tokenizer has %d tokens and the model %d: prompts with one of the others are "
                "refused",
                tokenizer.vocab_size,
                model.vocab_size,
            )
        named = config.programs.features
        self.features = None if HOST_PROCESSORS in named else named
        self.prefix = ""
        self._numbers = itertools.count()  # next() is atomic: prepare() runs in threads
        self._checks: GrammarChecks | None = None
        if tokenizer is not None:
            self._checks = GrammarChecks(lambda: GrammarTokens.of(tokenizer, model))
            weakref.finalize(self, self._checks.close)  # also where nothing calls `close`
        asked = config.asked
        media = MediaReader(asked.allowed_media_domains, asked.allowed_local_media_path)
        most = asked.max_images, asked.max_encoder_patches
        self._images = ImageReader(folder, model, media, *most, asked.mm_processor_kwargs)

    @staticmethod
    def is_quick(prompt: Prompt, params: Params) -> bool:
        """True if `prepare` tokenises nothing and has few tokens and sequences to go through."""
        named = prompt if isinstance(prompt, Mapping) else {}
        tokens = named.get("prompt_token_ids") if named else prompt
        if not isinstance(tokens, list) or _parts(named) or named.get(MULTI_MODAL) is not None:
            return False
        if isinstance(params, BeamSearchParams):
            is_free = params.structured_outputs is None
            return is_free and len(tokens) + params.beam_width <= QUICK_TOKENS
        if isinstance(params, PoolingParams):
            return len(tokens) <= QUICK_TOKENS
        if params.bad_words or params.structured_outputs is not None:
            return False
        listed = sum(len(getattr(params, name) or ()) for name in TOKEN_FIELDS)
        return len(tokens) + listed + params.n <= QUICK_TOKENS

    def begin_check(self, params: Params, client: str) -> Future[str] | None:
        """Start to try a constraint's grammar; `prepare` uses the result. None: no grammar.

        The future raises the errors of `GrammarChecks.submit`.

        Args:
            params: any kind; only sampling parameters may have a constraint.
            client: waits its turn among other clients, see `Queueing`.

        Raises:
            ValidationError: names the field of a constraint that cannot be understood.
        """
        asked = None if isinstance(params, PoolingParams) else params.structured_outputs
        if asked is None:
            return None
        return self._try(asked, client)

    def begin_images(self, prompt: Prompt) -> Future[dict[str, Any]] | None:
        """Start to read the images of a prompt, in threads that nothing else waits for.

        The future gives the prompt for `prepare`, or raises ValidationError. None: it has none.
        """
        if not isinstance(prompt, Mapping) or prompt.get(MULTI_MODAL) is None:
            return None
        return self._images.begin(prompt)

    def check_images(self, tokens: list[int], images: Mapping[str, Any]) -> None:
        """Check the number of a prompt's images. Raises ValidationError."""
        check_count(tokens, facts_of(self._model), len(self._images.asked(images)))

    def with_places(self, tokens: list[int], prompt: Mapping[str, Any]) -> list[int]:
        """Token ids with the places of what `begin_images` has given; of any number."""
        return placed(tokens, facts_of(self._model), self._images.pixels_of(prompt))[0]

    def check_beside_images(
        self, prompt: Mapping[str, Any], params: Params, queueing: Queueing | None
    ) -> None:
        """Check all of a request that does not depend on its images, before they are fetched.

        Raises:
            ValidationError: as `prepare`.
        """
        rest = {name: value for name, value in prompt.items() if name != MULTI_MODAL}
        if count := len(self._images.asked(prompt)):
            facts, (_, tokens, _) = (
                facts_of(self._model),
                self._tokenise_mapping(self._framed(rest)),
            )
            check_count(tokens, facts, count)
            rest = {
                "prompt_token_ids": tokens + [facts.token_id] * count * (least_places(facts) - 1)
            }
        self.prepare(rest, params, "", queueing)

    def warm_up(self) -> None:
        """Begin to start the process that the first constraint needs."""
        if self._checks is not None:
            self._checks.start()

    def drain(self) -> None:
        """Refuse constraints that would wait long for their turn to be tried."""
        if self._checks is not None:
            self._checks.drain()

    def close(self) -> None:
        """End the process that tries grammars; no constraint can be prepared any more."""
        if self._checks is not None:
            self._checks.close()
        self._images.close()

    def prepare(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str,
        queueing: Queueing | None = None,
    ) -> PreparedRequest:
        """Check one request; it is not checked again later.

        Args:
            prompt: text, token ids, or a mapping of one of the kinds in `prompts`.
            params: sampling parameters, `n` of which run as separate sequences; those of a beam
                search, which has one output; or pooling parameters: with those the engine
                samples one token, which means nothing.
            request_id: unique among live requests.
            queueing: arrival time and urgency; None: it arrived now.

        Raises:
            ValidationError: names the prompt or the parameter that cannot be served.
        """
        queueing = queueing or Queueing(time.monotonic())
        self._check_queueing(queueing)
        if isinstance(params, BeamSearchParams):
            most_beams = self._config.asked.max_beam_width
            if most_beams is not None and params.beam_width > most_beams:
                allowed = f"1 to {most_beams}, the setting max_beam_width"
                raise ValidationError("beam_width", params.beam_width, allowed)
        text, tokens, spans = self._tokenise(prompt)
        pooling = None
        if isinstance(params, PoolingParams):
            pooling, params = self._pooling(params), _ONE_TOKEN
        elif self._model.labels:
            allowed = "PoolingParams: this model classifies and generates nothing"
            raise ValidationError("params", type(params).__name__, allowed)
        room = self._max_model_len - len(tokens)
        beams: BeamSearchParams | None = None
        if isinstance(params, BeamSearchParams):
            beams, params = params, _beam_sampling(params)
        if spans and max(tokens) == NO_ID:
            _check_reads_no_tokens(params)
        params.verify(
            self._model.vocab_size,
            self._max_model_len,
            self._config.asked.max_logprobs,
            self.features,
        )
        if params.logits_processors:
            names = [one.name for one in params.logits_processors]
            allowed = "none here: requests of an `LLM` have their own, other engines are given them"
            raise ValidationError(PROCESSORS, ", ".join(names), allowed)
        if self._tokenizer is None and params.detokenize:
            params = params.clone()
            params.detokenize = False
        if params.stream_interval is None and self._config.asked.stream_interval > 1:
            params = params.clone()
            params.stream_interval = self._config.asked.stream_interval
        if self._tokenizer is None and (params.stop or params.bad_words):
            field = "stop" if params.stop else "bad_words"
            raise ValidationError(
                field, getattr(params, field), "nothing when skip_tokenizer_init is set"
            )
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > most:
            raise ValidationError(
                "min_tokens", params.min_tokens, f"at most {most} after a prompt of this length"
            )
        group = self._group(tokens, params, most, queueing, _cache_salt(prompt))
        if beams is not None:
            group = self._with_beams(group, beams)
        if pooling is not None or spans:
            group = replace(group, pooling=pooling, spans=spans)
        return PreparedRequest(request_id, text, params, group, self._keys(group))

    def _keys(self, group: AddGroup) -> Sequence[bytes]:
        asked = self._config.asked
        if asked.data_parallel_size == 1 or not asked.enable_prefix_caching or group.spans:
            return ()
        extras = [] if group.cache_salt is None else [group.cache_salt]
        return page_keys(group.prompt_token_ids, self._config.cache.page_size, root_key(extras))

    def _pooling(self, params: PoolingParams) -> PoolingParams:
        if not self._config.asked.enable_embeddings:
            raise ValidationError("enable_embeddings", False, "True where prompts are embedded")
        params.verify(
            classifies=bool(self._model.labels),
            num_layers=self._model.num_layers,
            hidden_size=self._model.hidden_size,
            matryoshka=self._model.matryoshka,
        )
        if params.extra_kwargs:
            raise ValidationError("extra_kwargs", params.extra_kwargs, "none but of LLM.score")
        if params.layer is None:
            return params
        layer = params.layer % (self._model.num_layers + 1)
        return replace(params, layer=None if layer == self._model.num_layers else layer)

    def _with_parts(self, prompt: Mapping[str, Any], parts: dict[str, Any]) -> Tokenised:
        """A prompt in which spans take the places of some or all token ids."""
        for name in parts:
            setting = PARTS[name].setting
            if not getattr(self._config.asked, setting):
                raise ValidationError(setting, False, f"True for prompts of {name}")
        ids, first = prompt.get("prompt_token_ids"), next(iter(parts))
        is_whole = ids is None or not all(isinstance(given, list) for given in parts.values())
        beside = {first} if is_whole else {*parts, "prompt_token_ids"}
        for name, value in prompt.items():
            if name not in beside.union(EXTRA_KEYS) and value is not None:
                raise ValidationError(f"prompt[{name!r}]", value, f"nothing beside {first}")
        if not is_whole:
            tokens = self._check_tokens(ids)
            return None, tokens, take_places(parts, tokens, self._model)
        span = span_of(first, 0, parts[first], self._model)
        self._check_length(f"{first} {[*span.shape]}", span.length)
        return None, [NO_ID] * span.length, [span]

    def _check_queueing(self, queueing: Queueing) -> None:
        priority, policy = queueing.priority, self._config.asked.scheduling_policy
        if isinstance(priority, bool) or not isinstance(priority, int) or not _is_int64(priority):
            raise ValidationError("priority", priority, "an integer of 64 bits")
        if priority != 0 and policy in WITHOUT_PRIORITIES:
            allowed = f"0, since scheduling_policy is {policy!r} and not 'priority'"
            raise ValidationError("priority", priority, allowed)
        if queueing.timeout is not None:
            check_seconds("timeout", queueing.timeout)

    def _group(
        self,
        tokens: list[int],
        params: SamplingParams,
        max_tokens: int,
        queueing: Queueing,
        cache_salt: str | None,
    ) -> AddGroup:
        words: list[list[int]] = []
        if params.bad_words:
            assert self._tokenizer is not None
            words = bad_word_sequences(self._tokenizer, params.bad_words, self._model.vocab_size)
        grammar = None
        if params.structured_outputs is not None:
            grammar = self._grammar(params.structured_outputs, queueing.client)
        self._check_allowed(params, words)
        rule = StopRule(
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids) if params.stop_token_ids else _NONE,
            # a constrained text ends when nothing else may follow; the mask holds its end back
            min_tokens=params.min_tokens if grammar is None else 0,
            max_tokens=max_tokens,
            ignore_eos=params.ignore_eos and grammar is None,
            repetition=params.repetition_detection,
        )
        number = f"{self.prefix}{next(self._numbers)}"
        seed = self._seed(params, number, tokens)
        return AddGroup(
            # the engine's own ids: callers' ids may collide over time
            sequence_ids=[f"{number}.{index}" for index in range(params.n)],
            seeds=[(seed + index) % 2**64 for index in range(params.n)],
            prompt_token_ids=tokens,
            params=params.for_engine(),
            stop_rule=rule,
            bad_words=words or _NO_LIST,
            queueing=queueing,
            cache_salt=cache_salt,
            spans=_NO_LIST,
            grammar=grammar,
            output_token_ids=_NO_LIST,
            thoughts=self._thoughts(params),
        )

    def _thoughts(self, params: SamplingParams) -> Thoughts | None:
        """The tags of thoughts before a constrained text, or of thoughts with a budget."""
        asked, budget = params.structured_outputs, params.thinking_token_budget
        of_constraint = None if asked is None else asked.thoughts
        if budget is None or budget == -1:
            return of_constraint
        if asked is not None and of_constraint is None:
            if asked.structural_tag is not None:
                allowed = "-1 or none beside a structural_tag"
                raise ValidationError("thinking_token_budget", budget, allowed)
            return None  # the constraint begins at once: there are no thoughts
        found = params.thoughts or of_constraint
        if found is None:
            allowed = "-1 or none where no `thoughts` say how they are told from the answer"
            raise ValidationError("thinking_token_budget", budget, allowed)
        if self._tokenizer is None:
            allowed = "-1 or none when skip_tokenizer_init is set"
            raise ValidationError("thinking_token_budget", budget, allowed)
        return found

    def _grammar(self, asked: StructuredOutputsParams, client: str) -> str:
        """A constraint in the engine's notation; it is known to compile."""
        return self._try(asked, client).result()

    def _try(self, asked: StructuredOutputsParams, client: str) -> Future[str]:
        (kind,) = (name for name in KINDS if getattr(asked, name) is not None)
        name, given = f"structured_outputs.{kind}", getattr(asked, kind)
        if self._checks is None:
            raise ValidationError(name, given, "nothing when skip_tokenizer_init is set")
        if not self._eos_token_ids:
            allowed = "nothing where neither model nor tokenizer has an end-of-sequence token"
            raise ValidationError(name, given, allowed)
        return self._checks.submit(grammar_text(asked), name, given, client)

    def _with_beams(self, group: AddGroup, beams: BeamSearchParams) -> AddGroup:
        """The group of a beam search; the device reports tokens that may follow each beam."""
        width, limit, vocab_size = (
            beams.beam_width,
            self._config.asked.max_logprobs,
            self._model.vocab_size,
        )
        ends = group.grammar is not None or not beams.ignore_eos
        num_eos = len(self._eos_token_ids) if ends else 0
        count = BeamSearch.num_candidates(width, num_eos)
        reported = vocab_size if limit == -1 else min(limit, vocab_size)
        if count > reported:
            raise ValidationError(
                "beam_width",
                width,
                f"1 to {reported - num_eos}: {num_eos} end-of-sequence tokens more than that are "
                f"reported of each beam, max_logprobs={limit} at most",
            )
        if beams.shrink_under_pressure and self._config.asked.deterministic:
            allowed = (
                "False where the engine is deterministic: others decide how many pages are left"
            )
            raise ValidationError("shrink_under_pressure", True, allowed)
        (first,) = group.sequence_ids
        name = first.partition(".")[0]
        group.params.logprobs = count
        return replace(
            group,
            sequence_ids=[first, *(f"{name}.{index}" for index in range(1, width))],
            seeds=group.seeds * width,
            # callers may change theirs; a constraint travels as a grammar
            beams=replace(beams, structured_outputs=None),
        )

    def _check_allowed(self, params: SamplingParams, bad_words: list[list[int]]) -> None:
        """Refuses parameters that leave no token to sample."""
        if params.allowed_token_ids is None:
            return
        left = set(params.allowed_token_ids).difference(w[0] for w in bad_words if len(w) == 1)
        if params.min_tokens:
            left.difference_update(params.stop_token_ids or (), self._eos_token_ids)
        if not left:
            raise ValidationError(
                "allowed_token_ids",
                params.allowed_token_ids,
                "at least one token that bad_words and min_tokens leave",
            )

    def _seed(self, params: SamplingParams, number: str, tokens: list[int]) -> int:
        """The request's own seed, or one that follows from the engine's and the arrival order.

        Where the engine is deterministic the prompt takes the place of that order.
        """
        if params.seed is not None:
            return params.seed % 2**64
        asked = self._config.asked
        text = f"{asked.seed}:{tokens if asked.deterministic else number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

    def _tokenise(self, prompt: Prompt) -> Tokenised:
        if isinstance(prompt, Mapping):
            return self._tokenise_mapping(prompt)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValidationError("prompt", prompt, "token ids when skip_tokenizer_init is set")
            # a tokenizer may add a token of its own to an empty text: still nothing to continue
            check_text_fits(prompt, self._tokenizer, self._max_model_len, "prompt")
            tokens = self._tokenizer.encode(prompt) if prompt else []
            self._check_length(prompt, len(tokens))
            check_token_ids(tokens, self._model.vocab_size, "prompt")
            return prompt, tokens, _NO_LIST
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            allowed = f"text, a list of token ids, or a dictionary with {' or '.join(PROMPT_KEYS)}"
            raise ValidationError("prompt", prompt, allowed)
        return None, self._check_tokens(prompt), _NO_LIST

    def _with_images(self, prompt: Mapping[str, Any]) -> Tokenised:
        """A prompt in which images take the places of their tokens."""
        rest = {name: value for name, value in prompt.items() if name != MULTI_MODAL}
        images = self._images.asked(prompt)
        if not images:
            return self._tokenise_mapping(rest)
        if _parts(rest):
            raise ValidationError(
                MULTI_MODAL, "...", "nothing beside arrays in the prompt's places"
            )
        facts, (text, tokens, _) = facts_of(self._model), self._tokenise_mapping(self._framed(rest))
        check_count(tokens, facts, len(images))
        # what does not fit is refused before an image is looked at
        self._check_length(prompt, len(tokens) + len(images) * (least_places(facts) - 1))
        made, pairs = placed(tokens, facts, self._images.pixels_of(prompt))
        self._check_length(prompt, len(made))
        _, tokens, spans = self._with_parts({"prompt_token_ids": made}, {"images": pairs})
        return text, tokens, spans

    def _framed(self, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
        """A prompt whose text, where it has no token ids, has images as the model reads them."""
        text, tokens = (prompt.get(name) for name in PROMPT_KEYS)
        if tokens is not None or self._tokenizer is None or not isinstance(text, str):
            return prompt
        return {**prompt, PROMPT_KEYS[0]: self._tokenizer.framed(text)}

    def _tokenise_mapping(self, prompt: Mapping[str, Any]) -> Tokenised:
        if prompt.get(MULTI_MODAL) is not None:
            return self._with_images(prompt)
        if parts := _parts(prompt):
            return self._with_parts(prompt, parts)
        for name, value in prompt.items():
            if name not in (*PROMPT_KEYS, *EXTRA_KEYS) and value is not None:
                allowed = f"{' or '.join(PROMPT_KEYS)}, and {', '.join(EXTRA_KEYS)}"
                raise ValidationError(f"prompt[{name!r}]", value, allowed)
        text, tokens = (prompt.get(name) for name in PROMPT_KEYS)
        if text is not None and not isinstance(text, str):
            raise ValidationError("prompt", text, "text; token ids go to prompt_token_ids")
        if tokens is not None:
            return text, self._check_tokens(tokens), _NO_LIST
        if text is None:
            raise ValidationError("prompt", dict(prompt), " or ".join(PROMPT_KEYS))
        return self._tokenise(text)

    def _check_length(self, prompt: Prompt, num_tokens: int) -> None:
        if not num_tokens:
            raise ValidationError("prompt", prompt, "a prompt of at least one token")
        if num_tokens >= self._max_model_len:
            raise ValidationError(
                "prompt",
                f"{num_tokens} tokens",
                too_long(self._max_model_len, num_tokens),
            )

    def _check_tokens(self, tokens: Any) -> list[int]:
        if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
            raise ValidationError("prompt_token_ids", tokens, "a list of token ids")
        # what does not fit is refused without looking at each id
        self._check_length(tokens, len(tokens))
        check_token_ids(tokens, self._model.vocab_size, "prompt_token_ids")
        return list(tokens)


def _parts(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a prompt that take the places of token ids."""
    return {name: prompt[name] for name in PARTS if prompt.get(name) is not None}


def _beam_sampling(beams: BeamSearchParams) -> SamplingParams:
    """The sampling parameters that a beam search shares with other requests: it draws nothing."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=beams.max_tokens,
        ignore_eos=beams.ignore_eos,
        include_stop_str_in_output=beams.include_stop_str_in_output,
        structured_outputs=beams.structured_outputs,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _check_reads_no_tokens(params: SamplingParams) -> None:
    """Refuses parameters about the prompt's token ids where it has none."""
    for name, off in (("prompt_logprobs", None), ("repetition_penalty", 1.0)):
        if getattr(params, name) != off:
            allowed = f"{off!r} for a prompt without token ids"
            raise ValidationError(name, getattr(params, name), allowed)


def _cache_salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    check_cache_salt(salt)
    return salt


def check_cache_salt(salt: object) -> None:
    """Raises ValidationError unless it is a salt, or None."""
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise ValidationError("cache_salt", salt, f"1 to {MAX_SALT_CHARACTERS} characters")


def too_long(max_model_len: int, num_tokens: int) -> str:
    """What is said of prompts beyond the context, in the phrases that clients know it by.

    Args:
        max_model_len: longest prompt plus output, in tokens.
        num_tokens: of the prompt, at least.
    """
    return (
        f"the prompt is too long. This model's maximum context length is {max_model_len} tokens. "
        f"However, your prompt contains at least {num_tokens} input tokens, and the output needs "
        "at least 1. Please reduce the length of the input prompt."
    )


def check_text_fits(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Refuse a text that is far longer than the context, before all of it is tokenised.

    What comes first in a text has its tokens whatever follows, but for the last few: where it has
    more of them than the context, with some to spare, the whole text has.

    Raises:
        ValidationError: names `field`.
    """
    size = max(LEAST_HEAD, HEAD_CHARACTERS * max_model_len)
    while len(text) > size:
        head = len(tokenizer.encode(text[:size], add_special_tokens=False))
        if head > max_model_len + max_model_len // 8 + SPARE_TOKENS:
            raise ValidationError(
                field,
                f"a text of {len(text)} characters, more than {head} tokens",
                too_long(max_model_len, head),
            )
        size *= 4


def check_token_ids(tokens: Sequence[Any], vocab_size: int, field: str) -> None:
    """Raises ValidationError unless all are tokens of a model."""
    # in C: there may be millions
    if set(map(type, tokens)) - {int}:
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValidationError(field, token, "integers only")
    for edge in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= edge < vocab_size:
            allowed = f"token ids from 0 to {vocab_size - 1}: it is out of vocabulary"
            raise ValidationError(field, edge, allowed)


def _is_int64(number: int) -> bool:
    return INT64_MIN <= number <= INT64_MAX
