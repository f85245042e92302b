"""Tokens that must not be sampled: `allowed_token_ids`, `bad_words`, `min_tokens`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features.feature import Facts, Feature, Need, Rows, SpecialRow
from jaxserve.execution.layout import array
from jaxserve.request import Request
from jaxserve.scheduling.plan import StepPlan

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape

WORD = 32  # tokens a word of the mask


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """One bit a token: bit t % 32 of word t // 32 says that a row must not sample token t."""

    forbidden: Any = array("M", "W", dtype="uint32")


class Mask(Feature):
    """Packed bitmasks, made on the host: what never changes once a request, the rest each step."""

    name = "mask"
    inputs = MaskInputs

    def __init__(self) -> None:
        # by slot: what is always forbidden, what `min_tokens` holds back, and by the token before
        # its last one the rest of each word of several tokens
        self._static: dict[int, np.ndarray] = {}
        self._ends: dict[int, np.ndarray] = {}
        self._words: dict[int, dict[int, list[list[int]]]] = {}

    def need(self, request: Request) -> Need:
        if request.params.allowed_token_ids is not None or request.bad_words:
            return Need.ALWAYS
        return Need.AT_TIMES if request.stop_rule.min_tokens else Need.NEVER

    def needed_now(self, request: Request) -> bool:
        return must_go_on(request)

    def bind(self, request: Request, slot: int, facts: Facts) -> None:
        size, rule = facts.vocab_size, request.stop_rule
        words = np.zeros(-(-size // WORD), np.uint32)
        if request.params.allowed_token_ids is not None:
            flags = np.ones(len(words) * WORD, np.uint8)
            flags[request.params.allowed_token_ids] = 0
            words[:] = np.packbits(flags, bitorder="little").view(np.uint32)
        # a tokenizer may know tokens that the model has no logit of
        known = [word for word in request.bad_words if word[-1] < size]
        forbid(words, (word[0] for word in known if len(word) == 1))
        ends = np.zeros_like(words)
        forbid(ends, (t for t in rule.eos_token_ids | rule.stop_token_ids if t < size))
        by_previous: dict[int, list[list[int]]] = {}
        for word in known:
            if len(word) > 1:
                by_previous.setdefault(word[-2], []).append(word)
        self._static[slot], self._ends[slot], self._words[slot] = words, ends, by_previous

    def pack(
        self, inputs: MaskInputs, rows: list[SpecialRow], plan: StepPlan, facts: Facts
    ) -> None:
        for place, request, slot in rows:
            words, output = inputs.forbidden[place], request.output_token_ids
            words[:] = self._static[slot]
            if must_go_on(request):
                words |= self._ends[slot]
            if output:
                for word in self._words[slot].get(output[-1], ()):
                    if output[1 - len(word) :] == word[:-1]:
                        forbid(words, word[-1:])

    def logits(self, inputs: MaskInputs, rows: Rows, logits: jax.Array) -> jax.Array:
        vocab_size = logits.shape[1]
        bits = inputs.forbidden[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)
        flags = (bits & 1).reshape(logits.shape[0], -1)[:, :vocab_size]
        return jnp.where(flags == 1, -jnp.inf, logits)

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return 2.1 * shape.num_special * facts.vocab_size


def forbid(words: np.ndarray, tokens: Iterable[int]) -> None:
    """Set the bits of tokens in uint32[W] words."""
    for token in tokens:
        words[token // WORD] |= np.uint32(1 << (token % WORD))


def must_go_on(request: Request) -> bool:
    """True while `min_tokens` holds back end-of-sequence and stop tokens."""
    rule = request.stop_rule
    return len(request.output_token_ids) + request.pending - 1 < rule.min_tokens
