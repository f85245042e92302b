"""The counter that thread blocks pass: in JAX's interpreter, and in PTX for an absent GPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.verify.prove import gpu_targets
from benchmarks.verify.prove.deviceless import environment
from pallas_kernels.compat import load_as, store_plain
from pallas_kernels.interpreter import pass_counter
from tests.absent_devices import HOPPER_INTERPRETER, needs_gpu_compiler, needs_hopper_interpreter
from tests.pallas_kernels.lowering import lowered_for_cuda

BLOCKS = 4


def last_of_all(
    x: jax.Array,  # float32[BLOCKS, 128]
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each block wrote, the sum of it all by the block that came last, and the counters."""

    def kernel(x_gmem, ended, written, total):
        block = lax.axis_index("block")
        spread = plgpu.Layout.WG_STRIDED((128,), vec_size=1)

        def body(before):
            store_plain(written.at[block], load_as(x_gmem.at[block], spread) * 2.0)
            pass_counter(ended.at[1], before, interpreted=interpret is not None)

            @pl.when(before[0] == BLOCKS - 1)
            def _():
                store_plain(total, sum(load_as(written.at[i], spread) for i in range(BLOCKS)))

        pl.run_scoped(body, plgpu.SMEM((1,), jnp.int32), collective_axes=())

    ended = jax.new_ref(jnp.zeros(3, jnp.int32))
    written, total = pl.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((BLOCKS, 128), jnp.float32),
            jax.ShapeDtypeStruct((128,), jnp.float32),
        ),
        mesh=plgpu.Mesh(grid=(BLOCKS,), grid_names=("block",), kernel_name="counted"),
        name="counted",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x, ended)
    return written, total, jax.freeze(ended)


OPERAND = jax.ShapeDtypeStruct((BLOCKS, 128), jnp.float32)


@needs_hopper_interpreter
def test_the_last_block_sees_what_the_others_wrote():
    x = jnp.arange(BLOCKS * 128, dtype=jnp.float32).reshape(OPERAND.shape)
    written, total, ended = last_of_all(x, HOPPER_INTERPRETER())
    np.testing.assert_array_equal(written, 2 * x)
    np.testing.assert_array_equal(total, 2 * x.sum(axis=0))
    np.testing.assert_array_equal(ended, [0, BLOCKS, 0])


def test_the_counters_are_counted_in_place():
    text = lowered_for_cuda(last_of_all, OPERAND).as_text()
    assert re.search(r"output_operand_alias<output_tuple_indices = \[2\], operand_index = 1", text)


@needs_gpu_compiler
def test_one_thread_counts_between_two_barriers(tmp_path):
    """Release and acquire of the whole warpgroup's numbers: barrier, atomic operation, barrier."""
    with environment(MOSAIC_GPU_DUMP_TO=str(tmp_path)):
        gpu_targets.compile_for(
            gpu_targets.gpu_mesh("h200"), functools.partial(last_of_all), OPERAND
        )
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    forms = {
        "barrier": r"bar\.sync",
        "leader": r"elect\.sync",
        "count": r"atom\.add\.acq_rel\.gpu\.global\.u32",
        "tell": r"st\.shared",
        "read": r"ld\.shared",
        "other": r"\b(?:atom|red)\.(?!add\.acq_rel\.gpu\.global\.u32)",
        "read past the cache": r"ld\.global\.nc",
    }
    named = "|".join(f"(?P<{name.replace(' ', '_')}>{form})" for name, form in forms.items())
    order = [found.lastgroup for found in re.finditer(named, text)]
    at = order.index("count")
    assert order.count("count") == 1
    assert order[at - 2 : at + 4] == ["barrier", "leader", "count", "tell", "barrier", "read"]
    assert not {"other", "read_past_the_cache"} & set(order)
