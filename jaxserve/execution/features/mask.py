"""Tokens that must not be sampled: `allowed_token_ids`, `bad_words`, `min_tokens`, grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features.feature import Chunk, Facts, Feature, Need, Rows, SpecialRow
from jaxserve.execution.layout import array, arrays
from jaxserve.grammars.masks import GrammarMasks
from jaxserve.grammars.state import GrammarState
from jaxserve.request import Request

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape

WORD = 32  # tokens a word of the mask


@arrays
class MaskInputs:
    """One bit a token: bit t % 32 of word t // 32 says that a row must not sample token t."""

    forbidden: Any = array("M", "W", dtype="uint32")


class Mask(Feature):
    """Packed bitmasks, made on the host: what never changes once a request, the rest each step."""

    name = "mask"
    place = 20
    inputs = MaskInputs

    def __init__(self) -> None:
        # by slot: what is always forbidden, what `min_tokens` holds back, and by the token before
        # its last one the rest of each word of several tokens
        self._static: dict[int, np.ndarray] = {}
        self._ends: dict[int, np.ndarray] = {}
        self._words: dict[int, dict[int, list[list[int]]]] = {}
        self._free: set[int] = set()  # slots where a grammar alone forbids tokens
        self._masks = GrammarMasks()

    def need(self, request: Request) -> Need:
        if (
            request.grammar is not None
            or request.params.allowed_token_ids is not None
            or request.bad_words
        ):
            return Need.ALWAYS
        at_times = request.stop_rule.min_tokens or has_budget(request)
        return Need.AT_TIMES if at_times else Need.NEVER

    def needs_seen_tokens(self, request: Request) -> bool:
        return request.grammar is not None or any(len(word) > 1 for word in request.bad_words)

    def needed_now(self, request: Request) -> bool:
        return must_go_on(request) or (request.budget is not None and not request.budget.is_over)

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
        params = request.params
        others = words.any() or by_previous or params.min_tokens or params.ignore_eos
        self._free.discard(slot)
        if request.grammar is not None and not others:
            self._free.add(slot)

    def pack(
        self, inputs: MaskInputs, rows: list[SpecialRow], chunks: list[Chunk], facts: Facts
    ) -> None:
        constrained: list[SpecialRow] = []
        for row in rows:
            place, request, slot = row
            budget = request.budget
            forced = None if budget is None else budget.forced(request.output_token_ids)
            if forced is not None:
                inputs.forbidden[place] = ~np.uint32(0)
                inputs.forbidden[place, forced // WORD] ^= np.uint32(1 << (forced % WORD))
                continue
            if request.grammar is not None:
                constrained.append(row)
            if slot in self._free:
                continue
            words, output = inputs.forbidden[place], request.output_token_ids
            words[:] = self._static[slot]
            if must_go_on(request):
                words |= self._ends[slot]
            if output:
                for word in self._words[slot].get(output[-1], ()):
                    if output[1 - len(word) :] == word[:-1]:
                        forbid(words, word[-1:])
        if constrained:
            self._pack_grammars(inputs, constrained)

    def _pack_grammars(self, inputs: MaskInputs, rows: list[SpecialRow]) -> None:
        """Forbid what grammars do not allow, beside what is forbidden already."""
        states: list[GrammarState] = [row.request.grammar for row in rows]  # type: ignore[misc]
        outputs = [row.request.output_token_ids for row in rows]
        every = self._masks.fill(states, outputs, inputs.forbidden.shape[1])
        for (place, request, slot), state, allowed in zip(rows, states, every):
            if slot not in self._free:
                forbidden = inputs.forbidden[place]
                state.narrow(allowed, forbidden, goes_on=request.params.ignore_eos)
        inputs.forbidden[[row.place for row in rows]] = ~every

    def logits(self, inputs: MaskInputs, rows: Rows, logits: jax.Array) -> jax.Array:
        vocab_size = logits.shape[1]
        bits = inputs.forbidden[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)
        flags = (bits & 1).reshape(logits.shape[0], -1)[:, :vocab_size]
        return jnp.where(flags == 1, -jnp.inf, logits)

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return 2.1 * shape.num_special * facts.vocab_size


def has_budget(request: Request) -> bool:
    """Whether a number of tokens bounds its thoughts."""
    most = request.params.thinking_token_budget
    return most is not None and most >= 0


def forbid(words: np.ndarray, tokens: Iterable[int]) -> None:
    """Set the bits of tokens in uint32[W] words."""
    for token in tokens:
        words[token // WORD] |= np.uint32(1 << (token % WORD))


def must_go_on(request: Request) -> bool:
    """True while `min_tokens` holds back end-of-sequence and stop tokens."""
    least = request.stop_rule.min_tokens
    if request.grammar is not None:
        least = request.params.min_tokens
    return len(request.output_token_ids) + request.pending - 1 < least
