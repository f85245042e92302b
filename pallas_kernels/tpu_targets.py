"""TPUs that are not there: a mesh of them, for compilation on any machine that has libtpu."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels.errors import KernelError
from pallas_kernels.gpu_targets import CompilerMissingError, environment


@dataclass(frozen=True, slots=True)
class TpuTarget:
    """A kind of TPU.

    Attributes:
        name: device_kind as the runtime reports it.
        topologies: names that libtpu knows, by the number of chips.
        memory: bytes of device memory a chip.
    """

    name: str
    topologies: dict[int, str]
    memory: int


TPU_TARGETS = {
    "v5e": TpuTarget("TPU v5 lite", {4: "v5e:2x2", 8: "v5e:2x4"}, 16 * 2**30),
    "v5p": TpuTarget("TPU v5", {4: "v5p:2x2x1", 8: "v5p:2x2x2"}, 95 * 2**30),
    "v6e": TpuTarget("TPU v6 lite", {4: "v6e:2x2", 8: "v6e:2x4"}, 32 * 2**30),
}


def tpu_mesh(kind: str = "v5e", devices: int = 1, axis: str = "model") -> Mesh:
    """A mesh of TPU chips that are not there. JAX must have been told to run on the CPU.

    Args:
        kind: a key of TPU_TARGETS.
        devices: how many, at most 8.
        axis: name of the mesh's one axis.

    Raises:
        CompilerMissingError: libtpu is not installed.
        KernelError: the kind or the number of devices is unknown.
    """
    if kind not in TPU_TARGETS:
        raise KernelError("kind", repr(kind), f"one of {', '.join(TPU_TARGETS)}")
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerMissingError(
            'compilation for an absent TPU needs libtpu (pip install "jax[tpu]")'
        )
    known = TPU_TARGETS[kind].topologies
    size = min((size for size in known if size >= devices), default=None)
    if size is None:
        raise KernelError("devices", devices, f"at most {max(known)}")
    # libtpu would look for a machine with chips, and refuse to load beside another process
    with environment(
        TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
    ):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=known[size])
    return Mesh(np.array(topology.devices[:devices]), (axis,))
