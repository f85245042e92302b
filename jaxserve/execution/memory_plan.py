"""How many KV pages fit: arithmetic on measured sizes, no guesses."""

from __future__ import annotations

from jaxserve.errors import ValidationError

# Where the device does not report its memory (CPU): the size of the KV pool.
DEFAULT_HOST_CACHE_BYTES = 4 << 30


def page_bytes(
    num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Bytes of one page over all layers, keys and values together."""
    return num_layers * page_size * 2 * num_kv_heads * head_dim * itemsize


def plan_num_pages(
    *,
    budget_bytes: int,
    bytes_per_page: int,
    max_num_seqs: int,
    max_model_len: int,
    page_size: int,
) -> int:
    """Pages for `budget_bytes`, trash page included, and no more than all slots can use.

    Raises:
        ValidationError: not even one page fits beside weights and temporaries.
    """
    fits = budget_bytes // bytes_per_page
    if fits < 2:
        raise ValidationError(
            "gpu_memory_utilization",
            f"{budget_bytes} bytes left for the KV cache",
            f"room for two pages of {bytes_per_page} bytes at least: raise it, use a smaller "
            "model or more devices",
        )
    useful = max_num_seqs * -(-max_model_len // page_size) + 1
    return min(fits, useful)


def cache_budget(
    *, limit_bytes: int, utilization: float, weight_bytes: int, temporary_bytes: int
) -> int:
    """Bytes for KV pages on one device: its share less weights and the largest temporaries."""
    return int(limit_bytes * utilization) - weight_bytes - temporary_bytes
