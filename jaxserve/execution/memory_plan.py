"""How many KV pages fit: arithmetic on known sizes and a bound, which the compiled steps verify."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxserve.errors import ValidationError
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.config import ModelConfig

# Where the device does not report its memory (CPU): the size of the KV pool.
DEFAULT_HOST_CACHE_BYTES = 4 << 30
# Float32 arrays [R, V] that live at once in the sampler; XLA needs 4.2 to 4.4 on Hopper and Ampere.
LOGITS_ARRAYS = 5


class Demand(NamedTuple):
    """Bytes on one device that are no KV pages.

    Attributes:
        weights: the parameters, without those that may lie in mapped files.
        tables: page table and history.
        transfers: blobs and results of two steps: one runs, the next is on its way.
        temporaries: of the largest step.
    """

    weights: int
    tables: int
    transfers: int
    temporaries: int


class CacheBudget(NamedTuple):
    """Bytes for KV pages on one device, and the setting that they follow from."""

    num_bytes: int
    field: str
    value: float | None


def plan_num_pages(budget: CacheBudget, bytes_per_page: int, useful: int) -> int:
    """Pages for a budget, trash page included, and no more than are of use.

    Raises:
        ValidationError: not even one page fits beside the trash page; names the budget's setting.
    """
    fits = budget.num_bytes // bytes_per_page
    if fits < 2:
        raise ValidationError(
            budget.field,
            budget.value,
            f"it leaves {budget.num_bytes} bytes for the KV cache and two pages need "
            f"{2 * bytes_per_page}: raise it, or use a smaller max_num_seqs, max_model_len, "
            "block_size or model, or more devices",
        )
    return min(fits, useful)


def temporary_bound(shape: StepShape, model: ModelConfig, itemsize: int) -> int:
    """Bytes that a step's temporaries should not exceed: the sampler's and one layer's arrays.

    Args:
        shape: of the step.
        model: its widths, whole: a device that holds a share of them needs less.
        itemsize: bytes of one activation.
    """
    logits = LOGITS_ARRAYS * shape.num_rows * model.vocab_size * 4
    tokens = shape.num_decode_tokens + shape.num_prefill
    return logits + tokens * model.activations_per_token * itemsize


def device_limit(device: Any) -> int | None:
    """Bytes that a `jax.Device` may use; None where it does not say (CPU)."""
    stats = device.memory_stats() or {}
    limit: int | None = stats.get("bytes_limit")
    return limit
