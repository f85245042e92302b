"""What the kernels of a device can address: the KV pool and the page tables are planned within."""

from __future__ import annotations

import logging
from dataclasses import replace

from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.programs import MOST_LANES
from jaxserve.models.kv_cache import KVCache

logger = logging.getLogger(__name__)


def addressable_pages(config: ResolvedConfig, cache: KVCache, shards: int, wanted: int) -> int:
    """How many of the wanted KV pages the kernels address; a warning where these are fewer.

    Args:
        config: the resolved configuration, pages not yet decided.
        cache: whose pages they are.
        shards: devices that share its heads.
        wanted: what memory holds, or what was asked for.

    Raises:
        ValidationError: `num_pages` asks for a pool that they do not address.
    """
    most = cache.addressable(wanted, shards)
    if most == wanted:
        return wanted
    kernels = f"kernels {cache.backends.decode} and {cache.backends.prefill}"
    page_bytes = cache.page_bytes(shards)
    if config.asked.num_pages is not None:
        above = (4 << 30) // page_bytes + 1
        also = f", or from {above} on" if cache.addressable(above, shards) == above else ""
        allowed = f"up to {most}{also} for the {kernels} ({page_bytes} bytes a page and device)"
        raise ValidationError("num_pages", wanted, allowed)
    logger.warning(
        "KV cache lowered from %d to %d pages (%d bytes a device): the %s address no pool of "
        "8-bit elements between 2 and 4 GiB. kv_cache_dtype=auto holds more tokens from 4 GiB on "
        "and does not round; with 8 bits leave more than 4 GiB a device for the KV cache "
        "(gpu_memory_utilization, kv_cache_memory_bytes)",
        wanted,
        most,
        most * page_bytes,
        kernels,
    )
    return most


def within_table(config: ResolvedConfig, cache: KVCache) -> ResolvedConfig:
    """The settings with as many slots, or as long a context, as a page table of the kernels holds.

    Slots are lowered where the user left them open, else the context; a warning says so.

    Args:
        config: of the engine, its `max_model_len` what the KV cache holds.
        cache: whose kernels read the table.

    Raises:
        ValidationError: slots and context were asked for, and need a larger table.
    """
    entries = cache.backends.table_entries
    beside = MOST_LANES if cache.backends.one_program else 0  # lanes have rows of the same table
    scheduler, asked = config.scheduler, config.asked
    slots, longest, page_size = scheduler.max_num_seqs, scheduler.max_model_len, cache.page_size
    columns = -(-longest // page_size)
    if entries is None or (slots + beside) * columns <= entries:
        return config
    limit = f"the page table of the {cache.backends.decode} kernels holds {entries} entries"
    most = entries // columns - beside
    if asked.max_num_seqs is None and most > 0:
        lowered = replace(scheduler, max_num_seqs=most)
        logger.warning(
            "max_num_seqs lowered from %d to %d: %s, and a request of max_model_len=%d has %d. "
            "A lower max_model_len or a larger block_size leaves room for more",
            slots, lowered.max_num_seqs, limit, longest, columns,
        )  # fmt: skip
    elif asked.max_model_len is None and slots + beside <= entries:
        lowered = replace(scheduler, max_model_len=entries // (slots + beside) * page_size)
        logger.warning(
            "max_model_len lowered from %d to %d: %s, for max_num_seqs=%d. A lower max_num_seqs "
            "or a larger block_size leaves room for more",
            longest, lowered.max_model_len, limit, slots,
        )  # fmt: skip
    else:
        allowed = f"at most {most} for max_model_len={longest}: {limit}"
        raise ValidationError("max_num_seqs", slots, allowed)
    return replace(config, scheduler=lowered)
