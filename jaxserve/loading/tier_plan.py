"""How many KV pages the host's memory holds beside the device, as `kv_offloading_size` asks."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.host_memory import RESERVE_BYTES, share_of_host
from jaxserve.execution.memory_plan import device_limit
from jaxserve.execution.runner import Runner

FIELD = "kv_offloading_size"
GIB = 1 << 30


def plan_host_pages(asked: EngineConfig, runner: Runner, mesh: Mesh) -> int:
    """Pages of the host's memory, which the runner is told of; 0: no page leaves the device.

    Args:
        asked: the settings.
        runner: that knows what it needs beside.
        mesh: of its devices.

    Raises:
        ValidationError: the memory holds less, not even a page was asked for, or there is no prefix
            cache.
    """
    size = asked.kv_offloading_size
    if not size:
        return 0
    if not asked.enable_prefix_caching:
        allowed = "none without enable_prefix_caching, by which pages are found again"
        raise ValidationError(FIELD, size, allowed)
    page_bytes = runner.cache.page_bytes(1)
    num_pages = int(size * GIB) // page_bytes
    if not num_pages:
        raise ValidationError(FIELD, size, f"at least one page of {page_bytes} bytes")
    runner.set_host_pages(num_pages)
    left = share_of_host(asked)
    if left is not None:
        left -= runner.host_weight_bytes
    if left is not None and device_limit(mesh.devices.flat[0]) is None:
        # the devices of a CPU share the host's memory
        left -= RESERVE_BYTES + mesh.size * (sum(runner.demand()) + 2 * page_bytes)
    if left is not None and num_pages * page_bytes > left:
        allowed = (
            f"at most {max(0, left) / GIB:.2f} GiB: what the host's memory has beside a "
            f"memory_reserve of {asked.memory_reserve:.0%} and what else the engine keeps there"
        )
        raise ValidationError(FIELD, size, allowed)
    return num_pages


def host_bytes(num_pages: int, runner: Runner) -> int:
    """Of so many pages of the host's memory."""
    return num_pages * runner.cache.page_bytes(1)
