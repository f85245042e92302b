"""The parts of a decoder that families share: token table, the run through the layers, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm, Projection, parameter
from jaxserve.models.norms import RMSNorm
from jaxserve.models.protocol import Angles, AtLayer, Attend, Cache, TokenRows
from jaxserve.models.rope import rope_tables
from jaxserve.models.streamed import StreamedBlocks
from jaxserve.parallel.spread import WHOLE
from pallas_kernels.linear import linear


class Decoder(nnx.Module):
    """Embeddings, blocks, last norm and lm head; a `protocol.Model`.

    A block is called as block(x, cache, at) -> (x, cache), see `AtLayer`. A new module holds zeros
    in `dtype`; `jaxserve.models.load_model` fills it.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        form: LinearForm,
        block: Callable[[int], Any],
        norm: type[RMSNorm] = RMSNorm,
    ):
        """`block` makes the block of a layer, `norm` is the kind of the last norm."""
        self.config = config
        self.form = form
        self.embedding = parameter(
            (config.vocab_size, config.hidden_size), dtype, ("vocab", "hidden")
        )
        self.blocks = nnx.List([block(layer) for layer in range(config.num_layers)])
        self.streamed: StreamedBlocks | None = nnx.data(None)  # those behind `blocks`, if any
        self.norm = norm(config.hidden_size, config.rms_norm_eps, dtype, form)
        # a tied table is looked up in full precision and multiplied in the quantised form
        own_head = not config.tie_word_embeddings or form.quantizes_head
        generates = config.head is None
        self.lm_head = _lm_head(config, dtype, form) if generates and own_head else None
        shape = len(config.labels), config.hidden_size
        self.score = None if generates else parameter(shape, dtype, (None, "hidden"))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Ids int32[T] -> [T, E]."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")

    def layers(
        self,
        x: jax.Array,
        rows: TokenRows,
        cache: Cache,
        attend: Attend[Cache],
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs the layers [start, stop); see `protocol.Model`."""
        end = self.config.num_layers if stop is None else stop
        angles = self.angles(rows)
        for layer in range(start, min(end, len(self.blocks))):
            x, cache = self.blocks[layer](x, cache, AtLayer(layer, rows, angles[layer], attend))
            if rows.hooks.layer is not None:
                x = rows.hooks.layer(layer, x)
        if self.streamed is not None:
            x, cache = self.through_streamed(x, rows, cache, attend, start, end)
        return (self.norm(x) if end == self.config.num_layers else x), cache

    def through_streamed(
        self,
        x: jax.Array,
        rows: TokenRows,
        cache: Cache,
        attend: Attend[Cache],
        start: int,
        end: int,
    ) -> tuple[jax.Array, Cache]:
        """Runs the layers whose weights are on the host; all are in [start, end), without hooks."""
        assert self.streamed is not None
        assert start <= self.streamed.first and end == self.config.num_layers
        assert rows.hooks.layer is None
        angles = self.angles(rows)[self.streamed.first]
        return self.streamed(x, cache, lambda layer: AtLayer(layer, rows, angles, attend))

    def angles(self, rows: TokenRows) -> list[Angles]:
        """Rotary angles of each layer."""
        config = self.config
        tables = rope_tables(config.rope, config.head_dim, rows.positions[0], rows.rope_lengths)
        return [Angles(*tables)] * config.num_layers

    def logits(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """Normed hidden states [R, E] -> float32 [R, V]; zeros of a model that classifies."""
        if self.score is not None:
            return jnp.zeros((len(hidden), self.config.vocab_size), jnp.float32)
        if self.lm_head is not None:
            return self.lm_head(hidden, out_dtype=jnp.float32, live=live)

        def tied(hidden: jax.Array, table: jax.Array, live: jax.Array | None) -> jax.Array:
            return linear(
                hidden,
                table,
                out_dtype=jnp.float32,
                live=live,
                row_invariant=self.form.row_invariant,
                backend=self.form.backend,
            )

        operands, spread = (hidden, self.embedding[...], live), self.form.spread
        if spread is None:
            return tied(*operands)
        specs = WHOLE, spread.rules.spec(("vocab", "hidden")), WHOLE
        scores: jax.Array = spread.on_devices(
            tied, operands, specs, spread.rules.spec((None, "vocab"))
        )
        return scores

    def scores(self, hidden: jax.Array) -> jax.Array:
        """Of a model that classifies: normed hidden states [N, E] -> float32 [N, labels]."""
        assert self.score is not None
        weight = self.score[...].astype(jnp.float32)
        return jnp.matmul(hidden.astype(jnp.float32), weight.T, precision=lax.Precision.HIGHEST)


def _lm_head(config: ModelConfig, dtype: str, form: LinearForm) -> Projection:
    return Projection(
        config.hidden_size,
        (config.vocab_size,),
        axes=("vocab", "hidden"),
        bias=False,
        dtype=dtype,
        form=form,
        role="head",
    )
