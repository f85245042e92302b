"""How likely given texts are, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.client.prompt_reader import Prompt
from jaxserve.errors import ValidationError
from jaxserve.outputs import RequestOutput
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.tokenization.tokenizer import Tokenizer

# what scores a prompt: one token is drawn and not used
SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


@dataclass(frozen=True)
class Loglikelihood:
    """Log-probabilities of the tokens of one text.

    Attributes:
        token_ids: of the tokens that are scored: all but the first, or those of a continuation.
        logprobs: float64[tokens], natural logarithms, by the model itself.
        ranks: int64[tokens], 1 where the token is the most likely one.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    ranks: np.ndarray

    @property
    def total(self) -> float:
        """The log-probability of all of them."""
        return float(self.logprobs.sum())

    @property
    def is_greedy(self) -> bool:
        """Whether each is the most likely one."""
        return bool((self.ranks == 1).all())


def scores_of(output: RequestOutput, first: int = 1) -> Loglikelihood:
    """The scores of a prompt's tokens from index `first` on, at least 1."""
    positions, tokens = output.prompt_logprobs, output.prompt_token_ids
    assert positions is not None
    entries = []
    for token, position in zip(tokens[first:], positions[first:], strict=True):
        assert position is not None
        entries.append(position[token])
    return Loglikelihood(
        tokens[first:],
        np.array([entry.logprob for entry in entries], np.float64),
        np.array([entry.rank for entry in entries], np.int64),
    )


def parted(given: Any, tokenizer: Tokenizer | None) -> tuple[Prompt, int]:
    """A text as a prompt, and the index of the first token that is scored.

    Args:
        given: a prompt; or a pair of texts, or of lists of ids: context and continuation.
        tokenizer: for pairs of texts; None where there is none.

    Raises:
        ValidationError: a pair that is none, or whose context has no token.
    """
    if not isinstance(given, tuple):
        return given, 1
    allowed = "a text, or a pair (context, continuation) of texts or of lists of ids"
    if len(given) != 2:
        raise ValidationError("texts", given, allowed)
    context, continuation = given
    if isinstance(context, str) and isinstance(continuation, str) and tokenizer is not None:
        # blanks between the two are the continuation's, since tokens begin with them
        begin = len(context.rstrip()) or len(context)
        ids = tokenizer.encode(context + continuation)
        first = len(tokenizer.encode(context[:begin]))
    elif all(isinstance(p, Sequence) and not isinstance(p, str) for p in given):
        ids, first = [*context, *continuation], len(context)
    else:
        raise ValidationError("texts", given, allowed)
    if not 0 < first < len(ids):
        raise ValidationError("texts", given, "a pair whose parts have at least one token each")
    return ids, first
