"""Tokens that a grammar forces are taken in one go, and failed grammars end their sequences."""

from __future__ import annotations

from jaxserve.request import End, FinishReason, Request, RequestState
from jaxserve.scheduling.plan import SeenTokens
from jaxserve.scheduling.scheduler import Scheduler

# A chunk of forced tokens costs a prefill region, each token alone a row of a step.
MIN_FORCED = 2


class Forcing:
    """What follows from the grammars of sequences whose tokens were seen.

    Args:
        scheduler: makes sequences go on with what is forced.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler

    def go_on(self, seen: SeenTokens) -> None:
        """Add to what was seen the tokens that must follow; say why sequences ended."""
        for entry in range(len(seen.requests)):
            request = seen.requests[entry]
            if request.budget is not None and entry not in seen.ends:
                self.follow(request)
            if request.grammar is None:
                continue
            if entry in seen.ends:
                if not request.grammar.is_compiled:
                    seen.ends[entry] = End(FinishReason.NOT_COMPILED, None)
                elif request.grammar.error is not None:
                    seen.ends[entry] = End(FinishReason.ERROR, None)
            elif tokens := self._forced(request):
                last = seen.tokens[entry]
                self._scheduler.force(request, [last, *tokens])
                seen.requests += [request] * len(tokens)
                seen.tokens += tokens
                seen.samples += [seen.samples[entry]] * len(tokens)

    @staticmethod
    def follow(request: Request) -> None:
        """See whether thoughts are so long that the next token has to wait for those before."""
        assert request.budget is not None
        request.budget.take(request.output_token_ids)
        request.needs_seen_tokens = request.budget.waits(request.pending)
        if request.needs_seen_tokens:
            request.decode_until = 0

    @staticmethod
    def _forced(request: Request) -> list[int]:
        """Tokens that follow whatever is sampled; none where one of them is to be looked at."""
        params = request.params
        if request.state is not RequestState.RUNNING or params.logprobs is not None:
            return []
        if request.bad_words or params.allowed_token_ids is not None:
            return []  # the mask may forbid what the grammar demands
        assert request.grammar is not None and not request.pending
        output, rule = request.output_token_ids, request.stop_rule
        found = request.grammar.forced(output)[: rule.max_tokens - len(output) - 1]
        for place, token in enumerate(found):
            if token in rule.end_token_ids:
                del found[place:]
                break
        return found if len(found) >= MIN_FORCED else []
