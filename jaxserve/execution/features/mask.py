"""Tokens that must not be sampled: `allowed_token_ids`, `bad_words`, `min_tokens`, grammars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.boundary.messages import AddGroup
from jaxserve.execution.features.feature import (
    NO_OPTIONS,
    Chunk,
    Facts,
    Feature,
    Host,
    Need,
    Rows,
    SpecialRow,
    TakenStep,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.grammars.constraint import Constraint, Demand, start_compiling
from jaxserve.grammars.forced_tokens import forced_tokens
from jaxserve.grammars.masks import GrammarMasks
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import End, FinishReason

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

WORD = 32  # tokens a word of the mask
_FREE = Constraint(None, None)


@arrays
class MaskInputs:
    """One bit a token: bit t % 32 of word t // 32 says that a row must not sample token t."""

    forbidden: Any = array("M", "W", dtype="uint32")


class Mask(Feature):
    """Packed bitmasks, made on the host: constant parts once a request, the rest each step."""

    name = "mask"
    inputs = MaskInputs

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        super().__init__(facts, options)
        # by slot: the tokens always forbidden, those that `min_tokens` holds back, and, by the
        # token before its last one, the rest of each word of several tokens
        self._static: dict[int, np.ndarray] = {}
        self._ends: dict[int, np.ndarray] = {}
        self._words: dict[int, dict[int, list[list[int]]]] = {}
        self._free: set[int] = set()  # slots where a grammar alone forbids tokens
        self._masks = GrammarMasks()
        self._host: Host | None = None

    def serve(self, host: Host) -> None:
        self._host = host

    def close(self) -> None:
        if self._host is not None and self._host.grammars is not None:
            self._host.grammars.close()

    def begins(self, asked: AddGroup) -> Future[Demand] | None:
        if asked.grammar is None and asked.thoughts is None:
            return None
        assert self._host is not None and self._host.grammars is not None
        return start_compiling(self._host.grammars, asked)

    def own(self, request: Request) -> Constraint | None:
        demand: Demand | None = request.shared.get(self.name)
        return None if demand is None else demand.begin(request.output_token_ids)

    def took(self, step: TakenStep) -> None:
        """Take the tokens that grammars force, and say why sequences cannot go on."""
        seen, host = step.seen, self._host
        constrained = [i for i, one in enumerate(seen.requests) if one.own and self.name in one.own]
        for entry in constrained:
            request = seen.requests[entry]
            assert host is not None
            grammar, budget = constraint_of(request)
            ended = entry in seen.ends
            if budget is not None and not ended:
                budget.take(request.output_token_ids)
                host.settle(request)
            if grammar is None:
                continue
            if grammar.error is not None:
                compiled = grammar.is_compiled
                request.error = FinishReason.ERROR if compiled else FinishReason.NOT_COMPILED
                if ended:
                    seen.ends[entry] = End(request.error, None)
            if not ended and (tokens := forced_tokens(request, grammar)):
                host.force(request, [seen.tokens[entry], *tokens])
                seen.requests += [request] * len(tokens)
                seen.tokens += tokens
                seen.samples += [seen.samples[entry]] * len(tokens)

    def need(self, request: Request) -> Need:
        params = request.params
        constrained = constraint_of(request).grammar is not None or request.asked.bad_words
        if constrained or params.allowed_token_ids is not None:
            return Need.ALWAYS
        at_times = request.stop_rule.min_tokens or has_budget(request)
        return Need.AT_TIMES if at_times else Need.NEVER

    def needs_seen_tokens(self, request: Request) -> bool:
        grammar, budget = constraint_of(request)
        if grammar is not None or any(len(word) > 1 for word in request.asked.bad_words):
            return True
        # a request that waits for a slot has a token in flight when its next one is planned
        pending = 1 if request.slot is None else request.pending
        return budget is not None and budget.waits(pending)

    def needed_now(self, request: Request) -> bool:
        budget = constraint_of(request).budget
        return must_go_on(request) or (budget is not None and not budget.is_over)

    def bind(self, request: Request, slot: int) -> None:
        size, rule = self.facts.vocab_size, request.stop_rule
        words = np.zeros(-(-size // WORD), np.uint32)
        if request.params.allowed_token_ids is not None:
            flags = np.ones(len(words) * WORD, np.uint8)
            flags[request.params.allowed_token_ids] = 0
            words[:] = np.packbits(flags, bitorder="little").view(np.uint32)
        # a tokenizer may know tokens that the model has no logit of
        known = [word for word in request.asked.bad_words if word[-1] < size]
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
        if constraint_of(request).grammar is not None and not others:
            self._free.add(slot)

    def pack(self, inputs: MaskInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        constrained: list[SpecialRow] = []
        for row in rows:
            place, request, slot = row
            grammar, budget = constraint_of(request)
            forced = None if budget is None else budget.forced(request.output_token_ids)
            if forced is not None:
                inputs.forbidden[place] = ~np.uint32(0)
                inputs.forbidden[place, forced // WORD] ^= np.uint32(1 << (forced % WORD))
                continue
            if grammar is not None:
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
        """Forbid the tokens that grammars do not allow, beside those forbidden already."""
        states = [grammar for row in rows if (grammar := constraint_of(row.request).grammar)]
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

    def cost(self, shape: StepShape) -> float:
        return 2.1 * shape.num_special * self.facts.vocab_size


def constraint_of(request: Request) -> Constraint:
    """The constraint of a request, at its present place."""
    state: Any = request.own.get(Mask.name, _FREE)
    constraint: Constraint = state
    return constraint


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
    if constraint_of(request).grammar is not None:
        least = request.params.min_tokens
    return len(request.output_token_ids) + request.pending - 1 < least
