"""Weights outside the device's memory (`cpu_offload_gb`): where there may be some, and how many."""

from __future__ import annotations

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.host_memory import PINNED_LIMIT, RESERVE_BYTES, pinned_limit, share_of_host
from jaxserve.loading.capacity import gb
from jaxserve.models.protocol import Model
from jaxserve.models.streamed import FIELD, largest_parameters, streamed_bytes, streamed_layers
from jaxserve.models.weights import MOST_LOADING_THREADS, NO_STORE

# kinds of devices whose steps bring weights from the host's memory
STREAMING = ("cuda", "tpu")


def check_offload(asked: EngineConfig, platform: str, *, is_stored: bool) -> None:
    """Refuse `cpu_offload_gb` where no weights can be elsewhere than in the device's memory.

    Raises:
        ValidationError: says where they can.
    """
    field, value = FIELD, asked.cpu_offload_gb
    if platform not in STREAMING and platform != "cpu":
        allowed = f"none on platform {platform}: no step of it was read that brings weights"
        raise ValidationError(field, value, allowed)
    if asked.tensor_parallel_size != 1:
        allowed = "none unless tensor_parallel_size is 1: the weights of one device leave it"
        raise ValidationError(field, value, allowed)
    if platform == "cpu":
        if not is_stored:
            raise ValidationError(field, value, f"none for a model that is {NO_STORE}")
        return
    if is_stored:
        allowed = f"none on platform {platform} for a store, which has each layer apart"
        raise ValidationError(field, value, allowed)
    if asked.deterministic:
        allowed = f"none with deterministic on platform {platform}: its loop was not read"
        raise ValidationError(field, value, allowed)


def plan_streamed(model: Model, asked: EngineConfig, kind: str) -> int:
    """How many of the last layers have their weights in the host's memory.

    Args:
        model: of abstract parameters.
        asked: the settings, with some `offloaded_bytes`.
        kind: of the device, see `kind_of`.

    Raises:
        ValidationError: the host has no room for them, or the layers differ.
    """
    value = asked.cpu_offload_gb
    assert value is not None
    count = streamed_layers(model, value)
    layer, room = streamed_bytes(model) // model.config.num_layers, share_of_host(asked)
    loading = layer + largest_parameters(model, MOST_LOADING_THREADS)
    bounds: list[tuple[int, str]] = []
    if room is not None:
        text = (
            f"need {gb(count * loading)} of the host's memory while they are read, and "
            f"{gb(max(0, room))} are available, a memory_reserve of {asked.memory_reserve:.0%} "
            "left alone"
        )
        bounds.append((max(0, room) // loading, text))
    if kind == "cuda":
        limit = pinned_limit()
        text = (
            f"need {gb(count * layer)} of pinned memory, of which XLA has {gb(limit)}, "
            f"{gb(RESERVE_BYTES)} for its own copies: {PINNED_LIMIT} sets it, in GiB"
        )
        bounds.append((max(0, limit - RESERVE_BYTES) // layer, text))
    fits, why = min(bounds, default=(count, ""))
    if fits >= count:
        return count
    # rounded down: what is shown is not refused again
    most = f"at most {fits * layer / 2**30 * (1 - 5e-4):.4g} GiB" if fits else "none"
    raise ValidationError(FIELD, value, f"{most} here: {count} layers of {gb(layer)} {why}")
