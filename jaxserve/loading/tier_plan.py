"""How many KV pages the host's memory holds beside the device, as `kv_offloading_size` asks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import ResolvedConfig
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
    runner.controls.num_host_pages = num_pages
    left = _left(asked, runner, [*mesh.devices.flat])
    if left is not None and num_pages * page_bytes > left:
        raise ValidationError(FIELD, size, f"at most {_gib(left)}: {_of_host(asked)}")
    return num_pages


def check_own_part(config: ResolvedConfig, runner: Runner, mesh: Mesh) -> None:
    """Refuse, in another process than 0, pages of which its host has no room for its part.

    Raises:
        ValidationError: says how much there is, and how much the part takes.
    """
    asked, num_pages = config.asked, config.cache.num_host_pages
    if not num_pages:
        return
    own = [one for one in mesh.devices.flat if one.process_index == jax.process_index()]
    part = host_bytes(num_pages, runner) * len(own) // mesh.size
    left = _left(asked, runner, own)
    if left is not None and part > left:
        allowed = (
            f"at most {_gib(left)} in process {asked.process_id}, whose part takes {_gib(part)}: "
            f"{_of_host(asked)}"
        )
        raise ValidationError(FIELD, asked.kv_offloading_size, allowed)


def host_bytes(num_pages: int, runner: Runner) -> int:
    """Of so many pages of the host's memory."""
    return num_pages * runner.cache.page_bytes(1)


def _left(asked: EngineConfig, runner: Runner, devices: Sequence[jax.Device]) -> int | None:
    """Bytes of this host's memory beside what devices keep there; None: the system says nothing."""
    left = share_of_host(asked)
    if left is None:
        return None
    left -= runner.weights.host_bytes
    if device_limit(devices[0]) is None:
        # the devices of a CPU share the host's memory
        page_bytes = runner.cache.page_bytes(1)
        left -= RESERVE_BYTES + len(devices) * (sum(runner.demand()) + 2 * page_bytes)
    return left


def _of_host(asked: EngineConfig) -> str:
    return (
        f"what the host's memory has beside a memory_reserve of {asked.memory_reserve:.0%} and "
        "what else the engine keeps there"
    )


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / GIB:.2f} GiB"
