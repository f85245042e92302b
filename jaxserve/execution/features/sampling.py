"""Temperature, top-k, top-p and min-p: the feature that draws the tokens, in every program."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.execution.features.feature import Feature, Need, Rows
from jaxserve.execution.layout import array, arrays
from jaxserve.parallel.mesh import is_divided, row_spec
from jaxserve.params.sampling_params import seed_words
from jaxserve.request.request import Request
from jaxserve.sampling.sampler import Draw, Draws, SamplingRows, sample, sample_apart
from pallas_kernels import Backends, kept_threshold

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

PASSES = 8.0  # over the logits: maximum, weights, borders of the filters, sums, the draw


def draws_on(mesh: Mesh, backends: Backends, *, apart: bool = False) -> Draws:
    """Draws tokens on the devices of a mesh.

    Args:
        mesh: of the model.
        backends: which kernel finds the borders of the filters.
        apart: draw one row after the other, see `sample_apart`.
    """
    threshold = partial(kept_threshold, **backends.threshold_options)
    draw: Draw = partial(sample_apart if apart else sample, threshold=threshold)
    if not is_divided(mesh.size):
        return Draws(draw, draw)
    everywhere = PartitionSpec()

    def own(logits: jax.Array, rows: SamplingRows) -> jax.Array:
        first = lax.axis_index("model") * len(logits)
        mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, len(logits)), rows)
        return lax.all_gather(draw(logits, mine), "model", tiled=True)

    def on_devices(logits: jax.Array, rows: SamplingRows) -> jax.Array:
        spec = row_spec(len(logits), mesh)
        work = draw if spec == everywhere else own
        # the parameters lie on all devices, and stay there: XLA would spread all that they are of
        run = jax.shard_map(
            work, mesh=mesh, in_specs=(spec, everywhere), out_specs=everywhere, check_vma=False
        )
        drawn: jax.Array = run(logits, rows)
        return drawn

    shared: Draw = jax.shard_map(
        draw, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    return Draws(shared, on_devices)


@arrays
class SamplingRow:
    """The sampling parameters of a row; the seed's words are a threefry key."""

    temperature: Any = array(dtype="float32")
    top_p: Any = array(dtype="float32")
    min_p: Any = array(dtype="float32")
    top_k: Any = array()
    seed_high: Any = array(dtype="uint32")
    seed_low: Any = array(dtype="uint32")


class Sampling(Feature):
    """Draws one token a row; rows of temperature 0 take the most likely one."""

    name = "sampling"
    row = SamplingRow
    special = False

    def need(self, request: Request) -> Need:
        return Need.ALWAYS

    def row_of(self, request: Request) -> SamplingRow:
        params = request.params
        high, low = seed_words(request.seed)
        return SamplingRow(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            # more than the vocabulary keeps all of it, and may be more than an int32 holds
            top_k=min(params.top_k, self.facts.vocab_size),
            seed_high=high,
            seed_low=low,
        )

    def sample(self, rows: Rows, logits: jax.Array) -> jax.Array:
        row = rows.values[self.name]
        draws = self.facts.draws
        draw = draws.divided if rows.drawn_alone else draws.shared
        return draw(
            logits,
            SamplingRows(
                temperature=row.temperature,
                top_p=row.top_p,
                top_k=row.top_k,
                min_p=row.min_p,
                seed=jnp.stack([row.seed_high, row.seed_low], axis=1),
                position=rows.position + 1,
            ),
        )

    def cost(self, shape: StepShape) -> float:
        rows = shape.num_rows + (shape.num_special if shape.num_special < shape.num_rows else 0)
        return PASSES * rows * self.facts.vocab_size
