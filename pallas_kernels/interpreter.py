"""The operations that JAX's interpreters need in another form than devices, and nothing else.

A kernel calls these functions and does not ask what runs it: each has the code that ships, and
beside it the nearest that an interpreter has. Mosaic is imported where it is used, see `compat`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def is_used(interpret: Any) -> bool:
    """Whether a kernel's `interpret` asks for an interpreter; None compiles."""
    return interpret is not None


def of_call(interpret: Any) -> Any:
    """A TPU kernel's `interpret` as `pl.pallas_call` takes it."""
    return False if interpret is None else interpret


def is_used_by_triton(interpret: Any) -> bool:
    """The same for a Triton kernel, which has Pallas' plain interpreter whatever is asked for."""
    return bool(interpret)


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


def pass_counter(counter: Any, before: Any, *, interpreted: bool) -> None:
    """Counts a warpgroup, see `hopper.counter`: int32[] counter, int32[1] before.

    The interpreter knows no atomic operation and runs thread blocks one after another.
    """
    from pallas_kernels.hopper import counter as atomic

    if not interpreted:
        atomic.pass_counter(counter, before)
        return
    before[0] = counter[...]
    counter[...] = counter[...] + 1


def add_product(
    out: jax.Array,  # float32[M, N]
    held: Any,
    left: jax.Array,  # [M, K]
    multiply: Callable[[Any, Any], None],
    turn: Callable[[], None],
    staging: Callable[[], Any],
    *,
    interpreted: bool,
) -> tuple[jax.Array, Any]:
    """The sum of out and a product of Hopper's tensor cores, and what is held meanwhile.

    The interpreter has neither a register operand nor an initialised accumulator.

    Args:
        out: the warpgroup's accumulator, in registers.
        held: arrays that are computed before the product begins.
        left: the product's left operand, in registers.
        multiply: adds the product to an accumulator, and waits for it; given left, or a reference.
        turn: waits for the tensor cores.
        staging: shared memory [M, K] for the interpreter.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not interpreted:
        out, held, left = lax.optimization_barrier((out, held, left))
        turn()
        return pl.run_state(lambda acc: multiply(acc, left))(plgpu.ACC.init(out)), held
    staged = staging()
    staged[...] = left
    plgpu.commit_smem()
    turn()

    def product(acc: Any) -> jax.Array:
        multiply(acc, staged)
        return acc[...]

    rows, columns = out.shape
    return out + pl.run_scoped(product, plgpu.ACC((rows, columns), jnp.float32)), held


def multiply(
    acc: Any, left: jax.Array, right: Any, staging: Callable[[], Any], *, interpreted: bool
) -> None:
    """wgmma of a left operand in registers; the interpreter takes it from shared memory only."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not interpreted:
        plgpu.wgmma(acc, left, right)
        return
    staged = staging()
    staged[...] = left
    plgpu.commit_smem()
    plgpu.wgmma(acc, staged, right)
    plgpu.wgmma_wait(0)


def scaled_subnormals(
    bits: jax.Array, dtype: jnp.dtype, spacing: int, power: int, *, interpreted: bool
) -> jax.Array:
    """The numbers of 16 bits that these integers are the bits of, times 2 ** power, exactly.

    XLA:CPU takes subnormal numbers for zeros.

    Args:
        bits: integers of 16 bits, of subnormal numbers.
        dtype: bfloat16 or float16.
        spacing: log2 of its smallest subnormal number.
        power: exponent of 2.
    """
    if not interpreted:
        return lax.bitcast_convert_type(bits, dtype) * jnp.asarray(2.0**power, dtype)
    return (bits.astype(jnp.float32) * 2.0 ** (spacing + power)).astype(dtype)
