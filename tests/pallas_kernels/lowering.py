"""Lowering for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")
A100 = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")


def lowered_for_cuda(
    function: Callable[..., Any], *operands: Any, device: AbstractDevice = H200
) -> jax.stages.Lowered:
    """A function of arrays or ShapeDtypeStructs, lowered for that device."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
