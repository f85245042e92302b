"""Presence, frequency and repetition penalties, and the token counts they need."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenCounts(NamedTuple):
    """Tokens a row has seen: prompt_seen bool[R, V], output_counts int32[R, V]."""

    prompt_seen: jax.Array
    output_counts: jax.Array


def token_counts(
    history: jax.Array, prompt_len: jax.Array, total_len: jax.Array, vocab_size: int
) -> TokenCounts:
    """Counts the tokens of each row's sequence.

    Args:
        history: int32[R, L], each row's prompt then output tokens, -1 where an embedding takes the
            place of one; what follows is not read.
        prompt_len: int32[R], tokens of the prompt.
        total_len: int32[R], tokens of prompt and output.
        vocab_size: V (static).
    """
    column = jax.lax.broadcasted_iota(jnp.int32, history.shape, 1)
    row = jax.lax.broadcasted_iota(jnp.int32, history.shape, 0)
    in_prompt = (column < prompt_len[:, None]) & (history >= 0)
    in_output = (column >= prompt_len[:, None]) & (column < total_len[:, None])
    shape = (history.shape[0], vocab_size)
    # Columns outside a sequence go to vocab_size, out of range: a negative index would wrap.
    prompt = jnp.where(in_prompt, history, vocab_size)
    output = jnp.where(in_output, history, vocab_size)
    seen = jnp.zeros(shape, jnp.bool_).at[row, prompt].set(True, mode="drop")
    counts = jnp.zeros(shape, jnp.int32).at[row, output].add(1, mode="drop")
    return TokenCounts(seen, counts)


def apply_penalties(
    logits: jax.Array,
    counts: TokenCounts,
    presence: jax.Array,
    frequency: jax.Array,
    repetition: jax.Array,
) -> jax.Array:
    """Penalised logits, float32[R, V]; an exact no-op for rows whose penalties are off.

    repetition divides positive and multiplies negative logits of tokens in prompt or output
    (CTRL, arXiv:1909.05858); frequency and presence are subtracted for output tokens, an
    occurrence or once (the OpenAI API's definition).

    Args:
        logits: float32[R, V].
        counts: tokens seen so far.
        presence, frequency: float32[R], 0 is off.
        repetition: float32[R], 1 is off.
    """
    in_output = counts.output_counts > 0
    factor = jnp.where(counts.prompt_seen | in_output, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0.0, logits / factor, logits * factor)
    logits = logits - frequency[:, None] * counts.output_counts.astype(jnp.float32)
    return logits - presence[:, None] * in_output.astype(jnp.float32)
