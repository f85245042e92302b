"""The KV pool of an engine: pages and context for the memory that there is."""

from __future__ import annotations

import logging
from typing import NamedTuple

import jax

from jaxserve.config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.host_memory import available_bytes, host_pool_bytes
from jaxserve.execution.memory_plan import (
    DEFAULT_HOST_CACHE_BYTES,
    CacheBudget,
    cache_budget,
    device_limit,
    plan_num_pages,
)
from jaxserve.execution.runner import Runner
from jaxserve.resolved import ResolvedConfig

logger = logging.getLogger(__name__)

MOST_PLANS = 3  # of the memory, each with two compilations


class Sizes(NamedTuple):
    """What the plan is made from.

    Attributes:
        asked: pages, bytes and context that the user set.
        config: everything else.
        page_bytes: a device's share of a page.
        runner: told its pool; knows what it needs beside.
    """

    asked: EngineConfig
    config: ResolvedConfig
    page_bytes: int
    runner: Runner


def plan_pool(sizes: Sizes, devices: list[jax.Device]) -> ResolvedConfig:
    """Settle the pages, give the runner its pool, lower an open `max_model_len` to what fits.

    Where the device says how much memory it has, the plan takes a bound of the steps' temporaries,
    and the two largest programs are compiled to verify it. They serve; only if they need more than
    the bound left is the plan made, and they compiled, again.

    Raises:
        ValidationError: memory does not hold what was asked for, or not one page.
    """
    asked, runner = sizes.asked, sizes.runner
    limit = device_limit(devices[0])
    if limit is None or asked.num_pages is not None or asked.kv_cache_memory_bytes is not None:
        num_bytes = asked.kv_cache_memory_bytes
        pool = DEFAULT_HOST_CACHE_BYTES if num_bytes is None else num_bytes
        available = available_bytes(reserve=asked.memory_reserve) if limit is None else None
        if available is not None:
            least, most = 2 * sizes.page_bytes, _most_pages(sizes) * sizes.page_bytes
            pool = host_pool_bytes(available, runner.demand(), len(devices), least, most, asked)
        return _settle(sizes, CacheBudget(pool, "kv_cache_memory_bytes", num_bytes))
    share = int(limit * asked.gpu_memory_utilization)
    demand = runner.demand()
    logger.info("of %d bytes of device memory: %s", share, demand)
    held = sum(demand)
    for _ in range(MOST_PLANS):
        budget = cache_budget(
            limit_bytes=limit, utilization=asked.gpu_memory_utilization, held_bytes=held
        )
        settled = _settle(sizes, budget)
        needed = runner.compile_largest()
        if needed <= share:
            return settled
        held = needed - settled.cache.num_pages * sizes.page_bytes
        logger.info("the compiled steps need %d bytes: planned again", needed)
    raise ValidationError(
        "gpu_memory_utilization",
        asked.gpu_memory_utilization,
        f"the compiled steps need {needed} bytes, its share is {share}, after {MOST_PLANS} plans: "
        "set num_pages, or lower max_num_seqs or max_num_batched_tokens",
    )


def _settle(sizes: Sizes, budget: CacheBudget) -> ResolvedConfig:
    """Pages for a budget, and the context that they hold."""
    longest, num_pages = sizes.config.scheduler.max_model_len, sizes.asked.num_pages
    if num_pages is None:
        num_pages = plan_num_pages(
            budget=budget, bytes_per_page=sizes.page_bytes, useful=_most_pages(sizes)
        )
    groups, page_size = sizes.runner.page_groups, sizes.config.cache.page_size
    fits = groups.longest(num_pages - 1, page_size, longest)
    if sizes.asked.max_model_len is None and longest > fits:
        logger.warning(
            "max_model_len lowered from the model's %d to %d, what the KV cache holds",
            longest,
            fits,
        )
        longest = fits
    sizes.runner.set_pool(num_pages, longest)
    return sizes.config.with_pool(num_pages, longest)


def _most_pages(sizes: Sizes) -> int:
    """Pages that were asked for, or that all slots can use, with the trash page."""
    scheduler, page_size = sizes.config.scheduler, sizes.config.cache.page_size
    longest = sizes.runner.page_groups.most_held(scheduler.max_model_len, page_size)
    return sizes.asked.num_pages or scheduler.max_num_seqs * longest + 1
