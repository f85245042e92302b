"""TPUs that are not there: a mesh of them, and compilation for it on any machine.

Needs libtpu (`pip install "jax[tpu]"`), but no TPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.verify.prove.deviceless import compile_for_mesh, environment
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from pallas_kernels.errors import KernelError


@dataclass(frozen=True, slots=True)
class TpuTarget:
    """The facts of a TPU, from its maker's documentation.

    Attributes:
        name: device_kind as the runtime reports it.
        topology: the smallest slice of them that libtpu describes, by its own name for it.
        chips: in that slice.
        larger: a slice of twice as many chips.
        cores: TensorCores of a chip; two of them act as one device.
        bandwidth: memory bandwidth of a chip in bytes a second.
        bf16_rate: bfloat16 operations a chip does in a second.
        int8_rate: int8 operations a chip does in a second.
        memory: bytes of memory of a chip.
    """

    name: str
    topology: str
    chips: int
    larger: str
    cores: int
    bandwidth: int
    bf16_rate: int
    int8_rate: int
    memory: int


TPU_TARGETS = {
    "v5e": TpuTarget(
        "TPU v5 lite", "v5e:2x2", 4, "v5e:2x4", 1, 819_000_000_000,
        197_000_000_000_000, 394_000_000_000_000, 16 << 30,
    ),
    "v5p": TpuTarget(
        "TPU v5", "v5p:2x2x1", 4, "v5p:2x2x2", 2, 2_765_000_000_000,
        459_000_000_000_000, 918_000_000_000_000, 95 << 30,
    ),
    "v6e": TpuTarget(
        "TPU v6 lite", "v6e:2x2", 4, "v6e:2x4", 1, 1_640_000_000_000,
        918_000_000_000_000, 1_836_000_000_000_000, 32 << 30,
    ),
}  # fmt: skip
# libtpu asks a metadata server about the machine that it is on, unless it is told, and refuses to
# be loaded by two processes at once, as if there were a TPU to share
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def require_compiler() -> None:
    """Checks that libtpu is installed.

    Raises:
        CompilerMissingError: it is not.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerMissingError(
            'compilation for an absent TPU needs libtpu (pip install "jax[tpu]")'
        )


def tpu_mesh(kind: str = "v5e", devices: int = 1, axis: str = "model") -> Mesh:
    """A mesh of TPUs that are not there. JAX must have been told to run on the CPU.

    Args:
        kind: a key of TPU_TARGETS.
        devices: how many, at most 8.
        axis: name of the mesh's one axis.

    Raises:
        CompilerMissingError: libtpu is not installed.
        KernelError: the kind is unknown, or there are too many devices.
    """
    if kind not in TPU_TARGETS:
        raise KernelError("kind", repr(kind), f"one of {', '.join(TPU_TARGETS)}")
    target = TPU_TARGETS[kind]
    if not 1 <= devices <= 2 * target.chips:
        raise KernelError("devices", devices, f"1 to {2 * target.chips} of a {target.larger} slice")
    slice_name = target.topology if devices <= target.chips else target.larger
    require_compiler()
    unset = {name: value for name, value in QUIET.items() if name not in os.environ}
    with environment(**unset):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_name)
    return Mesh(np.array(topology.devices[:devices]), (axis,))


def compile_for(mesh: Mesh, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """`compile_for_mesh` for a mesh of `tpu_mesh`.

    Raises:
        CompilerMissingError: libtpu is not installed.
    """
    require_compiler()
    return compile_for_mesh(mesh, function, *operands, **options)
