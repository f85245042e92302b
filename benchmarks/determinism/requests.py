"""Requests of every kind whose answers a deterministic engine gives bit for bit in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve import BeamSearchParams, PoolingParams, SamplingParams
from jaxserve.client.input_processor import Params
from jaxserve.outputs import PoolingRequestOutput, RequestOutput

Told = tuple[Any, ...]  # an answer; floats by their bits
TURN = 24  # tokens that a chat's next turn adds
MOST_TOKENS = 40  # of an answer
BEGINNINGS = {40: 4, 130: 4, 300: 3, 1100: 1}  # tokens, and how often one is drawn


class Asked(NamedTuple):
    """A request.

    Attributes:
        prompt: token ids.
        params: its own for each call: an engine keeps no request's.
        follows: index of the request whose prompt and answer this one's prompt goes on from; None:
            it is no later turn of a chat.
    """

    prompt: list[int]
    params: Params
    follows: int | None = None


def told(output: RequestOutput | PoolingRequestOutput[Any]) -> Told:
    """What a finished request was answered, comparable bit for bit."""
    if isinstance(output, PoolingRequestOutput):
        return ("vector", *(float(x).hex() for x in output.outputs.data))
    answers = [
        (
            tuple(one.token_ids),
            None if one.cumulative_logprob is None else one.cumulative_logprob.hex(),
            _positions(one.logprobs),
            one.finish_reason,
        )
        for one in output.outputs
    ]
    return ("tokens", *answers, _positions(output.prompt_logprobs))


def _positions(positions: Sequence[Any] | None) -> tuple[Any, ...] | None:
    if positions is None:
        return None
    return tuple(
        None if one is None else tuple((t, p.logprob.hex(), p.rank) for t, p in one.items())
        for one in positions
    )


def difference(alone: Told, among: Told) -> str | None:
    """What of an answer differs, and from where on; None: nothing."""
    if alone == among:
        return None
    if alone[0] == "vector":
        wrong = sum(a != b for a, b in zip(alone[1:], among[1:]))
        return f"{wrong} of {len(alone) - 1} numbers of the vector"
    for index, (one, other) in enumerate(zip(alone[1:-1], among[1:-1])):
        for place, (a, b) in enumerate(zip(one[0], other[0])):
            if a != b:
                return f"token {place} of completion {index}"
        for place, (a, b) in enumerate(zip(one[2] or (), other[2] or ())):
            if a != b:
                return f"logprobs of token {place} of completion {index}"
        if one != other:
            return f"completion {index}"
    for place, (a, b) in enumerate(zip(alone[-1] or (), among[-1] or ())):
        if a != b:
            return f"logprobs of prompt token {place}"
    return "the length of something"


def made(rng: random.Random, count: int, vocab_size: int, longest: int) -> list[Asked]:
    """Requests of every kind; many begin alike, so that they find each other's pages.

    Args:
        rng: all that is drawn comes from it.
        count: how many.
        vocab_size: ids from 5 on are taken.
        longest: tokens of a prompt and its answer, at most.
    """

    def tokens(length: int) -> list[int]:
        return [rng.randrange(5, vocab_size) for _ in range(length)]

    beginnings = [tokens(min(length, longest // 2)) for length in BEGINNINGS]
    found: list[Asked] = []
    for index in range(count):
        (begin,) = rng.choices(beginnings, [*BEGINNINGS.values()])
        begin = begin if rng.random() < 0.6 else []
        begin = begin[: rng.choice([len(begin), len(begin), rng.randrange(len(begin) + 1)])]
        prompt = begin + tokens(rng.choice([1, 2, 7, 16, 17, 40, 90]))
        asked = params(rng, index, vocab_size)
        found.append(Asked(prompt[: longest - MOST_TOKENS], asked))
    return found


def next_turn(rng: random.Random, before: Asked, index: int, answer: Told, vocab: int) -> Asked:
    """The next turn of a chat: what was asked and answered before, then something new."""
    more = [rng.randrange(5, vocab) for _ in range(TURN)]
    first = answer[1][0] if answer[0] == "tokens" else ()
    return Asked([*before.prompt, *first, *more], params(rng, 0, vocab), index)


def params(rng: random.Random, index: int, vocab_size: int) -> Params:
    """Parameters of a request; the kinds go round by `index`."""
    most = rng.choice([1, 3, 8, 20, MOST_TOKENS])
    common: dict[str, Any] = {"max_tokens": most, "ignore_eos": rng.random() < 0.7}
    common["seed"] = rng.randrange(2**31)
    drawn = {"temperature": rng.choice([0.6, 1.0, 1.7]), "logprobs": 2}
    kinds: list[dict[str, Any] | Params] = [
        {"temperature": 0.0, "logprobs": 3},
        drawn,
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
        drawn | {"top_p": 0.8},
        PoolingParams(pooling="last"),
        drawn | {"top_k": 20, "min_p": 0.02},
        {"temperature": 0.0},
        drawn | {"n": 3},
        PoolingParams(pooling="mean"),
        drawn | {"presence_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.95},
        {"temperature": 1.0},
        BeamSearchParams(beam_width=3, max_tokens=most),
        drawn | {"logit_bias": {str(rng.randrange(5, vocab_size)): 2.5}, "top_k": 100},
        PoolingParams(pooling="cls", layer=2),
        {"temperature": 0.0, "logprobs": 20, "frequency_penalty": 0.4},
        drawn | {"top_p": 0.9, "prompt_logprobs": 0},
    ]
    kind = kinds[index % len(kinds)]
    return SamplingParams(**common, **kind) if isinstance(kind, dict) else kind
