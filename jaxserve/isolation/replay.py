"""What a new engine is sent of a request that another one has begun.

Random numbers follow from seed and position, and everything else that a token depends on from the
tokens before it. So a sequence that is given prompt and output goes on as if nothing had happened:
penalties, min_tokens, max_tokens and bad words see its output as output. Text, stop strings and
log-probabilities of what has come are the client's and are there still. Of a beam search and of an
embedding nothing comes before the end: they begin again.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from jaxserve.boundary.messages import AddGroup
from jaxserve.client.output_processor import RequestProgress


def resumed(found: RequestProgress) -> list[AddGroup]:
    """The messages by which a request goes on: a sequence with tokens is a group of its own."""
    group, params = found.group, found.group.params
    if group.beams is not None:
        return [group]
    if found.is_scored and params.prompt_logprobs is not None:
        params = copy.copy(params)
        params.prompt_logprobs = None
    seeds = dict(zip(group.sequence_ids, group.seeds, strict=True))

    def part(ids: list[str], output: list[int]) -> AddGroup:
        return replace(
            group,
            sequence_ids=ids,
            seeds=[seeds[name] for name in ids],
            params=params,
            output_token_ids=output,
        )

    begun = [part([name], tokens) for name, tokens in found.tokens.items() if tokens]
    rest = [name for name, tokens in found.tokens.items() if not tokens]
    return begun + ([part(rest, [])] if rest else [])
