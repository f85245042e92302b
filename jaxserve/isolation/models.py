"""Several models of one server on this machine: what part of its memory and devices each has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.isolation.places import VISIBLE, settings_of_engine, visible_gpus
from jaxserve.processes.free_memory import available_bytes
from jaxserve.processes.launch import ANYWHERE, Place

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of a GPU's memory, which JAX takes at once
USED = 0.95  # of that by the engine, so that what XLA keeps beside has room
FREE = 0.9  # of a GPU's memory, divided among models that do not say their shares
LEAST = 0.01


class ModelPart(NamedTuple):
    """One of several models.

    Attributes:
        config: of its engine, which knows its share.
        place: of the engine's process.
    """

    config: EngineConfig
    place: Place


def parts_of(configs: Sequence[EngineConfig], stated: Sequence[float | None]) -> list[ModelPart]:
    """The parts of models that are loaded one after the other, in this order.

    Models have GPUs of their own where there are enough, and share all their GPUs else. On a CPU
    they share its cores, and the memory that is free now.

    Args:
        configs: of the models, as they were asked for.
        stated: the share of the memory that each asks for; None: of what is left as much as others.

    Raises:
        ValidationError: names that two of them have, or shares that are more than there is.
    """
    _check(configs)
    configs = [settings_of_engine(one, number) for number, one in enumerate(configs)]
    gpus = visible_gpus(os.environ)
    needed = [one.tensor_parallel_size * one.pipeline_parallel_size for one in configs]
    if sum(needed) <= len(gpus):
        begins = accumulate(needed, initial=0)
        own = [",".join(gpus[at : at + count]) for at, count in zip(begins, needed)]
        return [ModelPart(one, Place({VISIBLE: names})) for one, names in zip(configs, own)]
    shares = shares_of(stated, FREE if gpus else 1.0)
    if gpus:
        return [
            ModelPart(replace(one, gpu_memory_utilization=USED), Place({FRACTION: f"{share:.4f}"}))
            for one, share in zip(configs, shares)
        ]
    # what is free now: pages of a model that is loaded take memory when they are written
    free = available_bytes(reserve=configs[0].memory_reserve)
    if free is None:
        return [ModelPart(one, ANYWHERE) for one in configs]
    most = [max(1, int(free * share)) for share in shares]
    return [ModelPart(replace(one, memory_bytes=own), ANYWHERE) for one, own in zip(configs, most)]


def shares_of(stated: Sequence[float | None], free: float = 1.0) -> list[float]:
    """Shares of the memory; what those that are stated leave of `free` is divided equally.

    Raises:
        ValidationError: they are more than all, or leave nothing for the others.
    """
    known = [share for share in stated if share is not None]
    others, total = len(stated) - len(known), sum(known)
    told = " + ".join(f"{share:g}" for share in known)
    if total > 1.0 + 1e-9:
        allowed = "shares of the memory that are at most 1 together"
        raise ValidationError("gpu_memory_utilization", told, allowed)
    rest = (free - total) / others if others else 0.0
    if others and rest < LEAST:
        allowed = f"shares of the memory that leave some of {free:g} for the other models"
        raise ValidationError("gpu_memory_utilization", told, allowed)
    return [rest if share is None else share for share in stated]


def _check(configs: Sequence[EngineConfig]) -> None:
    seen: dict[str, EngineConfig] = {}
    for config in configs:
        for name in {*config.model_names, config.model}:
            if name in seen:
                allowed = "a name that no other model of the server has (served_model_name)"
                raise ValidationError("models", name, allowed)
            seen[name] = config
        if config.data_parallel_size > 1:
            allowed = "1 in a server of several models, each of which has one engine"
            raise ValidationError("data_parallel_size", config.data_parallel_size, allowed)
        if config.num_processes > 1:
            allowed = "1 in a server of several models, each of which has one process"
            raise ValidationError("num_processes", config.num_processes, allowed)
        if config.metrics_prefix != configs[0].metrics_prefix:
            allowed = f"{configs[0].metrics_prefix!r}, as of the first model"
            raise ValidationError("metrics_prefix", config.metrics_prefix, allowed)
