"""From what a caller passes (text, token ids, messages) to requests that the scheduler takes."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.request import Request, StopRule
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.tokenization.bad_words import bad_word_sequences
from jaxserve.tokenization.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids")  # of a prompt that is a mapping
# Tokens whose check takes a fraction of a millisecond.
QUICK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request and the `n` sequences that serve it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Request]
    arrival_time: float


class InputProcessor:
    """Validates and tokenises.

    Args:
        config: the resolved engine configuration.
        model: the model's configuration.
        tokenizer: None when `skip_tokenizer_init` is set.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None):
        assert config.max_model_len is not None
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = config.max_model_len
        # a chat model made from a base model may say only in its tokenizer what ends a turn
        own = None if tokenizer is None else tokenizer.eos_token_id
        self._eos_token_ids = frozenset([*model.eos_token_ids, *([] if own is None else [own])])
        self._numbers = itertools.count()  # next() is atomic: prepare() runs in threads

    @staticmethod
    def is_quick(prompt: Prompt, params: SamplingParams) -> bool:
        """True if `prepare` tokenises nothing and has few tokens to check."""
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(tokens, list) or params.bad_words:
            return False
        named = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
        return len(tokens) + sum(len(ids) for ids in named if ids) <= QUICK_TOKENS

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        arrival_time: float | None = None,
    ) -> PreparedRequest:
        """Make the sequences of one request.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            params: sampling parameters; `n` of them run as separate sequences.
            request_id: unique among live requests.
            arrival_time: when the caller asked, by `time.monotonic()`; now when None.

        Raises:
            ValidationError: names the prompt or the parameter that cannot be served.
        """
        arrived = time.monotonic() if arrival_time is None else arrival_time
        text, tokens = self._tokenise(prompt)
        room = self._max_model_len - len(tokens)
        if not tokens:
            raise ValidationError("prompt", prompt, "a prompt that is not empty")
        if room < 1:
            raise ValidationError(
                "prompt",
                f"{len(tokens)} tokens",
                f"at most {self._max_model_len - 1} tokens: max_model_len is "
                f"{self._max_model_len}, one of them for output",
            )
        params.verify(self._model.vocab_size, self._max_model_len, self._config.max_logprobs)
        if self._tokenizer is None and params.detokenize:
            params = params.clone()
            params.detokenize = False
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
        sequences = self._sequences(tokens, params, most, arrived)
        return PreparedRequest(request_id, text, tokens, params, sequences, arrived)

    def _sequences(
        self, tokens: list[int], params: SamplingParams, max_tokens: int, arrival_time: float
    ) -> list[Request]:
        words: list[list[int]] = []
        if params.bad_words:
            assert self._tokenizer is not None
            words = bad_word_sequences(self._tokenizer, params.bad_words)
        self._check_allowed(params, words)
        rule = StopRule(
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            min_tokens=params.min_tokens,
            max_tokens=max_tokens,
            ignore_eos=params.ignore_eos,
        )
        group = SequenceGroup() if params.n > 1 else None
        number = next(self._numbers)
        seed = self._seed(params, number)
        return [
            Request(
                f"{number}.{index}",  # the engine's own id: callers' ids may collide over time
                tokens,
                params.for_child(index),
                rule,
                (seed + index) % 2**64,
                bad_words=words,
                arrival_time=arrival_time,
                group=group,
            )
            for index in range(params.n)
        ]

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

    def _seed(self, params: SamplingParams, number: int) -> int:
        """The request's own seed, or one that follows from the engine's and the arrival order."""
        if params.seed is not None:
            return params.seed % 2**64
        text = f"{self._config.seed}:{number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            return self._tokenise_mapping(prompt)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValidationError("prompt", prompt, "token ids when skip_tokenizer_init is set")
            # a tokenizer may add a token of its own to an empty text: still nothing to continue
            return prompt, self._tokenizer.encode(prompt) if prompt else []
        return None, self._check_tokens(prompt)

    def _tokenise_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        for name, value in prompt.items():
            if name not in PROMPT_KEYS and value is not None:
                raise ValidationError(f"prompt[{name!r}]", value, " and ".join(PROMPT_KEYS))
        text, tokens = (prompt.get(name) for name in PROMPT_KEYS)
        if text is not None and not isinstance(text, str):
            raise ValidationError("prompt", text, "text; token ids go to prompt_token_ids")
        if tokens is not None:
            return text, self._check_tokens(tokens)
        if text is None:
            raise ValidationError("prompt", dict(prompt), " or ".join(PROMPT_KEYS))
        return self._tokenise(text)

    def _check_tokens(self, tokens: Any) -> list[int]:
        if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
            raise ValidationError("prompt_token_ids", tokens, "a list of token ids")
        checked = []
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValidationError("prompt_token_ids", token, "integers only")
            if not 0 <= token < self._model.vocab_size:
                raise ValidationError(
                    "prompt_token_ids", token, f"token ids from 0 to {self._model.vocab_size - 1}"
                )
            checked.append(token)
        return checked
