"""Hidden states of prompts, pooled: `LLM.embed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.execution.features.feature import (
    Chunk,
    Facts,
    Feature,
    Region,
    SpecialRow,
    Tokens,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.request import Request, RequestState

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape

NORMED = -1  # the layer whose output went through the final norm
SHORTEST = 1e-12  # a shorter vector is divided by this instead of its length


@arrays
class PoolingRow:
    """Whose output is wanted: 0 what enters the first layer, i of the i-th, or NORMED."""

    layer: Any = array()


@arrays
class PoolingInputs:
    """Of each region token: its lane, and 1 where its hidden state counts."""

    lane: Any = array("C")
    counts: Any = array("C")


@arrays
class PoolingOutputs:
    """Of each lane: the sum of the hidden states that count."""

    total: Any = array("N", "E", dtype="float32")


class Pooling(Feature):
    """Sums hidden states of a chunk's tokens; the host adds up the chunks of a prompt.

    Being of the region alone it lies in the largest program and costs the others nothing.
    """

    name = "pooling"
    setting = "enable_embeddings"
    place = 110
    of_region = True
    hooks = frozenset({"embed", "layer"})
    token_row = PoolingRow
    inputs = PoolingInputs
    outputs = PoolingOutputs

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return chunk.request.pooling is not None

    def token_row_of(self, request: Request) -> PoolingRow:
        layer = None if request.pooling is None else request.pooling.layer
        return PoolingRow(NORMED if layer is None else layer)

    def cache_key(self, request: Request) -> str:
        return ""

    def pack(
        self, inputs: PoolingInputs, rows: list[SpecialRow], chunks: list[Chunk], facts: Facts
    ) -> None:
        begin = 0
        for lane, (request, start, length) in enumerate(chunks):
            inputs.lane[begin : begin + length] = lane
            if request.pooling is not None:
                positions = np.arange(start, start + length)
                counts = {
                    "mean": positions >= 0,
                    "last": positions == request.num_prompt - 1,
                    "cls": positions == 0,
                }
                inputs.counts[begin : begin + length] = counts[request.pooling.pooling]
            begin += length

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        tokens.kept["layer"] = tokens.values.layer
        tokens.kept["chosen"] = x
        return x

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        wanted = tokens.values.layer == layer + 1
        tokens.kept["chosen"] = jnp.where(wanted[:, None], x, tokens.kept["chosen"])
        return x

    def region(self, inputs: PoolingInputs, region: Region, facts: Facts) -> PoolingOutputs:
        is_normed = region.kept["layer"] == NORMED
        chosen = jnp.where(is_normed[:, None], region.hidden, region.kept["chosen"])
        # rows without a token may hold anything, and 0 * NaN is NaN
        counts = inputs.counts > 0
        chosen = jnp.where(counts[:, None], chosen, 0).astype(jnp.float32)
        lanes = jnp.arange(region.num_lanes)
        belongs = (inputs.lane == lanes[:, None]).astype(jnp.float32)
        return PoolingOutputs(jnp.matmul(belongs, chosen, precision=lax.Precision.HIGHEST))

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return 2.0 * shape.num_prefill * facts.hidden_size


class PooledChunks:
    """What the chunks of prompts gave so far, by sequence id; host side."""

    def __init__(self) -> None:
        self._totals: dict[str, np.ndarray] = {}

    def add(self, chunks: list[Chunk], values: PoolingOutputs) -> None:
        """Take in a step, in the order of the steps."""
        for lane, (request, start, _) in enumerate(chunks):
            # a request that was aborted while the step ran has nobody left to tell
            if request.pooling is None or request.state is RequestState.FINISHED:
                continue
            name, total = request.request_id, values.total[lane]
            if start and name in self._totals:
                total = self._totals[name] + total
            self._totals[name] = total  # from the start again after a preemption

    def take(self, requests: list[Request]) -> dict[str, list[float]]:
        """The vectors of those whose prompts are done, by sequence id."""
        if not self._totals:
            return {}
        return {r.request_id: self._vector(r).tolist() for r in requests if r.pooling is not None}

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence that is aborted."""
        self._totals.pop(sequence_id, None)

    def _vector(self, request: Request) -> np.ndarray:
        vector = self._totals.pop(request.request_id)
        assert request.pooling is not None
        if request.pooling.pooling == "mean":
            vector = vector / np.float32(request.num_prompt)
        if request.pooling.normalize:
            length = np.maximum(np.linalg.norm(vector), np.float32(SHORTEST))
            vector = vector / length
        return vector
