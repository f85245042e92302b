"""Prompts that come as embeddings in the place of token ids: `prompt_embeds`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features.feature import Chunk, Facts, Feature, Tokens
from jaxserve.execution.layout import array, arrays
from jaxserve.request import Request

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape


@arrays
class PromptEmbedsRow:
    """Tokens of the prompt that come as embeddings."""

    count: Any = array()


class PromptEmbeds(Feature):
    """Puts its buffers, the embeddings of a step's chunks, in the place of those of the tokens."""

    name = "prompt_embeds"
    setting = "enable_prompt_embeds"
    place = 105  # before what reads the embeddings
    of_region = True
    hooks = frozenset({"embed"})
    token_row = PromptEmbedsRow

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        request = chunk.request
        return request.prompt_embeds is not None and chunk.start < request.num_prompt

    def token_row_of(self, request: Request) -> PromptEmbedsRow:
        return PromptEmbedsRow(0 if request.prompt_embeds is None else request.num_prompt)

    def cache_key(self, request: Request) -> str:
        embeds = request.prompt_embeds
        return "" if embeds is None else hashlib.sha256(embeds.tobytes()).hexdigest()

    def buffers(self, facts: Facts) -> Any:
        return jax.ShapeDtypeStruct((facts.max_prefill_tokens, facts.hidden_size), jnp.float32)

    def step_buffers(self, chunks: list[Chunk], facts: Facts) -> np.ndarray:
        rows = np.zeros((facts.max_prefill_tokens, facts.hidden_size), np.float32)
        begin = 0
        for request, start, length in chunks:
            if request.prompt_embeds is not None:
                found = request.prompt_embeds[start : start + length]
                rows[begin : begin + len(found)] = found
            begin += length
        return rows

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        region = slice(x.shape[0] - tokens.buffers.shape[0], None)
        given = (tokens.position < tokens.values.count)[region, None]
        return x.at[region].set(jnp.where(given, tokens.buffers.astype(x.dtype), x[region]))

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return 2.0 * shape.num_prefill * facts.hidden_size
