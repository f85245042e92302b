"""GPUs that are not there: a mesh of them, and compilation for it on any machine.

Needs JAX's CUDA plugin and the `ptxas` assembler, but neither a driver nor a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.verify.prove.deviceless import compile_for_mesh, environment
from pallas_kernels.errors import KernelError

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class CompilerMissingError(RuntimeError):
    """This machine lacks what deviceless compilation needs; the message says what."""


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """The facts of a GPU, from its maker's data sheet: what XLA asks for, and matrix rates.

    Attributes:
        name: device_kind as the driver reports it.
        capability: compute capability, major and minor.
        multiprocessors: streaming multiprocessors.
        shared_memory: bytes of shared memory a multiprocessor.
        block_shared_memory: bytes of shared memory that one thread block may ask for.
        lanes: float32 units a multiprocessor.
        bandwidth: memory bandwidth in bytes a second.
        l2_cache: bytes of second-level cache.
        clock: GHz.
        memory: bytes of device memory.
        bf16_rate: dense bfloat16 operations a second of the tensor cores.
        int8_rate: dense int8 operations a second; where there is float8, its rate too.
        threads: most threads a multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    block_shared_memory: int
    lanes: int
    bandwidth: int
    l2_cache: int
    clock: float
    memory: int
    bf16_rate: int
    int8_rate: int
    threads: int = 2048

    @property
    def architecture(self) -> str:
        """The `-arch` of ptxas; Hopper's wgmma needs the accelerated feature set."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


GPU_TARGETS = {
    "h200": GpuTarget(
        "NVIDIA H200", (9, 0), 132, 233472, 232448, 128, 4_800_000_000_000, 52428800, 1.98,
        151_397_597_184, 989_000_000_000_000, 1_979_000_000_000_000,
    ),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 232448, 128, 3_350_000_000_000, 52428800,
        1.98, 85_100_068_864, 989_000_000_000_000, 1_979_000_000_000_000,
    ),
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912, 64, 2_039_040_000_000, 41943040,
        1.41, 85_100_068_864, 312_000_000_000_000, 624_000_000_000_000,
    ),
    "l4": GpuTarget(
        "NVIDIA L4", (8, 9), 58, 102400, 101376, 128, 300_096_000_000, 50331648,
        2.04, 23_603_970_048, 121_000_000_000_000, 242_000_000_000_000, 1536,
    ),
    "b200": GpuTarget(
        "NVIDIA B200", (10, 0), 148, 233472, 232448, 128, 7_672_320_000_000, 132644864,
        1.965, 191_514_411_008, 2_250_000_000_000_000, 4_500_000_000_000_000,
    ),
}  # fmt: skip


def cuda_of_plugin() -> int:
    """The CUDA version of the installed plugin, the newest where both are: 12 or 13."""
    return 13 if importlib.util.find_spec(PLUGINS[0]) is not None else 12


def target_config(target: GpuTarget, cuda: int) -> str:
    """The text protocol buffer that describes the GPU, and CUDA's version, to XLA."""
    major, minor = target.capability
    version = {12: "12.9.0", 13: "13.0.0"}[cuda]
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  name: "{target.name}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {target.multiprocessors} fpus_per_core: {target.lanes}
  clock_rate_ghz: {target.clock} memory_bandwidth: {target.bandwidth}
  device_memory_size: {target.memory} l2_cache_size: {target.l2_cache}
  shared_memory_per_core: {target.shared_memory}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {target.block_shared_memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {target.threads}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64 driver_version: "{version}" runtime_version: "{version}"
  compile_time_toolkit_version: "{version}" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
device_description_str: "{target.name}"
runtime_version {{ major: {cuda} }}
dnn_version_info {{ major: 9 minor: 12 }}
"""


def find_ptxas() -> Path | None:
    """The assembler in NVIDIA's Python wheels, else the one on PATH.

    The wheels come with JAX's plugin; a toolkit on PATH may be older than the PTX of this JAX.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        for candidate in sorted(Path(folder).glob("*/bin/ptxas")):
            return candidate
    found = shutil.which("ptxas")
    return Path(found) if found else None


def require_compiler() -> Path:
    """The path of ptxas.

    Raises:
        CompilerMissingError: JAX's CUDA plugin or ptxas is not installed.
    """
    missing = []
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(plugin) for plugin in PLUGINS
    ):
        missing.append('JAX\'s CUDA plugin (pip install "jax[cuda12]" or "jax[cuda13]")')
    ptxas = find_ptxas()
    if ptxas is None:
        missing.append("ptxas (pip install nvidia-cuda-nvcc, or a CUDA toolkit on PATH)")
    if missing or ptxas is None:
        raise CompilerMissingError("compilation for an absent GPU needs " + " and ".join(missing))
    return ptxas


def gpu_mesh(kind: str = "h200", devices: int = 1, axis: str = "model") -> Mesh:
    """A mesh of GPUs that are not there. JAX must have been told to run on the CPU.

    Args:
        kind: a key of GPU_TARGETS.
        devices: how many.
        axis: name of the mesh's one axis.

    Raises:
        CompilerMissingError: JAX's CUDA plugin or ptxas is not installed.
        KernelError: the kind is unknown.
    """
    if kind not in GPU_TARGETS:
        raise KernelError("kind", repr(kind), f"one of {', '.join(GPU_TARGETS)}")
    require_compiler()
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target_config(GPU_TARGETS[kind], cuda_of_plugin()),
        topology=f"1x1x{devices}",
    )
    return topologies.make_mesh(topology, (devices,), (axis,))


def compile_for(mesh: Mesh, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """`compile_for_mesh` for a mesh of `gpu_mesh`.

    Raises:
        CompilerMissingError: JAX's CUDA plugin or ptxas is not installed.
    """
    ptxas = require_compiler()
    with environment(PATH=f"{ptxas.parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        return compile_for_mesh(mesh, function, *operands, **options)
