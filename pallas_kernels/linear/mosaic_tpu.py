"""Linear layers with quantised weights on a TPU: one kernel from rows to result.

The kernel of `quantized_matmul` norms and rounds rows before its product and does behind it what
follows. XLA norms and rounds rows that do not fit the chip's own memory, and gates where a tile has
too few channels for two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear.api import Norm
from pallas_kernels.linear.xla import gated_rows, rms_norm
from pallas_kernels.quantized_matmul import QuantizedWeight, RoundedRows, Rounding, Rows
from pallas_kernels.quantized_matmul.mosaic_tpu import Around, Form
from pallas_kernels.quantized_matmul.mosaic_tpu import layer as in_one_kernel
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.tpu_tiles import LANES, holds_rows, plan_of


def layer(
    x: Rows,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    rounds: bool,
    norm: Norm | None,
    bias: jax.Array | None,  # [N]
    gated: bool,
    residual: jax.Array | None,  # [M, N]
    out_dtype: jnp.dtype,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.linear` for the products that the record of `quantized_matmul` takes.

    `rounds`: rows are rounded to 8-bit integers, each with a scale of its own, unless they are.
    """
    rounds = rounds and not isinstance(x, RoundedRows)
    operands = Operands.of(x, weight)
    plan = plan_of(operands, None)
    prepared = rounds or norm is not None
    if prepared and not holds_rows(operands, plan, prepared=True):
        if norm is not None and isinstance(x, jax.Array):
            x = rms_norm(x, norm)
        if rounds and isinstance(x, jax.Array):
            x = Rounding("int8").of(x)
        operands, norm, rounds = Operands.of(x, weight), None, False
    gates = gated and plan.tile_n // 2 % LANES == 0
    whole = not gated or gates
    out = in_one_kernel(
        operands,
        Around(
            norm=None if norm is None else norm.weight[None],
            bias=None if bias is None else bias[None],
            residual=residual if whole else None,
        ),
        Form(
            out_dtype,
            eps=0.0 if norm is None else norm.eps,
            offset=norm is not None and norm.offset,
            rounds=rounds,
            gated=gates,
        ),
        plan,
        interpret=interpret,
    )
    if whole:
        return out
    out = gated_rows(out)
    return out if residual is None else residual + out
