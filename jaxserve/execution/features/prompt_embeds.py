"""Prompts that come as embeddings in the place of token ids: `prompt_embeds`."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features.feature import Buffer, Chunk, Feature, Tokens
from jaxserve.execution.layout import array, arrays
from jaxserve.messages import AddGroup
from jaxserve.prompt_embeds import embeds_from_text
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
    token_row = PromptEmbedsRow

    def begins(self, asked: AddGroup) -> Future[np.ndarray] | None:
        if asked.prompt_embeds is None:
            return None
        embeds: Future[np.ndarray] = Future()
        embeds.set_result(embeds_from_text(asked.prompt_embeds, len(asked.prompt_token_ids)))
        return embeds

    def _embeds(self, request: Request) -> np.ndarray | None:
        """float32[num_prompt, E] in the place of the prompt's token ids; None: it has ids."""
        return request.shared.get(self.name)

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        request = chunk.request
        return self._embeds(request) is not None and chunk.start < request.num_prompt

    def token_row_of(self, request: Request) -> PromptEmbedsRow:
        return PromptEmbedsRow(0 if self._embeds(request) is None else request.num_prompt)

    def cache_key(self, request: Request) -> str:
        embeds = self._embeds(request)
        return "" if embeds is None else hashlib.sha256(embeds.tobytes()).hexdigest()

    def buffers(self) -> Any:
        shape = self.facts.max_prefill_tokens, self.facts.hidden_size
        return Buffer(shape, jnp.float32)

    def step_buffers(self, chunks: list[Chunk]) -> np.ndarray:
        size = sum(chunk.length for chunk in chunks)
        rows = np.zeros((size, self.facts.hidden_size), np.float32)
        begin = 0
        for request, start, length in chunks:
            embeds = self._embeds(request)
            if embeds is not None:
                found = embeds[start : start + length]
                rows[begin : begin + len(found)] = found
            begin += length
        return rows

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        region = slice(x.shape[0] - tokens.buffers.shape[0], None)
        given = (tokens.position < tokens.values.count)[region, None]
        return x.at[region].set(jnp.where(given, tokens.buffers.astype(x.dtype), x[region]))

    def cost(self, shape: StepShape) -> float:
        return 2.0 * shape.num_prefill * self.facts.hidden_size
