"""The step: a pure function from (parameters, device state, blob) to (device state, result)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.features import Facts, Feature, Region
from jaxserve.execution.inputs import (
    BlobLayout,
    Result,
    ResultLayout,
    StepInputs,
    StepOutputs,
    contained,
)
from jaxserve.execution.parameters import ModelStructure
from jaxserve.execution.sampled_rows import if_wanted, sample_rows
from jaxserve.models.attention import PagedBatch, make_attend
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Llama
from pallas_kernels import Backends, PrefillLanes


class DeviceState(NamedTuple):
    """What stays on the device between steps; donated to every step.

    S is `max_num_seqs`; row S of both tables is the trash row that unused rows read and write.

    Attributes:
        kv_pages: [num_layers * num_pages, page_size, 2, num_kv_heads, head_dim] the KV pool.
        page_table: int32[S + 1, P] page ids by slot.
        history: int32[S + 1, max_model_len + 1] token ids by slot and position.
    """

    kv_pages: jax.Array
    page_table: jax.Array
    history: jax.Array


@dataclass(frozen=True)
class StepSpec:
    """Everything static about one program."""

    config: ModelConfig
    features: tuple[Feature, ...]
    facts: Facts
    layout: BlobLayout
    result: ResultLayout
    num_pages: int
    max_num_seqs: int
    backends: Backends
    mesh: Mesh


def run_step(
    spec: StepSpec,
    structure: ModelStructure,
    leaves: tuple[jax.Array, ...],
    state: DeviceState,
    blob: jax.Array,
) -> tuple[DeviceState, jax.Array]:
    """Compute one step.

    The modules are merged inside the traced function and parameters cross the jit boundary as flat
    leaves: calling a compiled function with a module costs milliseconds, with leaves microseconds.

    Args:
        spec: static shape and choices of the program.
        structure: of the Flax module, from `split_model`.
        leaves: its parameters, from `split_model`.
        state: the device state; donated by the caller.
        blob: int32[spec.layout.size], see `BlobLayout`.

    Returns:
        The next device state and the result, int32, see `ResultLayout`.
    """
    model = structure.merge(leaves)
    shape = spec.layout.shape
    given = spec.layout.read(blob)
    step = given.step

    slot_updates, index_updates, page_updates = step.updates
    page_table = state.page_table.at[slot_updates, index_updates].set(page_updates)
    history = state.history
    slots, positions = step.slot[: shape.num_decode], step.position[: shape.num_decode]
    prompt_lens = step.prompt_len[: shape.num_decode]
    if shape.num_prefill:
        lane_slots = step.slot[shape.num_decode :]
        # region rows without a lane carry lane N and fall on the trash slot
        region_slots = jnp.append(lane_slots, spec.max_num_seqs)[step.token_lane]
        history = history.at[region_slots, step.token_position].set(step.token)
        tokens = jnp.concatenate([history[slots, positions], step.token])
        slots = jnp.concatenate([slots, region_slots])
        positions = jnp.concatenate([positions, step.token_position])
        lane_prompt_lens = jnp.append(step.prompt_len[shape.num_decode :], 0)
        prompt_lens = jnp.concatenate([prompt_lens, lane_prompt_lens[step.token_lane]])
    else:
        tokens = history[slots, positions]

    paged = _paged_batch(spec, step, page_table, slots, positions)
    attend = make_attend(spec.config, paged, spec.num_pages, spec.backends, spec.mesh)
    rope_lengths = jnp.maximum(prompt_lens, positions + 1)
    live_tokens, live_rows = _live(spec, step)
    hidden, kv_pages = model(tokens, positions, state.kv_pages, attend, rope_lengths, live_tokens)

    sources = hidden[: shape.num_decode]
    if shape.num_prefill:
        last = step.lane_start + jnp.maximum(step.lane_length, 1) - 1
        sources = jnp.concatenate([sources, hidden[shape.num_decode + last]])
    logits = _replicate(model.logits(sources, live_rows), spec.mesh)
    sampled, outputs = sample_rows(spec.features, spec.facts, spec.layout, given, history, logits)
    history = history.at[step.slot, step.position + 1].set(sampled)

    if shape.num_prefill:
        region = Region(hidden[shape.num_decode :], _logits_of(spec, model))
        for feature in contained(spec.features, shape):
            if feature.of_region:
                inputs = given.features.get(feature.name)
                work = partial(feature.region, inputs, region, spec.facts)
                outputs[feature.name] = if_wanted(feature, given, work)
    result = spec.result.write(Result(StepOutputs(sampled), outputs))
    return DeviceState(kv_pages, page_table, history), result


def _paged_batch(
    spec: StepSpec,
    step: StepInputs,
    page_table: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
) -> PagedBatch:
    shape, page_size = spec.layout.shape, spec.layout.page_size
    decode_slots = step.slot[: shape.num_decode]
    live = decode_slots < spec.max_num_seqs
    lanes, lane_table = None, None
    if shape.num_prefill:
        lane_table = page_table[step.slot[shape.num_decode :]]
        lanes = PrefillLanes(step.lane_start, step.lane_length, step.lane_context)
    return PagedBatch(
        write_pages=page_table[slots, positions // page_size],
        write_offsets=positions % page_size,
        decode_table=page_table[decode_slots],
        decode_lens=jnp.where(live, step.position[: shape.num_decode] + 1, 0),
        lane_table=lane_table,
        lanes=lanes,
    )


def _live(spec: StepSpec, step: StepInputs) -> tuple[jax.Array, jax.Array]:
    """Ranges int32[2, 2] of the step's tokens, and of the rows that sample, that are in use.

    Decode rows, lanes and the region's tokens are filled from the front.
    """
    num_decode = spec.layout.shape.num_decode
    in_use = step.slot < spec.max_num_seqs
    decode, lanes = in_use[:num_decode].sum(), in_use[num_decode:].sum()
    tokens = decode * 0
    if spec.layout.shape.num_prefill:
        tokens = jnp.max(jnp.where(step.lane_length > 0, step.lane_start + step.lane_length, 0))
    ranges = [[0, decode], [num_decode, num_decode + tokens]]
    rows = [[0, decode], [num_decode, num_decode + lanes]]
    return jnp.array(ranges, jnp.int32), jnp.array(rows, jnp.int32)


def _logits_of(spec: StepSpec, model: Llama) -> Any:
    return lambda hidden: _replicate(model.logits(hidden), spec.mesh)


def _replicate(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Logits [R, V] on every device."""
    if mesh.size == 1:
        return x
    if x.shape[1] % mesh.shape["model"] == 0:
        # each device's part first: of few rows XLA would rather gather the weight that makes them
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "model")))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
