"""Log-probabilities in the three shapes of the HTTP surface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.outputs import Logprob, PositionLogprobs

# JSON has no -Infinity; this is what OpenAI-compatible servers write instead.
LOWEST = -9999.0

# One position of a text: the token, and the alternatives (None at the first prompt position).
Position = tuple[int, PositionLogprobs | None]
# How a token id is shown: its text, or "token_id:<id>".
TokenText = Callable[[int], str]


def completion_logprobs(
    positions: Sequence[Position], *, top: int, first_offset: int, show: TokenText
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice.

    Args:
        positions: the tokens in the order of the text.
        top: alternatives a position, -1 for all; the token itself is listed in any case.
        first_offset: characters of the choice's text before the first position.
        show: text of a token.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    offset = first_offset
    for token_id, alternatives in positions:
        own = None if alternatives is None else alternatives.get(token_id)
        text = show(token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        token_logprobs.append(None if own is None else _finite(own.logprob))
        if alternatives is None:
            top_logprobs.append(None)
            continue
        listed = {} if own is None else {text: _finite(own.logprob)}
        for other_id, other in _best(alternatives, top):
            listed.setdefault(show(other_id), _finite(other.logprob))
        top_logprobs.append(listed)
    return {
        "text_offset": offsets,
        "token_logprobs": token_logprobs,
        "tokens": tokens,
        "top_logprobs": top_logprobs,
    }


def chat_logprobs(
    positions: Sequence[Position], *, top: int, show: TokenText, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: `top` alternatives a position, all for -1.

    Args:
        token_bytes: what a token adds to the text, which need not be UTF-8 by itself.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": show(token_id),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes(token_id)),
        }

    content = []
    for token_id, alternatives in positions:
        known = alternatives or {}
        own = known[token_id].logprob if token_id in known else LOWEST
        best = [entry(i, other.logprob) for i, other in _best(known, top)]
        content.append({**entry(token_id, own), "top_logprobs": best})
    return {"content": content}


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` list: for each prompt token the alternatives by token id."""
    return [
        None
        if alternatives is None
        else {
            str(token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in alternatives.items()
        }
        for alternatives in positions
    ]


def _best(alternatives: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The `top` most likely alternatives; -1: all, those asked for by their ids behind others."""
    best = sorted(alternatives.items(), key=lambda item: item[1].rank or math.inf)
    return best if top == -1 else best[:top]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
