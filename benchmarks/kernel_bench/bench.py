"""The context of every measurement: the device, the kernels chosen for it, and its ceilings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from benchmarks.isolated import describe
from benchmarks.kernel_bench.rows import Ceilings
from jaxserve.bench.device_limits import seconds_of_one
from pallas_kernels import Backends, choose_backends

COLD_BYTES = 2**30  # many times the largest second-level cache
USABLE = 0.8  # of the memory that JAX may use
JAX_SHARE = 0.55  # of the device's memory, where a torch process needs some as well
JAX_ALONE = 0.85  # the driver keeps CUDA graphs in the rest
COMPILE_THREADS = 8


class Peer(Protocol):
    """The process with torch in it."""

    def call(self, request: Any, limit_s: float) -> Any: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """One device and how it is measured.

    Attributes:
        device_kind: as JAX names it.
        platform: as JAX names it.
        backends: what choose_backends says for the device.
        memory: bytes that the operands of a case may fill.
        cold_bytes: how much data a candidate cycles through.
        rounds: turns of each candidate.
        dry_run: tiny shapes on a CPU: the numbers mean nothing.
        peers: whether others are measured beside ours.
        peer: the torch process, if there is one.
        no_peer: why there is none.
        ceilings: of this device, measured once.
    """

    device_kind: str
    platform: str
    backends: Backends
    memory: int
    cold_bytes: int = COLD_BYTES
    rounds: int = 5
    dry_run: bool = False
    peers: bool = True
    peer: Peer | None = None
    no_peer: str = ""
    ceilings: list[Ceilings] = field(default_factory=list)

    def measured_ceilings(self) -> Ceilings:
        """Copy bandwidth and dense matrix rate, measured when first asked for."""
        if not self.ceilings:
            self.ceilings.append(measure_ceilings(self.memory, self.dry_run))
        return self.ceilings[0]


def dry_backends() -> Backends:
    """The Triton kernels in the interpreter, so that options and tuning are exercised."""
    chosen = choose_backends("cpu", "cpu")
    return replace(chosen, decode="triton", prefill="triton", interpret=True)


def make_bench(
    *,
    dry_run: bool = False,
    peers: bool = True,
    peer: Peer | None = None,
    no_peer: str = "",
    rounds: int = 5,
    ceilings: Ceilings | None = None,
) -> Bench:
    """For the first device of this process; ceilings are those measured before, if any."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 8 * 2**30)
    if dry_run:
        settings = {"memory": 2**26, "cold_bytes": 1, "rounds": 1}
    else:
        cold = COLD_BYTES if device.platform != "cpu" else 2**27
        settings = {"memory": int(limit * USABLE), "cold_bytes": cold}
        settings |= {"rounds": rounds}
    return Bench(
        device_kind=device.device_kind,
        platform=device.platform,
        backends=dry_backends()
        if dry_run
        else choose_backends(device.device_kind, device.platform),
        dry_run=dry_run,
        peers=peers,
        peer=peer,
        no_peer=no_peer,
        ceilings=[] if ceilings is None else [ceilings],
        **settings,
    )


def measure_ceilings(memory: int, dry_run: bool) -> Ceilings:
    """A large copy, reads and writes counted, and a large bf16 matrix product of random data."""
    on_gpu = jax.default_backend() == "gpu"
    size = 2**20 if dry_run else min(4 * 2**30 if on_gpu else 2**28, memory // 4)
    side = 8192 if on_gpu and not dry_run else 64 if dry_run else 1024
    source = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    copied = 2 * size / seconds_of_one(functools.partial(copy, source), 5) / 1e9
    del source
    left, right = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    seconds = seconds_of_one(functools.partial(product, left, right), 10)
    return Ceilings(copy_gb_s=copied, matmul_tflop_s=2 * side**3 / seconds / 1e12)


def compiled(
    programs: dict[str, tuple[Callable[..., Any], Sequence[Any]]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compiles programs at the same time.

    Args:
        programs: function and operands by name.

    Returns:
        The executables, and the reasons of those that do not compile.
    """
    executables: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    lowered: dict[str, Any] = {}
    for name, (function, operands) in programs.items():
        try:
            lowered[name] = jax.jit(function).lower(*operands)
        except Exception as error:  # a refusal is a row of the table
            reasons[name] = describe(error)
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        futures = {name: pool.submit(program.compile) for name, program in lowered.items()}
        for name, future in futures.items():
            try:
                executables[name] = future.result()
            except Exception as error:  # a refusal is a row of the table
                reasons[name] = describe(error)
    return executables, reasons
