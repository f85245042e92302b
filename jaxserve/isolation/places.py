"""Which part of the machine each of several engines gets: devices or cores, and folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.processes.launch import ANYWHERE, Place

VISIBLE = "CUDA_VISIBLE_DEVICES"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
DRIVER = Path("/proc/driver/nvidia/gpus")


def places(config: EngineConfig) -> list[Place]:
    """The places of the engines of a server on this machine; one engine has all of it.

    Raises:
        ValidationError: there are fewer GPUs than engines need.
    """
    engines = config.data_parallel_size
    if engines == 1:
        return [ANYWHERE]
    gpus = visible_gpus(os.environ)
    if gpus:
        devices = config.tensor_parallel_size * config.pipeline_parallel_size
        return gpu_places(engines, devices, gpus)
    if not hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return [ANYWHERE] * engines
    return core_places(engines, sorted(os.sched_getaffinity(0)))


def visible_gpus(environment: Mapping[str, str], driver: Path = DRIVER) -> list[str]:
    """The GPUs of NVIDIA's that an engine would use, as `CUDA_VISIBLE_DEVICES` names them.

    Args:
        environment: of the process.
        driver: the folder in which the kernel has an entry for each.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if not any(find_spec(plugin) for plugin in PLUGINS):
        return []
    named = environment.get(VISIBLE)
    if named is not None:
        names = [one.strip() for one in named.split(",")]
        # CUDA takes the list as ending at the first number that is none
        end = next((at for at, one in enumerate(names) if one in ("", "-1")), len(names))
        return names[:end]
    return [str(number) for number, _ in enumerate(driver.glob("*"))]


def gpu_places(engines: int, devices: int, gpus: Sequence[str]) -> list[Place]:
    """Neighbouring GPUs for each engine.

    Args:
        engines: their number.
        devices: of each.
        gpus: names of all.

    Raises:
        ValidationError: there are too few.
    """
    if engines * devices > len(gpus):
        raise ValidationError(
            "data_parallel_size",
            engines,
            f"at most {len(gpus) // devices}: there are {len(gpus)} GPUs here, and each engine "
            f"needs {devices} (tensor_parallel_size * pipeline_parallel_size)",
        )
    parts = [gpus[devices * one : devices * (one + 1)] for one in range(engines)]
    return [Place({VISIBLE: ",".join(part)}) for part in parts]


def core_places(engines: int, cores: Sequence[int]) -> list[Place]:
    """Neighbouring cores for each engine, as equal in number as can be; with more engines than
    cores some share one.

    Args:
        engines: their number.
        cores: numbers of all.
    """
    count = len(cores)
    if engines >= count:
        return [Place(cores=(cores[one % count],)) for one in range(engines)]
    ends = [one * count // engines for one in range(engines + 1)]
    return [Place(cores=tuple(cores[ends[one] : ends[one + 1]])) for one in range(engines)]


def settings_of_engine(asked: EngineConfig, number: int) -> EngineConfig:
    """What one engine is told: its files of pages have a folder of their own."""
    if asked.kv_offloading_path is None:
        return asked
    folder = str(Path(asked.kv_offloading_path) / f"engine-{number}")
    return replace(asked, kv_offloading_path=folder)
