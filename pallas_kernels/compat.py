"""The differences between the supported versions of JAX, and nothing else (0.10.2 to 0.12.x).

Mosaic GPU is imported where it is used: a start on another device would wait 0.3 s for it.
"""

from __future__ import annotations

from typing import Any

import jax

NAMED_TRANSPOSE = jax.__version_info__ < (0, 11)
INDEXED_LOAD = jax.__version_info__ < (0, 11)


def transposed(ref: Any) -> Any:
    """A two-dimensional shared-memory reference seen with its axes swapped."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if NAMED_TRANSPOSE:
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def load_row(ref: Any, layout: Any) -> jax.Array:
    """A vector in memory as registers laid out like a row or column of a tile."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    load: Any = plgpu.load
    indices = ((),) if INDEXED_LOAD else ()
    return load(ref, *indices, layout=layout, optimized=False)


def mosaic_gpu_interpreter() -> type | None:
    """The parameters class of the Mosaic GPU interpreter; None where JAX has no usable one."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return getattr(plgpu, "InterpretGPUParams", None)


def result_like(operand: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies over the mesh axes over which `operand` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(operand).manual_axis_type)


def load_as(ref: Any, layout: Any, optimized: bool = False) -> jax.Array:
    """The content of a reference to shared or device memory, in registers of that layout."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = ((),) if NAMED_TRANSPOSE else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def store_plain(ref: Any, value: jax.Array) -> None:
    """Writes registers to memory without a swizzle, whatever the order costs.

    JAX 0.12 refuses by default what may touch parts of cache lines or conflict in banks.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
