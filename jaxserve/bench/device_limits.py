"""What this device can do at most: the fastest matrix product and the fastest read, measured."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.observability.process_collector import usable_cpus
from pallas_kernels import choose_backends
from pallas_kernels.linear import linear

CPU_SIDE, GPU_SIDE, QUICK_SIDE = 1024, 8192, 64
LARGE_COPY = 4 * 2**30  # bytes, of a device with memory of its own
LARGEST_READ = 2**30  # bytes of a CPU's working set; a larger one is in no cache either
LEAST_READ = 2**27  # bytes that a sample of a CPU's reads goes through, whatever the working set
SAMPLES = 5
MARGIN = 1.25  # a probe is no bound: other programs get somewhat more, and machines have noise
# times the products of an engine with 8-bit or 4-bit weights: integer units do up to four
# multiplications where a float32 unit does one
NARROW_PRODUCTS = 4

Product = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that was measured of a device.

    Attributes:
        flops_per_second: of a dense matrix product of 16-bit or 32-bit numbers.
        bytes_per_second: read from a working set of the size that was asked for.
        product: which product was the fastest.
    """

    flops_per_second: float
    bytes_per_second: float
    product: str

    def larger(self, other: Limits) -> Limits:
        """The larger of each figure, of two measurements of one device."""
        product = max(self, other, key=lambda one: one.flops_per_second)
        moved = max(self.bytes_per_second, other.bytes_per_second)
        return Limits(product.flops_per_second, moved, product.product)

    def shares(self, seconds: float, flops: float, read_bytes: float) -> tuple[float, float]:
        """Of the products and of the reads that this device could have done in some time."""
        return (
            flops / seconds / self.flops_per_second,
            read_bytes / seconds / self.bytes_per_second,
        )

    def beyond(
        self, what: str, seconds: float, flops: float, read_bytes: float, bits: int
    ) -> list[str]:
        """A line for each figure that this device cannot have reached.

        Args:
            what: whose figures they are.
            seconds: that it took.
            flops, read_bytes: the least that it needed.
            bits: of the engine's weights.
        """
        products = self.flops_per_second * (NARROW_PRODUCTS if bits < 16 else 1)
        found = [
            ("GFLOP/s", flops / seconds, products),
            ("GB/s", read_bytes / seconds, self.bytes_per_second),
        ]
        return [
            f"{what}: {rate / 1e9:.1f} {unit} at least, in {seconds:.3g} s, is beyond the "
            f"{limit / 1e9:.1f} {unit} that this machine was measured to have ({MARGIN}x allowed)"
            for unit, rate, limit in found
            if rate > MARGIN * limit
        ]

    def text(self) -> str:
        """For people."""
        flops, moved = self.flops_per_second / 1e9, self.bytes_per_second / 1e9
        return f"{flops:.0f} GFLOP/s ({self.product}), {moved:.1f} GB/s read"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return max(1, int(usable_cpus()))


def seconds_of_one(run: Product, calls: int) -> float:
    """The time of one of several calls that are queued at once, the first two not counted."""
    jax.block_until_ready(run())
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def measure_limits(
    working_set: int,
    *,
    quick: bool = False,
    more: Callable[[int], Mapping[str, Product]] = lambda side: {},
) -> Limits:
    """Measure the default device of this process.

    Args:
        working_set: bytes that are read again and again, such as a model's weights: a small one
            stays in the caches.
        quick: tiny products, whose figures mean little.
        more: further products of two square matrices of a given side, by name.
    """
    on_host = jax.default_backend() == "cpu"
    side = QUICK_SIDE if quick else CPU_SIDE if on_host else GPU_SIDE
    calls = 3 if on_host else 10
    rates = {
        name: 2 * side**3 / seconds_of_one(run, calls)
        for name, run in {**_products(side), **more(side)}.items()
    }
    fastest = max(rates, key=lambda name: rates[name])
    moved = _host_read(working_set) if on_host else _device_copy(working_set)
    return Limits(rates[fastest], moved, fastest)


def _products(side: int) -> dict[str, Product]:
    """XLA's, and that of the linear layers that an engine here would have."""
    device = jax.devices()[0]
    backend = choose_backends(device.device_kind, device.platform).linear
    found: dict[str, Product] = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        name = jnp.dtype(dtype).name
        left, right = jax.random.normal(jax.random.key(1), (2, side, side), dtype)
        product = jax.jit(lambda a, b: a @ b)
        found[f"XLA {name}"] = functools.partial(product, left, right)
        if backend != "xla":
            layer = jax.jit(functools.partial(linear, backend=backend))
            found[f"linear layer {name}"] = functools.partial(layer, left, right)
    return found


def _device_copy(working_set: int) -> float:
    """Bytes a second of a large copy, reads and writes counted, and of one of the working set."""
    device = jax.devices()[0]
    held = device.memory_stats() or {}
    # two arrays at a time, beside what this process has there
    room = (held.get("bytes_limit", 4 * LARGE_COPY) - held.get("bytes_in_use", 0)) // 4
    copy = jax.jit(lambda x: x + 1.0)
    rates = []
    for size in {min(LARGE_COPY, room), min(working_set, room)}:
        source = jnp.zeros(max(1, size // 4), jnp.float32)
        rates.append(2 * source.nbytes / seconds_of_one(functools.partial(copy, source), 5))
        del source
    return max(rates)


def _host_read(working_set: int) -> float:
    """Bytes a second that threads on all usable cores read, each a part of its own."""
    threads, working_set = usable_cores(), min(working_set, LARGEST_READ)
    # ones: pages that were never written all are one page of zeros
    parts = [np.ones(max(1, working_set // 8 // threads), np.int64) for _ in range(threads)]
    passes = max(1, LEAST_READ // max(1, working_set))

    def read(part: np.ndarray) -> None:
        for _ in range(passes):
            np.bitwise_or.reduce(part)

    best = float("inf")
    for _ in range(SAMPLES):
        readers = [threading.Thread(target=read, args=(part,)) for part in parts]
        begin = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = min(best, time.perf_counter() - begin)
    return passes * sum(part.nbytes for part in parts) / best
