"""How many KV pages fit: arithmetic on measured sizes, no guesses."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.errors import ValidationError

# Where the device does not report its memory (CPU): the size of the KV pool.
DEFAULT_HOST_CACHE_BYTES = 4 << 30


class CacheBudget(NamedTuple):
    """Bytes for KV pages on one device, and the setting that they follow from."""

    num_bytes: int
    field: str
    value: float | None


def page_bytes(
    num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Bytes of one page over all layers, keys and values together."""
    return num_layers * page_size * 2 * num_kv_heads * head_dim * itemsize


def plan_num_pages(
    *,
    budget: CacheBudget,
    bytes_per_page: int,
    max_num_seqs: int,
    max_model_len: int,
    page_size: int,
) -> int:
    """Pages for `budget`, trash page included, and no more than all slots can use.

    Raises:
        ValidationError: not even one page fits beside the trash page; names the budget's setting.
    """
    fits = budget.num_bytes // bytes_per_page
    if fits < 2:
        raise ValidationError(
            budget.field,
            budget.value,
            f"it leaves {budget.num_bytes} bytes for the KV cache and two pages need "
            f"{2 * bytes_per_page}: raise it, or use a smaller block_size, a smaller model or more "
            "devices",
        )
    useful = max_num_seqs * -(-max_model_len // page_size) + 1
    return min(fits, useful)


def cache_budget(
    *, limit_bytes: int, utilization: float, weight_bytes: int, temporary_bytes: int
) -> CacheBudget:
    """Bytes for KV pages on one device: its share less weights and the largest temporaries."""
    num_bytes = int(limit_bytes * utilization) - weight_bytes - temporary_bytes
    return CacheBudget(num_bytes, "gpu_memory_utilization", utilization)
