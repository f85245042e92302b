"""The device mesh: axis "model" is tensor parallel, axis "stage" has stages of layers."""

from __future__ import annotations

import functools
import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxserve.errors import ValidationError

AXIS_NAMES = ("stage", "model")
# devices from which on a step is divided; 1 runs the code of several devices on one (gpu_check)
DIVIDED_FROM = 2


def devices() -> list[jax.Device]:
    """`jax.devices()`.

    Raises:
        ValidationError: this process was forked from one that had asked for them. It has not the
            threads of the other's devices, so a program would wait for ever.
    """
    if _first_process() != os.getpid():
        allowed = (
            "'spawn' or 'forkserver' where the parent process has used a device: nothing computes "
            "in a forked child. multiprocessing.set_start_method('spawn') sets it"
        )
        raise ValidationError("start method of this process", "fork", allowed)
    return jax.devices()


@functools.cache
def _first_process() -> int:
    """The process that was the first to ask, which its forks inherit."""
    return os.getpid()


def make_mesh(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Mesh:
    """Returns a mesh of shape (pipeline_parallel_size, tensor_parallel_size).

    Its axes are "stage" and "model".

    Args:
        tensor_parallel_size: devices that each layer is spread over, the first of
            `jax.devices()`; of several processes the first of each, in equal numbers.
        pipeline_parallel_size: stages of layers, each with so many devices.

    Raises:
        ValidationError: there are fewer devices than that, or as `devices`.
    """
    count = tensor_parallel_size * pipeline_parallel_size
    available = _in_equal_numbers(count, devices())
    if tensor_parallel_size < 1 or tensor_parallel_size > len(available):
        kind = available[0].device_kind
        hint = ""
        if kind == "cpu" and tensor_parallel_size > 1:
            hint = f"; JAX_NUM_CPU_DEVICES={tensor_parallel_size} in the environment makes as many"
        raise ValidationError(
            "tensor_parallel_size",
            tensor_parallel_size,
            f"1 to {len(available)}, the number of devices here ({kind}){hint}",
        )
    if count > len(available):
        raise ValidationError(
            "pipeline_parallel_size",
            pipeline_parallel_size,
            f"at most {len(available) // tensor_parallel_size}: each stage takes "
            f"{tensor_parallel_size} (tensor_parallel_size) of {len(available)} devices",
        )
    return jax.make_mesh(
        (pipeline_parallel_size, tensor_parallel_size),
        AXIS_NAMES,
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=available[:count],
    )


def own_part(mesh: Mesh) -> Mesh:
    """The mesh of those devices that this process has; all, where there is one process."""
    own = [one for one in mesh.devices.flat if one.process_index == jax.process_index()]
    if len(own) == mesh.size:
        return mesh
    devices = np.array(own).reshape(*(1,) * (mesh.devices.ndim - 1), -1)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def row_spec(rows: int, mesh: Mesh) -> PartitionSpec:
    """How so many rows of logits lie: divided among the devices, or all of them on each."""
    return PartitionSpec("model") if rows % mesh.shape["model"] == 0 else PartitionSpec()


def _in_equal_numbers(count: int, devices: list[jax.Device]) -> list[jax.Device]:
    """The devices of one process; of several the first of each, by their numbers."""
    processes = jax.process_count()
    if processes == 1:
        return devices
    each = count // processes
    chosen: list[jax.Device] = []
    for process in range(processes):
        own = [device for device in devices if device.process_index == process]
        if len(own) < each:
            raise ValidationError(
                "tensor_parallel_size",
                count,
                f"at most {processes * len(own)}: process {process} of {processes} has {len(own)} "
                f"devices ({devices[0].device_kind})",
            )
        chosen += own[:each]
    return chosen


def is_divided(devices: int) -> bool:
    """Whether a step runs as on several devices, each with its part of the heads."""
    return devices >= DIVIDED_FROM
