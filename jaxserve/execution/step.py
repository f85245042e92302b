"""The step: a pure function from (parameters, device state, blob) to (device state, result)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.features import Feature, NewestTokens, Region, overrides
from jaxserve.execution.features.traced import traced
from jaxserve.execution.model_hooks import ComputeTokens, HookedFeatures
from jaxserve.execution.parameters import ModelStructure
from jaxserve.execution.sample_rows import SampleFacts, draws_alone, if_wanted, sample_rows
from jaxserve.execution.step_inputs import (
    BlobLayout,
    Result,
    ResultLayout,
    StepInputs,
    StepOutputs,
    contained,
)
from jaxserve.models.attention import GroupTables, PagedBatch, make_attend
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.protocol import Model, TokenRows
from jaxserve.parallel.mesh import is_divided, row_spec
from pallas_kernels import PrefillLanes

Arrays = TypeVar("Arrays")


@dataclass(frozen=True)
class StepSpec:
    """Everything static about one program.

    Those of one device run all layers. The layers [start, stop) of a stage that is not the last one
    end with hidden states, and `state` has nothing of features; stop None: there is none behind.
    """

    config: ModelConfig
    features: tuple[Feature, ...]
    layout: BlobLayout
    result: ResultLayout
    cache: KVCache
    max_num_seqs: int
    mesh: Mesh
    start: int = 0
    stop: int | None = None


def run_step(
    spec: StepSpec,
    structure: ModelStructure,
    leaves: tuple[jax.Array, ...],
    buffers: dict[str, Any],
    state: DeviceState,
    blob: jax.Array,
    entering: jax.Array | None = None,
) -> tuple[DeviceState, jax.Array, dict[str, jax.Array]]:
    """Compute one step, or the part of a stage.

    The modules are merged inside the traced function and parameters cross the jit boundary as flat
    leaves: calling a compiled function with a module costs milliseconds, with leaves microseconds.

    Args:
        spec: static shape and choices of the program.
        structure: of the Flax module, from `split_model`.
        leaves: its parameters, from `split_model`.
        buffers: of the features that have some, by their names.
        state: the device state; donated by the caller.
        blob: int32[spec.layout.size], see `BlobLayout`.
        entering: [T, E] from the stage before; None: the first stage embeds the tokens.

    Returns:
        The next device state; the result, int32, see `ResultLayout`, or [T, E] for the stage
        behind; and what features have set aside, which stays on the device until it is fetched.
    """
    model = structure.merge(leaves)
    given = spec.layout.read(blob)
    step = given.step
    slot_updates, index_updates, page_updates = step.updates
    page_table = state.page_table.at[slot_updates, index_updates].set(page_updates)
    decode = _decode_rows(spec, step, buffers, state)
    # a first token that the host brings is part of the history, as the drafts are
    history = state.history.at[step.slot[:, None], decode.positions].set(decode.tokens)
    compute = _on_each(_compute_rows(spec, step, decode), spec.mesh)
    if spec.layout.shape.num_prefill:
        region = slice(spec.layout.shape.num_decode_tokens, None)
        history = history.at[compute.slots[region], compute.positions[region]].set(step.token)

    rope_lengths = jnp.maximum(compute.prompt_lens, compute.positions + 1)
    live_tokens, live_rows = _live(spec, step)
    hooked = HookedFeatures(spec.features, spec.layout, given, compute, buffers, state.features)
    last_seen = None
    if spec.layout.shape.num_prefill:
        last_seen = hooked.last_seen(compute.positions[region])
    paged = _paged_batch(spec, step, page_table, decode, compute, last_seen)
    queries = spec.layout.shape.num_queries
    attend = make_attend(spec.config, spec.cache, paged, spec.mesh, queries)
    hooks = hooked.hooks()
    embedded = model.embed(compute.tokens) if entering is None else entering
    if hooks.embed is not None:
        embedded = hooks.embed(embedded)
    positions = hooked.positions(compute.positions[None])
    rows = TokenRows(positions, rope_lengths, live_tokens, hooks)
    hidden, kv = model.layers(embedded, rows, state.kv, attend, spec.start, spec.stop)

    samples = _on_each(_sampled(spec, step, compute), spec.mesh)
    if spec.stop is not None:
        _, lengths = _lengths(spec, step, decode, samples, None, state.lengths)
        return DeviceState(kv, page_table, history, lengths, {}), hidden, {}
    sources = hidden[: spec.layout.shape.num_decode_tokens]
    if spec.layout.shape.num_prefill:
        sources = jnp.concatenate([sources, hidden[samples.sources]])
    alone = draws_alone(spec.features, spec.layout)
    logits = _whole_rows(model.logits(sources, live_rows), spec.mesh, drawn_alone=alone)
    hooked.see_last(hidden, logits)

    def of_samples(x: jax.Array) -> jax.Array:
        first = x[: spec.layout.shape.num_decode_tokens]
        return jnp.concatenate([first, x[samples.sources]]) if len(samples.sources) else first

    known = SampleFacts(
        samples.contexts,
        samples.positions,
        samples.prompt_lens,
        history,
        hooked.kept_of(of_samples),
        _logits_behind(spec, model),
    )
    sampled, outputs, adjusted = sample_rows(
        spec.features, spec.layout, given, known, logits, state.features
    )
    history = history.at[samples.slots, samples.positions + 1].set(sampled)
    counts, lengths = _lengths(spec, step, decode, samples, sampled, state.lengths)

    if spec.layout.shape.num_prefill:
        for feature in contained(spec.features, spec.layout.shape):
            if overrides(feature, "region"):
                inputs = given.features.get(feature.name)
                kept = {key: x[region] for key, x in hooked.kept[feature.name].items()}
                lanes = spec.layout.shape.num_lanes
                logits_of = _logits_of(spec, model)
                view = Region(hidden[region], logits_of, model.scores, lanes, kept)
                like = spec.layout.outputs(feature, spec.layout.shape.num_special)
                work = partial(traced, feature, "region", inputs, view, like=like)
                outputs[feature.name] = if_wanted(feature, spec.layout, given, work)
    result = spec.result.write(Result(StepOutputs(sampled, counts), outputs))
    states = hooked.next_state(hidden, adjusted)
    return DeviceState(kv, page_table, history, lengths, states), result, hooked.aside


class DecodeRows(NamedTuple):
    """The decode rows, traced: Q tokens each, of which `lengths` count.

    Attributes:
        tokens, positions: int32[B, Q]; behind a row's length they lie on the trash column.
        starts, lengths: int32[B] position of the first token, and how many; 0 where unused.
    """

    tokens: jax.Array
    positions: jax.Array
    starts: jax.Array
    lengths: jax.Array


class Samples(NamedTuple):
    """The R = B * Q + N samples of a step, int32[R] each but `sources`.

    Attributes:
        slots: whose token it is.
        contexts: whose tokens come before it: of a sequence that samples from another one's row the
            other's slot, since its own takes them over after the step.
        positions: of the last token before it.
        prompt_lens: of the slot's prompt.
        sources: int32[N] token whose hidden state the samples of the region are of.
    """

    slots: jax.Array
    contexts: jax.Array
    positions: jax.Array
    prompt_lens: jax.Array
    sources: jax.Array


def _decode_rows(
    spec: StepSpec, step: StepInputs, buffers: dict[str, Any], state: DeviceState
) -> DecodeRows:
    shape = spec.layout.shape
    live = step.slot < spec.max_num_seqs
    starts = jnp.where(step.start > 0, step.start - 1, state.lengths[step.slot])
    first = jnp.where(step.first > 0, step.first - 1, state.history[step.slot, starts])
    if shape.num_queries == 1:
        return DecodeRows(first[:, None], starts[:, None], starts, live.astype(jnp.int32))
    (feature,) = [f for f in contained(spec.features, shape) if f.num_drafts]
    own = buffers.get(feature.name), state.features.get(feature.name)
    newest = NewestTokens(first, starts, step.slot, state.history, *own)
    like = jax.ShapeDtypeStruct((len(first), shape.num_queries - 1), jnp.int32)
    drafts = traced(feature, "draft", newest, like=like)
    offsets = jnp.arange(shape.num_queries)
    used = offsets < step.length[:, None]
    positions = jnp.where(used, starts[:, None] + offsets, state.history.shape[1] - 1)
    return DecodeRows(jnp.column_stack([first, drafts]), positions, starts, step.length)


def _compute_rows(spec: StepSpec, step: StepInputs, decode: DecodeRows) -> ComputeTokens:
    shape = spec.layout.shape
    prompt_lens = step.prompt_len[: shape.num_decode]
    rows = ComputeTokens(
        decode.tokens.reshape(-1),
        decode.positions.reshape(-1),
        jnp.repeat(step.slot, shape.num_queries),
        jnp.repeat(prompt_lens, shape.num_queries),
    )
    if not shape.num_prefill:
        return rows
    # region tokens without a lane carry lane N and fall on the trash slot
    lane_slots = jnp.append(step.lane_slot, spec.max_num_seqs)
    lane_prompt_lens = jnp.append(step.prompt_len[shape.num_decode :], 0)
    region = ComputeTokens(
        step.token,
        step.token_position,
        lane_slots[step.token_lane],
        lane_prompt_lens[step.token_lane],
    )
    return ComputeTokens(*(jnp.concatenate(parts) for parts in zip(rows, region)))


def _sampled(spec: StepSpec, step: StepInputs, compute: ComputeTokens) -> Samples:
    shape = spec.layout.shape
    decodes = shape.num_decode_tokens
    if not shape.num_prefill:
        nothing = jnp.zeros(0, jnp.int32)
        slots = compute.slots
        return Samples(slots, slots, compute.positions, compute.prompt_lens, nothing)
    sources = decodes + step.sample_source
    return Samples(
        jnp.concatenate([compute.slots[:decodes], step.sample_slot]),
        jnp.concatenate([compute.slots[:decodes], compute.slots[sources]]),
        jnp.concatenate([compute.positions[:decodes], compute.positions[sources]]),
        jnp.concatenate([compute.prompt_lens[:decodes], compute.prompt_lens[sources]]),
        sources,
    )


def _lengths(
    spec: StepSpec,
    step: StepInputs,
    decode: DecodeRows,
    samples: Samples,
    sampled: jax.Array | None,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """How many samples of each decode row count (int32[B], absent for Q = 1), and what slots hold.

    A draft is accepted where the row's sample before it is the same token and all drafts before it
    were accepted. A sample depends on the tokens before it, its position and its request's seed
    alone, so what is accepted is what would have been sampled without drafts.
    """
    shape = spec.layout.shape
    counts = decode.lengths
    if shape.num_queries > 1:
        assert sampled is not None  # stages have no drafts
        drawn = sampled[: shape.num_decode_tokens].reshape(-1, shape.num_queries)
        right = drawn[:, :-1] == decode.tokens[:, 1:]
        right &= jnp.arange(1, shape.num_queries) < decode.lengths[:, None]
        accepted = jnp.cumprod(right, axis=1).sum(axis=1, dtype=jnp.int32)
        counts = jnp.where(decode.lengths > 0, 1 + accepted, 0)
    slots, held = step.slot, decode.starts + counts
    if shape.num_prefill:
        slots = jnp.concatenate([slots, step.sample_slot])
        held = jnp.concatenate([held, samples.positions[shape.num_decode_tokens :] + 1])
    held = jnp.where(slots < spec.max_num_seqs, held, 0)
    return counts[: 0 if shape.num_queries == 1 else None], lengths.at[slots].set(held)


def _paged_batch(
    spec: StepSpec,
    step: StepInputs,
    page_table: jax.Array,
    decode: DecodeRows,
    compute: ComputeTokens,
    last_seen: jax.Array | None,
) -> PagedBatch:
    shape, page_size = spec.layout.shape, spec.layout.page_size
    num_groups = spec.cache.groups.pages.num_groups

    def of_group(group: int) -> GroupTables:
        places = compute.positions // page_size * num_groups + group
        write_pages = page_table[compute.slots, places]
        if shape.num_queries > 1:
            unused = jnp.arange(shape.num_queries) >= decode.lengths[:, None]
            write_pages = write_pages.at[: shape.num_decode_tokens].multiply(
                1 - unused.reshape(-1).astype(jnp.int32)
            )
        own = slice(group, None, num_groups)
        return GroupTables(
            write_pages,
            page_table[step.slot][:, own],
            page_table[step.lane_slot][:, own] if shape.num_prefill else None,
        )

    lanes = looks_ahead = None
    if shape.num_prefill:
        lanes = PrefillLanes(step.lane_start, step.lane_length, step.lane_context)
    if last_seen is not None:
        looks_ahead = jnp.any(last_seen > compute.positions[-len(last_seen) :])
    return PagedBatch(
        tables=tuple(map(of_group, range(num_groups))),
        write_offsets=compute.positions % page_size,
        decode_lens=jnp.where(decode.lengths > 0, decode.starts + decode.lengths, 0),
        query_lens=decode.lengths if shape.num_queries > 1 else None,
        lanes=lanes,
        last_seen=last_seen,
        looks_ahead=looks_ahead,
    )


def _live(spec: StepSpec, step: StepInputs) -> tuple[jax.Array, jax.Array]:
    """Ranges int32[2, 2] of the step's tokens, and of its samples, that are in use.

    Decode rows, the region's tokens and its samples are filled from the front.
    """
    shape = spec.layout.shape
    decode = shape.num_queries * (step.slot < spec.max_num_seqs).sum()
    samples = (step.sample_slot < spec.max_num_seqs).sum()
    tokens = decode * 0
    if shape.num_prefill:
        tokens = jnp.max(jnp.where(step.lane_length > 0, step.lane_start + step.lane_length, 0))
    first = shape.num_decode_tokens
    ranges = [[0, decode], [first, first + tokens]]
    rows = [[0, decode], [first, first + samples]]
    return jnp.array(ranges, jnp.int32), jnp.array(rows, jnp.int32)


def _logits_of(spec: StepSpec, model: Model) -> Any:
    return lambda hidden: _whole_rows(model.logits(hidden), spec.mesh)


def _logits_behind(spec: StepSpec, model: Any) -> Callable[[jax.Array], jax.Array]:
    """Residual stream [N, E] behind any layer -> the logits that the model would end with."""
    return lambda x: _whole_rows(model.logits(model.norm(x)), spec.mesh)


def _on_each(arrays: Arrays, mesh: Mesh) -> Arrays:
    """A tree of what says which rows are meant, whole on each device.

    Where devices divide rows XLA would divide these too, and have devices exchange what each of
    them can compute.
    """
    if not is_divided(mesh.size):
        return arrays
    return lax.with_sharding_constraint(arrays, NamedSharding(mesh, PartitionSpec()))


def _whole_rows(x: jax.Array, mesh: Mesh, *, drawn_alone: bool = False) -> jax.Array:
    """Logits [R, V], each device with whole rows.

    Args:
        x: of which each device has a part of the vocabulary.
        mesh: of the model.
        drawn_alone: a device draws the tokens of its part of the rows (`Draws.divided`), and
            nothing else reads them: it has no other rows, so less is exchanged.
    """
    if not is_divided(mesh.size):
        return x
    if x.shape[1] % mesh.shape["model"] == 0:
        # each device's part first: of few rows XLA would rather gather the weight that makes them
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "model")))
    spec = row_spec(len(x), mesh) if drawn_alone else PartitionSpec()
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
