"""The differences between the supported versions of JAX, and nothing else (0.10.2 to 0.12.x)."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NAMED_TRANSPOSE = jax.__version_info__ < (0, 11)
INDEXED_LOAD = jax.__version_info__ < (0, 11)


def transposed(ref: Any) -> Any:
    """A two-dimensional shared-memory reference seen with its axes swapped."""
    if NAMED_TRANSPOSE:
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def load_row(ref: Any, layout: Any) -> jax.Array:
    """A vector in memory as registers laid out like a row or column of a tile."""
    load: Any = plgpu.load
    indices = ((),) if INDEXED_LOAD else ()
    return load(ref, *indices, layout=layout, optimized=False)


def mosaic_gpu_interpreter() -> type | None:
    """The parameters class of the Mosaic GPU interpreter; None where JAX has no usable one."""
    return getattr(plgpu, "InterpretGPUParams", None)


def result_like(operand: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies over the mesh axes over which `operand` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(operand).manual_axis_type)


def load_as(ref: Any, layout: Any, optimized: bool = False) -> jax.Array:
    """What a reference to shared or device memory holds, in registers of that layout."""
    index = ((),) if NAMED_TRANSPOSE else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def store_plain(ref: Any, value: jax.Array) -> None:
    """Writes registers to memory without a swizzle, whatever the order costs.

    JAX 0.12 refuses by default what may touch parts of cache lines or conflict in banks.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def hbm_operand(operand: jax.Array, interpret: Any) -> tuple[jax.Array, pl.BlockSpec]:
    """An operand that a TPU kernel reads in HBM, and its block specification.

    Without the constraint XLA may first copy an operand that fits there into VMEM as a whole. The
    plain interpreter (interpret=True) of JAX 0.10 knows no memory spaces.
    """
    if interpret is True:
        return operand, pl.BlockSpec(memory_space=pl.ANY)
    from jax.experimental.pallas import tpu as pltpu

    constrained = pltpu.with_memory_space_constraint(operand, pltpu.HBM)
    return constrained, pl.BlockSpec(memory_space=pltpu.HBM)
