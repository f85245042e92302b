"""Linear layers over several devices: each multiplies its part of the weight.

Where outputs are divided nothing travels. Where inputs are, each device has a part of every sum,
and one sum over the devices follows (`jaxserve.parallel.spread`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel.spread import OWN_ROWS, WHOLE, Spread, summed
from pallas_kernels.finish_rows import finish_rows
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.quantized_matmul import Rows

if TYPE_CHECKING:
    from jaxserve.models.linear import LinearForm, Projection


def reordered(x: jax.Array, order: jax.Array) -> jax.Array:
    """x [T, in] with its inputs in another order."""
    # without a barrier XLA:CPU gives the gather a layout for which it has no bfloat16 product
    return jax.lax.optimization_barrier(x[:, order])


def spread_product(
    projection: Projection, spread: Spread, x: Rows, given: dict[str, Any], **options: Any
) -> jax.Array:
    """`Projection.__call__` over several devices: x [T, in] -> [T, *out_shape].

    Args:
        given: `norm`, `residual` and `live`.
        options: `gated` and `out_dtype`.
    """
    norm, residual, live = given["norm"], given["residual"], given["live"]
    if spread.divides(projection.axes[-1]):
        assert not options["gated"] and isinstance(x, jax.Array)
        if norm is not None:
            x = rms_norm(x, norm)  # of all inputs

        def part(own: Projection, x: jax.Array, live: jax.Array | None) -> jax.Array:
            return own(x, live=live, **options)

        out = _sum_over_inputs(projection, spread, part, x, live)
        return out if residual is None else residual + out
    weight = None if norm is None else norm.weight

    def local(
        own: Projection,
        x: Rows,
        weight: jax.Array | None,
        residual: jax.Array | None,
        live: jax.Array | None,
    ) -> jax.Array:
        own_norm = None if norm is None else norm._replace(weight=weight)
        return own(x, norm=own_norm, residual=residual, live=live, **options)

    rows = spread.rules.spec((None, *projection.axes[:-1]))
    operands, specs = (x, weight, residual, live), (WHOLE, WHOLE, rows, WHOLE)
    whole: jax.Array = spread.run(projection, local, operands, specs=specs, out_specs=rows)
    return whole


def spread_parts(projection: Projection, spread: Spread, x: Rows) -> jax.Array:
    """`Projection.in_parts` over several devices: x [T, in] -> [S, T, *out_shape]."""
    if spread.divides(projection.axes[-1]):
        assert isinstance(x, jax.Array)

        def part(own: Projection, x: jax.Array, live: None) -> jax.Array:
            return _added(own.in_parts(x), x.dtype)

        return _sum_over_inputs(projection, spread, part, x, None, divides_rows=True)[None]
    rows = spread.rules.spec((None, None, *projection.axes[:-1]))
    parts: jax.Array = spread.run(
        projection, lambda own, x: own.in_parts(x), (x,), specs=(WHOLE,), out_specs=rows
    )
    return parts


def spread_after(
    projection: Projection,
    spread: Spread,
    form: LinearForm,
    product: jax.Array,
    dtype: Any,
    gate: str | None,
) -> jax.Array:
    """`Projection.after` over several devices: product [S, T, N] -> [S, T, *out_shape]."""
    weight: Any = projection.weight.get_value()
    ordered = isinstance(weight, QuantArray) and weight.order is not None
    if ordered or not spread.divides(projection.axes[-1]):  # the inputs come from all devices
        return projection.in_parts(finish_rows(product, dtype=dtype, gate=gate, backend="xla"))

    def part(own: Projection, product: jax.Array, live: None) -> jax.Array:
        return _added(own.after(form, product, dtype, gate=gate), dtype)

    return _sum_over_inputs(projection, spread, part, product, None, divides_rows=True)[None]


def _added(parts: jax.Array, dtype: Any) -> jax.Array:
    """Parts [S, T, *out_shape] -> their sum [T, *out_shape] in `dtype`, in which it travels."""
    return parts[0].astype(dtype) if len(parts) == 1 else parts.sum(0, jnp.float32).astype(dtype)


def _sum_over_inputs(
    projection: Projection,
    spread: Spread,
    part: Callable[..., jax.Array],
    x: jax.Array,
    live: jax.Array | None,
    *,
    divides_rows: bool = False,
) -> jax.Array:
    """part(projection of a device, its inputs, live) [T, *out_shape] of all devices, added up in
    the type of the parts, and the bias; the last axis of x is that of the inputs.

    `divides_rows`: each device has its own rows of it where `Spread.divides_rows`.
    """
    by_rows = divides_rows and spread.divides_rows(x.shape[-2], math.prod(projection.out_shape))
    weight: Any = projection.weight.get_value()
    ordered = isinstance(weight, QuantArray) and weight.order is not None
    if ordered:
        x = reordered(x, weight.order)

    def local(own: Projection, x: jax.Array, live: jax.Array | None) -> jax.Array:
        own.bias = None
        if ordered:
            own.weight.set_value(replace(own.weight.get_value(), order=None))
        return summed(part(own, x, live), by_rows=by_rows)

    columns = spread.rules.spec((*(None,) * (x.ndim - 1), projection.axes[-1]))
    out: jax.Array = spread.run(
        projection,
        local,
        (x, live),
        specs=(columns, WHOLE),
        out_specs=OWN_ROWS if by_rows else WHOLE,
    )
    if projection.bias is None:
        return out
    return (out.astype(jnp.float32) + projection.bias[...].astype(jnp.float32)).astype(out.dtype)
