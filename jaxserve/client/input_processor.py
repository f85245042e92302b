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
from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.model_facts import ModelFacts, eos_token_ids
from jaxserve.boundary.prompt_spans import NO_ID
from jaxserve.client.prompt_reader import NO_LIST, Prompt, PromptReader, tokens_of
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

Params = SamplingParams | BeamSearchParams | PoolingParams

_ONE_TOKEN = SamplingParams(
    temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
MAX_SALT_CHARACTERS = 1024
_NONE = frozenset[int]()
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
        prompts: reads prompts and their images.
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
        self.prompts = PromptReader(config, model, tokenizer, folder)

    @staticmethod
    def is_quick(prompt: Prompt, params: Params) -> bool:
        """True if `prepare` tokenises nothing and has few tokens and sequences to go through."""
        tokens = tokens_of(prompt)
        if tokens is None:
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

    def check_beside_images(
        self, prompt: Mapping[str, Any], params: Params, queueing: Queueing | None
    ) -> None:
        """Check all of a request that does not depend on its images, before they are fetched.

        Raises:
            ValidationError: as `prepare`.
        """
        self.prepare(self.prompts.without_images(prompt), params, "", queueing)

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
        self.prompts.close()

    def prepare(
        self, prompt: Prompt, params: Params, request_id: str, queueing: Queueing | None = None
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
        text, tokens, spans = self.prompts.read(prompt)
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
            bad_words=words or NO_LIST,
            queueing=queueing,
            cache_salt=cache_salt,
            spans=NO_LIST,
            grammar=grammar,
            output_token_ids=NO_LIST,
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


def _is_int64(number: int) -> bool:
    return INT64_MIN <= number <= INT64_MAX
