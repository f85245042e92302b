"""The KV pool of an engine: pages and context for the memory that there is."""

from __future__ import annotations

import logging
from dataclasses import replace

from jax.sharding import Mesh

from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.host_memory import host_pool_bytes, share_of_host
from jaxserve.execution.memory_plan import (
    DEFAULT_HOST_CACHE_BYTES,
    CacheBudget,
    device_limit,
    plan_num_pages,
)
from jaxserve.execution.runner import Runner
from jaxserve.loading.kernel_limits import addressable_pages, within_table
from jaxserve.loading.tier_plan import host_bytes, plan_host_pages

logger = logging.getLogger(__name__)

MOST_PLANS = 3  # of the memory, each with two compilations


def plan_pool(config: ResolvedConfig, runner: Runner, mesh: Mesh) -> ResolvedConfig:
    """Settle the pages, give the runner its pool, lower an open `max_model_len` to what fits.

    Where the device says how much memory it has, the plan takes a bound of the steps' temporaries,
    and the two largest programs are compiled to verify it. They serve; only if they need more than
    the bound left is the plan made, and they compiled, again.

    What the kernels cannot address is not planned (`jaxserve/loading/kernel_limits.py`). Where
    there are to be fewer slots the plan is for another runner: the pages are not settled then.

    Args:
        config: of the engine.
        runner: is told its pool; knows what it needs beside.
        mesh: of its devices.

    Raises:
        ValidationError: memory does not hold what was asked for, or not one page.
    """
    asked, scheduler, page_size = config.asked, config.scheduler, config.cache.page_size
    shards = mesh.shape["model"]
    page_bytes = runner.cache.page_bytes(shards)
    longest = scheduler.max_model_len
    groups = runner.page_groups
    # to all slots, with the trash
    useful = scheduler.max_num_seqs * groups.most_held(longest, page_size) + 1

    num_host_pages = plan_host_pages(asked, runner, mesh)

    def settle(num_bytes: int, field: str, value: float | None) -> ResolvedConfig:
        budget = CacheBudget(num_bytes, field, value)
        wanted = asked.num_pages or plan_num_pages(budget, page_bytes, useful)
        num_pages = addressable_pages(config, runner.cache, shards, wanted)
        fits = groups.longest(num_pages - 1, page_size, longest)
        if fits < 1:
            least = groups.most_held(1, page_size) + 1
            if asked.num_pages:
                field, value = "num_pages", asked.num_pages
            raise ValidationError(field, value, f"enough for {least} pages, which a token takes")
        shortened = asked.max_model_len is None and longest > fits
        if shortened:
            logger.warning(
                "max_model_len lowered from the model's %d to %d, what the KV cache holds",
                longest,
                fits,
            )
        held = fits if shortened else longest
        settled = replace(config, scheduler=replace(scheduler, max_model_len=held))
        settled = within_table(settled, runner.cache)
        if settled.scheduler.max_num_seqs < scheduler.max_num_seqs:
            return settled
        runner.set_pool(num_pages, settled.scheduler.max_model_len)
        cache = replace(config.cache, num_pages=num_pages, num_host_pages=num_host_pages)
        return replace(settled, cache=cache)

    limit = device_limit(mesh.devices.flat[0])
    if limit is None or asked.num_pages is not None or asked.kv_cache_memory_bytes is not None:
        num_bytes = asked.kv_cache_memory_bytes
        pool = DEFAULT_HOST_CACHE_BYTES if num_bytes is None else num_bytes
        available = share_of_host(asked) if limit is None else None
        if available is not None:
            available -= host_bytes(num_host_pages, runner)
            least, most = 2 * page_bytes, (asked.num_pages or useful) * page_bytes
            pool = host_pool_bytes(available, runner.demand(), mesh.size, least, most, asked)
        return settle(pool, "kv_cache_memory_bytes", num_bytes)
    field, utilization = "gpu_memory_utilization", asked.gpu_memory_utilization
    share = int(limit * utilization)
    demand = runner.demand()
    logger.info("of %d bytes of device memory: %s", share, demand)
    held = sum(demand)
    for _ in range(MOST_PLANS):
        settled = settle(share - held, field, utilization)
        if not settled.cache.num_pages or asked.num_processes > 1:
            return settled  # the others compile when all is decided, and XLA waits for them
        needed = runner.compile_largest()
        if needed <= share:
            return settled
        held = needed - settled.cache.num_pages * page_bytes
        logger.info("the compiled steps need %d bytes: planned again", needed)
    raise ValidationError(
        field,
        utilization,
        f"the compiled steps need {needed} bytes, its share is {share}, after {MOST_PLANS} plans: "
        "set num_pages, or lower max_num_seqs or max_num_batched_tokens",
    )
