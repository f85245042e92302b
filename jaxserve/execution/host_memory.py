"""The memory that a process on a CPU may still use: the host's, or what limits leave of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.memory_plan import DEFAULT_HOST_CACHE_BYTES, Demand
from jaxserve.processes.free_memory import available_bytes, left_of_process

# for what no plan counts: the interpreter, the tokenizer, compilations, a weight that is quantised
RESERVE_BYTES = 1 << 30
# the environment variable by which XLA bounds a GPU's pinned memory, in GiB, and its default
PINNED_LIMIT, PINNED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
_DONTNEED = 4  # MADV_DONTNEED of Linux


def host_pool_bytes(
    available: int, demand: Demand, devices: int, least: int, most: int, config: EngineConfig
) -> int:
    """Bytes of KV pages for each CPU device: those that were asked for, or what is left over.

    Args:
        available: see `share_of_host`.
        demand: of each device.
        devices: that share the host's memory.
        least: bytes without which a device cannot serve.
        most: bytes that all slots can use, or of the pages that were asked for.
        config: what was asked for.

    Raises:
        ValidationError: all together is more than what is available; names each part.
    """
    held = devices * sum(demand) + RESERVE_BYTES
    asked = None
    if config.num_pages is not None:
        asked, pool = "num_pages", most
    elif config.kv_cache_memory_bytes is not None:
        asked, pool = "kv_cache_memory_bytes", min(most, config.kv_cache_memory_bytes)
    else:
        left = (available - held) // devices
        pool = max(least, min(most, left, DEFAULT_HOST_CACHE_BYTES))
    needed = held + devices * pool
    if needed <= available:
        return pool
    if asked is not None and held + devices * least <= available:
        field, helps = asked, "lower it"
    else:
        field, helps = "model", "take a smaller one"
        if config.quantization is None:
            helps = f"set quantization to int8, which halves the weights, or {helps}"
    beside = devices * (sum(demand) - demand.weights)
    raise ValidationError(
        field,
        getattr(config, field),
        f"{_gb(needed)} of memory are needed and {_gb(max(0, available))} are available here"
        f"{_part(config)}, a memory_reserve of {config.memory_reserve:.0%} left alone: weights "
        f"{_gb(devices * demand.weights)}, KV cache {_gb(devices * pool)}, temporaries and tables "
        f"{_gb(beside)}, reserve {_gb(RESERVE_BYTES)}; {helps}",
    )


def _part(config: EngineConfig) -> str:
    engines = config.data_parallel_size
    if config.memory_bytes is not None:
        return " to this model of several"
    return "" if engines == 1 else f" to each of {engines} engines (data_parallel_size)"


def forget_zeros(arrays: Iterable[jax.Array]) -> int:
    """Gives whole pages of arrays that hold zeros alone back to Linux; bytes that it took.

    They read as zeros as before, and take memory when they are written. The arrays must be on the
    CPU, whose memory XLA takes from malloc.
    """
    if sys.platform != "linux":
        return 0
    libc, page, taken = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, 0
    for array in arrays:
        for shard in array.addressable_shards:
            begin = shard.data.unsafe_buffer_pointer()
            first = -(-begin // page) * page
            size = (begin + shard.data.nbytes) // page * page - first
            if size > 0:
                if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONTNEED):
                    number = ctypes.get_errno()
                    raise OSError(number, f"madvise: {os.strerror(number)}")
                taken += size
    return taken


def trim() -> None:
    """Gives unused memory that malloc holds back to the system: compilers leave much of it."""
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim_heap is not None:
        trim_heap(ctypes.c_size_t(0))


def share_of_host(asked: EngineConfig) -> int | None:
    """Bytes that this engine may use of what is available, `memory_reserve` left alone.

    It is `memory_bytes` at the most, and engines that load at once, `data_parallel_size` of them,
    have equal parts; None where the system does not say.
    """
    available = available_bytes(reserve=asked.memory_reserve)
    if available is None:
        return None
    if asked.memory_bytes is not None:
        available = min(available, asked.memory_bytes)
    return available // asked.data_parallel_size


def pinned_limit() -> int:
    """Bytes of the host's memory that XLA gives arrays which a GPU reads there."""
    text = os.environ.get(PINNED_LIMIT, "")
    # XLA too takes its default for what is no number
    return (int(text) if text.strip().isdecimal() else PINNED_GIB) << 30


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def check_limits(root: Path = Path("/")) -> None:
    """Refuse a process whose own limits leave less than the reserve, which every plan needs.

    XLA would end it without an error where it cannot begin its threads.

    Raises:
        ValidationError: says what is left.
    """
    left = left_of_process(root, 0.0)
    if left and min(left) < RESERVE_BYTES:
        raise ValidationError(
            "ulimit",
            _gb(max(0, min(left))),
            f"a limit of the process (ulimit -v, ulimit -d) that leaves {_gb(RESERVE_BYTES)} "
            "beside what Python and jax take",
        )
