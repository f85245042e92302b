"""A counter in device memory that thread blocks of one Hopper kernel pass one after another.

"The last block to end does the rest" (NVIDIA, CUDA samples, threadFenceReduction): no block waits
for another, so it needs no promise that all of them run at the same time.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref

# release: later blocks see the writes made before; acquire: the other way round
ADD_ONE = "atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;"


def pass_counter(counter: Any, before: Any) -> None:
    """Counts this warpgroup and tells it how many passed before it.

    What those wrote to device memory before they passed can be read by all threads of the
    warpgroup when this returns. Lane semantics.

    Args:
        counter: int32[] in device memory.
        before: int32[1] in shared memory, for the answer; of this warpgroup alone.
    """
    _pass_counter(counter, before)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _pass_counter(_: Any, counter: ir.Value, before: ir.Value) -> None:
    integer = ir.IntegerType.get_signless(32)
    # all threads have written, and have read the answer before this one
    mosaic.warpgroup_barrier()
    with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
        place, zero = utils.memref_ptr(counter), utils.c(0, ir.IndexType.get())
        form = "=r,l,~{memory}"
        found = llvm.InlineAsmOp(integer, [place], ADD_ONE, form, has_side_effects=True)
        memref.store(found.result, before, [zero])
    mosaic.warpgroup_barrier()
