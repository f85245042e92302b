"""Deterministic engines, and what they answer alone."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.determinism.requests import Asked, Told, made, next_turn
from benchmarks.determinism.schedules import alone
from jaxserve import LLM

SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
CHATS = 6  # requests that go on for a second turn


def deterministic_engine(model: str, dtype: str, **settings: Any) -> LLM:
    """An engine with everything that the requests ask for, and few programs to compile."""
    asked: dict[str, Any] = {"deterministic": True, "enable_embeddings": True}
    asked |= {"use_tqdm_on_load": False, **SIZES}
    return LLM(model, dtype=dtype, **asked | settings)


def asked_and_alone(
    engine: LLM, rng: random.Random, count: int, longest: int
) -> tuple[list[Asked], list[Told]]:
    """Requests, and how each is answered alone; the last are second turns of chats.

    Args:
        engine: that answers.
        rng: all that is drawn comes from it.
        count: how many, above `CHATS`.
        longest: tokens of a prompt and its answer, at most.
    """
    vocab_size = engine.model_config.vocab_size
    requests = made(rng, count - CHATS, vocab_size, longest)
    told = alone(engine, requests)
    turns = [next_turn(rng, requests[i], i, told[i], vocab_size) for i in range(CHATS)]
    return requests + turns, told + alone(engine, turns)
