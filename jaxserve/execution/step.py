"""The step: a pure function from (parameters, device state, blob) to (device state, result)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution import batch as columns
from jaxserve.execution.batch import BlobLayout, ResultLayout
from jaxserve.execution.parameters import ModelStructure
from jaxserve.models.attention import PagedBatch, make_attend
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Llama
from jaxserve.sampling.logprobs import LogprobRows, score
from jaxserve.sampling.penalties import TokenCounts, token_counts
from jaxserve.sampling.sampler import SamplingRows, sample
from jaxserve.sampling.variant import Variant
from pallas_kernels import Backends, PrefillLanes

# Region tokens whose logits are held at once while prompt logprobs are computed.
SCORE_BLOCK = 64


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
    f = spec.layout.read(blob)

    slot_updates, index_updates, page_updates = f["updates"]
    page_table = state.page_table.at[slot_updates, index_updates].set(page_updates)
    history = state.history
    slots, positions = f["slot"][: shape.num_decode], f["position"][: shape.num_decode]
    prompt_lens = f["prompt_len"][: shape.num_decode]
    if shape.num_prefill:
        lane_slots = f["slot"][shape.num_decode :]
        # region rows without a lane carry lane N and fall on the trash slot
        region_slots = jnp.append(lane_slots, spec.max_num_seqs)[f["token_lane"]]
        history = history.at[region_slots, f["token_position"]].set(f["token"])
        tokens = jnp.concatenate([history[slots, positions], f["token"]])
        slots = jnp.concatenate([slots, region_slots])
        positions = jnp.concatenate([positions, f["token_position"]])
        lane_prompt_lens = jnp.append(f["prompt_len"][shape.num_decode :], 0)
        prompt_lens = jnp.concatenate([prompt_lens, lane_prompt_lens[f["token_lane"]]])
    else:
        tokens = history[slots, positions]

    paged = _paged_batch(spec, f, page_table, slots, positions)
    attend = make_attend(spec.config, paged, spec.num_pages, spec.backends, spec.mesh)
    rope_lengths = jnp.maximum(prompt_lens, positions + 1)
    live_tokens, live_rows = _live(spec, f)
    hidden, kv_pages = model(tokens, positions, state.kv_pages, attend, rope_lengths, live_tokens)

    rows = hidden[: shape.num_decode]
    if shape.num_prefill:
        last = f["lane_start"] + jnp.maximum(f["lane_length"], 1) - 1
        rows = jnp.concatenate([rows, hidden[shape.num_decode + last]])
    logits = _replicate(model.logits(rows, live_rows), spec.mesh)
    sampled = sample(
        logits,
        _sampling_rows(f, shape.variant),
        shape.variant,
        counts=_counts(spec, f, history),
        bias=f.get("bias"),
        num_logprobs=spec.result.num_logprobs,
    )
    history = history.at[f["slot"], f["position"] + 1].set(sampled.tokens)

    values: dict[str, jax.Array] = {"token": sampled.tokens}
    if sampled.logprobs is not None:
        values |= _logprob_values("", sampled.logprobs)
    if shape.variant >= Variant.SCORED:
        region = hidden[shape.num_decode :]
        values |= _logprob_values("prompt_", _score_region(spec, model, region, f["target"]))
    return DeviceState(kv_pages, page_table, history), spec.result.write(values)


def _paged_batch(
    spec: StepSpec,
    f: dict[str, jax.Array],
    page_table: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
) -> PagedBatch:
    shape, page_size = spec.layout.shape, spec.layout.page_size
    decode_slots = f["slot"][: shape.num_decode]
    live = decode_slots < spec.max_num_seqs
    lanes, lane_table = None, None
    if shape.num_prefill:
        lane_table = page_table[f["slot"][shape.num_decode :]]
        lanes = PrefillLanes(f["lane_start"], f["lane_length"], f["lane_context"])
    return PagedBatch(
        write_pages=page_table[slots, positions // page_size],
        write_offsets=positions % page_size,
        decode_table=page_table[decode_slots],
        decode_lens=jnp.where(live, f["position"][: shape.num_decode] + 1, 0),
        lane_table=lane_table,
        lanes=lanes,
    )


def _live(spec: StepSpec, f: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Ranges int32[2, 2] of the step's tokens, and of the rows that sample, that are in use.

    Decode rows, lanes and the region's tokens are filled from the front.
    """
    num_decode = spec.layout.shape.num_decode
    in_use = f["slot"] < spec.max_num_seqs
    decode, lanes = in_use[:num_decode].sum(), in_use[num_decode:].sum()
    tokens = decode * 0
    if spec.layout.shape.num_prefill:
        tokens = jnp.max(jnp.where(f["lane_length"] > 0, f["lane_start"] + f["lane_length"], 0))
    ranges = [[0, decode], [num_decode, num_decode + tokens]]
    rows = [[0, decode], [num_decode, num_decode + lanes]]
    return jnp.array(ranges, jnp.int32), jnp.array(rows, jnp.int32)


def _sampling_rows(f: dict[str, jax.Array], variant: Variant) -> SamplingRows:
    if variant == Variant.GREEDY:
        return SamplingRows(position=f["position"] + 1)
    params = f["params"]
    floats = lax.bitcast_convert_type(params[:, : columns.FLOAT_COLUMNS], jnp.float32)
    return SamplingRows(
        temperature=floats[:, columns.TEMPERATURE],
        top_p=floats[:, columns.TOP_P],
        top_k=params[:, columns.TOP_K],
        min_p=floats[:, columns.MIN_P],
        seed=lax.bitcast_convert_type(
            params[:, columns.SEED_HIGH : columns.SEED_LOW + 1], jnp.uint32
        ),
        position=f["position"] + 1,
        presence=floats[:, columns.PRESENCE],
        frequency=floats[:, columns.FREQUENCY],
        repetition=floats[:, columns.REPETITION],
    )


def _counts(spec: StepSpec, f: dict[str, jax.Array], history: jax.Array) -> TokenCounts | None:
    """Tokens that each row has seen, for the penalties."""
    if spec.layout.shape.variant < Variant.RICH:
        return None
    return token_counts(
        history[f["slot"]],
        f["prompt_len"],
        f["position"] + 1,
        spec.layout.vocab_size,
    )


def _score_region(
    spec: StepSpec, model: Llama, hidden: jax.Array, targets: jax.Array
) -> LogprobRows:
    """Logprobs of the prompt's own tokens, a block of rows at a time to bound the logits."""
    block = min(SCORE_BLOCK, hidden.shape[0])
    padding = -hidden.shape[0] % block
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
    targets_in_blocks = jnp.pad(targets, (0, padding)).reshape(-1, block)

    def one_block(inputs: tuple[jax.Array, jax.Array]) -> LogprobRows:
        rows, wanted = inputs
        logits = _replicate(model.logits(rows), spec.mesh)
        return score(logits, wanted, spec.result.num_logprobs)

    scored = lax.map(one_block, (hidden, targets_in_blocks))
    return LogprobRows(*(x.reshape(-1, *x.shape[2:])[: targets.shape[0]] for x in scored))


def _logprob_values(prefix: str, rows: LogprobRows) -> dict[str, jax.Array]:
    return {
        prefix + "logprob": rows.sampled,
        prefix + "rank": rows.rank,
        prefix + "top_id": rows.top_ids,
        prefix + "top_logprob": rows.top_logprobs,
    }


def _replicate(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Logits [R, V] on every device."""
    if mesh.size == 1:
        return x
    if x.shape[1] % mesh.shape["model"] == 0:
        # each device's part first: of few rows XLA would rather gather the weight that makes them
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "model")))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
