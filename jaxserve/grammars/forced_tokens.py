"""The tokens that a grammar forces, which are taken in one go."""

from __future__ import annotations

from jaxserve.grammars.grammar_state import GrammarState
from jaxserve.request.request import Request, RequestState

# A chunk of forced tokens costs a prefill region, each token alone a row of a step.
MIN_FORCED = 2


def forced_tokens(request: Request, grammar: GrammarState) -> list[int]:
    """Tokens that follow whatever is sampled; none where one of them is to be looked at.

    Args:
        request: that goes on.
        grammar: of its output.
    """
    asked = request.asked
    if request.state is not RequestState.RUNNING or not request.takes_forced:
        return []
    if asked.bad_words or asked.params.allowed_token_ids is not None:
        return []  # the mask may forbid what the grammar demands
    assert not request.pending
    output, rule = request.output_token_ids, asked.stop_rule
    found = grammar.forced(output)[: rule.max_tokens - len(output) - 1]
    for place, token in enumerate(found):
        if token in rule.end_token_ids:
            del found[place:]
            break
    return found if len(found) >= MIN_FORCED else []
