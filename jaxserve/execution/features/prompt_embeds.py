"""Embeddings in the place of token ids: `prompt_embeds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.execution.features.feature import Buffer, Chunk, Feature, SpecialRow, Tokens
from jaxserve.execution.layout import array, arrays
from jaxserve.memory.page_keys import KeySpan
from jaxserve.request.request import Request

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape


@arrays
class PromptEmbedsInputs:
    """Of each region token: 1 + the row of the buffer that is its embedding; 0: that of its id."""

    row: Any = array("C")


class PromptEmbeds(Feature):
    """Sends the device the rows that a step's chunks need, one behind the other.

    A subclass with its own name and setting serves another part of prompts, see `rows_of`.
    """

    name = "prompt_embeds"
    setting = "enable_prompt_embeds"
    inputs = PromptEmbedsInputs

    def rows_of(self, request: Request, span: PromptSpan) -> np.ndarray:
        """float32[span.length, E]: the rows for the places of a span; here, the caller's own.

        Rows that the engine makes are in `request.shared`, where `begins` has made them.
        """
        return np.frombuffer(span.data, "<f4").reshape(span.shape)

    def part_of(self, request: Request, span: PromptSpan, here: slice) -> np.ndarray:
        """Some of `rows_of`, for a subclass that need not make all of them."""
        return self.rows_of(request, span)[here]

    def _runs(self, chunk: Chunk) -> list[tuple[int, PromptSpan, slice]]:
        """The spans of which a chunk has places: its token of the first, and which they are."""
        request, begin, length = chunk
        found = []
        for span in request.asked.spans:
            first = max(begin, span.start)
            last = min(begin + length, span.start + span.length)
            if span.part == self.name and first < last:
                here = slice(first - span.start, last - span.start)
                found.append((first - begin, span, here))
        return found

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return bool(self._runs(chunk))

    def key_spans(self, request: Request) -> list[KeySpan]:
        return [
            KeySpan(span.start, span.length, str(span.shape).encode() + span.data)
            for span in request.asked.spans
            if span.part == self.name
        ]

    def buffers(self) -> Any:
        shape = self.facts.max_prefill_tokens, self.facts.hidden_size
        return Buffer(shape, jnp.float32)

    def step_buffers(self, chunks: list[Chunk]) -> np.ndarray:
        return np.concatenate(
            [
                self.part_of(chunk.request, span, here)
                for chunk in chunks
                for _, span, here in self._runs(chunk)
            ]
        )

    def pack(self, inputs: PromptEmbedsInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        begin, count = 0, 0
        for chunk in chunks:
            for place, _, here in self._runs(chunk):
                first, length = begin + place, here.stop - here.start
                inputs.row[first : first + length] = count + 1 + np.arange(length)
                count += length
            begin += chunk.length

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        row = tokens.inputs.row
        region = slice(x.shape[0] - len(row), None)
        given = tokens.buffers[jnp.maximum(row - 1, 0)].astype(x.dtype)
        return x.at[region].set(jnp.where(row[:, None] > 0, given, x[region]))

    def cost(self, shape: StepShape) -> float:
        return 2.0 * shape.num_prefill * self.facts.hidden_size
